"""Packages written for earlier contracts still load, some through an adapter, or are refused in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import dovetail
from dovetail.core.compose import KINDS
from dovetail.core.compose.former import FORMER, adapted
from dovetail.core.interfaces import Collective

from .conftest import listing, pip_install, refusal, run_all, words

FIRST = Path(__file__).parent / "releases" / "first"
UNCHANGED = {"observer", "router", "workload"}
"""Kinds whose contract is the first one. A kind that changes leaves this set."""
CHANGED = {"attention": "attention=first", "grammar": "grammar=first", "logits": "logits=[first]"}
CHANGED |= {kind: f"{kind}=first" for kind in ("model", "quant", "spec_decode")}
ADAPTED = {"cost", "scheduler"}
"""Kinds whose contract changed, and which still run components of the first one. A kind that ends to do so is moved to
CHANGED."""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    site = pip_install(FIRST, tmp_path_factory.mktemp("site") / "first")
    small = ("engine.device=cpu", "engine.kv_pages=64", "observer=[first]")
    former = ("scheduler=first", "cost=first", "engine.drafts=always")
    run = words("app=bench", "workload=first", "workload.most=3", "bench.warmup=0", *former, *small)
    routed = words("router=first", "engine.dp=2", "--cfg", "job")
    refused = (words(text) for text in CHANGED.values())
    return run_all(tmp_path_factory.mktemp("run"), listing(), run, routed, *refused, path=(site,))


def test_unchanged_contracts_run_it(results):
    (code, listed), (ran, out), (routed, _), *_ = results
    assert (code, ran, routed) == (0, 0, 0), out
    found = {c["kind"] for c in json.loads(listed)["components"] if c["package"] == "dovetail-first"}
    assert found == UNCHANGED | ADAPTED
    assert UNCHANGED == {kind for kind in UNCHANGED if KINDS[kind].api.endswith("/0.1")}
    assert out.count("first observer: step") > 2


def test_former_contracts_run_it_with_a_note(results):
    _, (_, out), *_ = results
    for kind in ADAPTED:
        known = FORMER[f"{kind}/0.1"]
        note = f"package dovetail-first 0.1.0: {kind}=first is made for {kind}/0.1; it still runs, but {known.change}."
        assert out.count(note) == 1 and f"Dovetail {known.until} refuses it: write it for {KINDS[kind].api}" in out


def test_an_adapter_is_for_one_release():
    """It leaves FORMER with the release that it names, and is for a contract that is not the present one."""
    numbers = [int(text) for text in dovetail.__version__.split(".")[:2]]
    for api, known in FORMER.items():
        assert numbers < [int(text) for text in known.until.split(".")], f"{api} was to be refused by {known.until}"
        assert api != KINDS[api.partition("/")[0]].api


def test_a_former_collective_norms_sums():
    class First(Collective):
        def boundary(self, x, residual, norm, emit=()):
            return norm(x + 1, residual, emit)

    def norm(x, residual, emit, after=lambda x: x):
        return after(x), residual

    made = adapted("collective/0.1", First)
    made.__abstractmethods__ = frozenset()
    one = object.__new__(made)
    one.reduce = lambda x: x
    assert one.boundary(1, 0, norm) == (2, 0), "its own, where the contract was the same"
    assert one.boundary(1, 0, norm, after=lambda x: 10 * x) == (10, 0), "the default of the contract"
    assert adapted("collective/0.2", First) is First


def test_changed_contracts_refuse_it_in_words(results):
    for kind, result in zip(CHANGED, results[3:], strict=True):
        words = f"it is made for {kind}/0.1, and this Dovetail implements {KINDS[kind].api}"
        assert words in refusal(result) and "dovetail-first 0.1.0" in refusal(result)
