"""A package that is broken in five ways: its problems are listed, it does no harm, it is refused only if selected, and
one word blocks it."""

from __future__ import annotations

import json

import pytest

from .conftest import composing, listing, refusal, words

pytestmark = pytest.mark.nightly

NAME = "dovetail-wreck"
PACKAGE = f"{NAME} 0.3"
BLOCK = {"DOVETAIL_PLUGINS": f"-{NAME}"}
REASONS = {
    (None, None): "import_error: ModuleNotFoundError: No module named 'a_module_that_nobody_has'",
    (None, None, 2): "there is no hook `dovetail_component`. Did you mean `dovetail_components`?",
    ("scheduler", "static"): "scheduler=static is built in: give the component another name",
    ("scheduler", "bygone"): "it is made for scheduler/9.0, and this Dovetail implements scheduler/0.3",
    ("kv_cache", "paged"): "kv_cache/paged.yaml has the name of a component",
    ("model", "tiny_draft"): f"model/tiny_draft.yaml is in dovetail 0.1.0 and in {PACKAGE}",
    ("preset", "tiny_cpu"): f"preset/tiny_cpu.yaml is in dovetail 0.1.0 and in {PACKAGE}",
}
CHOICES = [reason[:2] for reason in REASONS if reason[0] and reason != ("scheduler", "static")]


def word(kind: str, name: str) -> str:
    return f"+{kind}={name}" if kind == "preset" else f"{kind}={name}"


def test_all_of_it_is_listed(dovetail, wreck):
    """Problems are listed with reason and package, as JSON and as text."""
    (_, listed), (code, table) = dovetail(listing(), words("app=plugins", COLUMNS="200"), path=(wreck,))
    problems = [p for p in json.loads(listed)["problems"] if p["package"] == PACKAGE]
    left = list(problems)
    for (kind, name, *_), reason in REASONS.items():
        (found,) = [p for p in left if (p["kind"], p["name"]) == (kind, name) and reason in p["reason"]]
        left.remove(found)
    assert left == []
    shown = " ".join(table.split())
    assert code == 0 and shown.count(PACKAGE) >= len(REASONS)
    assert "a_module_that_nobody_has" in shown and "scheduler=bygone" in shown


def test_the_default_runs(dovetail, bare, wreck, lighthouse):
    generating = words("generate.max_tokens=4", "engine.device=cpu")
    (code, out), (_, default) = dovetail(generating, composing(), path=(wreck,))
    assert (code, "4 tokens" in out) == (0, True), out
    assert default == bare[1]
    preset = composing("+preset=lighthouse")
    assert dovetail(preset, path=(wreck, lighthouse)) == dovetail(preset, path=(lighthouse,))


def test_who_chooses_it_is_told_why(dovetail, wreck):
    *chosen, unheard = dovetail(
        *(words(word(*choice)) for choice in CHOICES), words("scheduler=unheard"), path=(wreck,)
    )
    for (kind, name), result in zip(CHOICES, chosen, strict=True):
        message = refusal(result)
        assert PACKAGE in message and REASONS[kind, name] in message and f"{kind}={name} cannot be used" in message
    # The packages that failed may have had what never got a name.
    message = refusal(unheard)
    assert "no such scheduler" in message and PACKAGE in message
    assert all(REASONS[key] in message for key in REASONS if key[0] is None)


def test_one_word_blocks_it(dovetail, bare, python, wreck):
    usable = [word(*choice) for choice in CHOICES if choice != ("scheduler", "bygone")]
    (_, listed), without = dovetail(listing(**BLOCK), composing(*usable, **BLOCK), path=(wreck,))
    blocked = json.loads(listed)
    assert [(p["package"], p["reason"]) for p in blocked.pop("problems")] == [
        (PACKAGE, f"blocked by DOVETAIL_PLUGINS=-{NAME}")
    ]
    assert blocked == {key: value for key, value in bare[0].items() if key != "problems"}
    assert [without] == dovetail(composing(*usable))
    code = "import sys; from dovetail import compose; compose(app='plugins'); print('dovetail_wreck' in sys.modules)"
    assert [python("-c", code, path=(wreck,), **env).stdout for env in ({}, BLOCK)] == ["True\n", "False\n"]
