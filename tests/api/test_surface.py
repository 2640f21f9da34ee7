"""Public signatures and options are those of surface.json, and `surface.py` demands a version and an entry in the
changelog before it writes the copy anew."""

from __future__ import annotations

import copy
import json

import pytest

import dovetail

from .surface import CHANGELOG, COPY, Surface, differences, missing, surface

HEAD = f"# Changelog\n\n## {dovetail.__version__} (unreleased)\n"


def test_the_copy_is_current() -> None:
    changed = [f"{part}: {name} {lines}" for part, name, lines in differences(stored(), surface())]
    assert not changed, "\n".join(
        [*changed, "docs/versions.md says what such a change needs; then: python tests/api/surface.py"]
    )
    assert stored() == surface(), "python tests/api/surface.py"


def test_the_changelog_has_a_section_of_this_version() -> None:
    assert missing(stored(), stored(), CHANGELOG.read_text(encoding="utf-8")) == []


def stored() -> Surface:
    found: Surface = json.loads(COPY.read_text(encoding="utf-8"))
    return found


def method(new: Surface) -> None:
    new["contracts"]["router"]["names"]["Router"].append("def drain(self, replica: int) -> None")


def abstract(new: Surface) -> None:
    new["contracts"]["router"]["names"]["Router"].append("@abstractmethod def drain(self, replica: int) -> None")


def abstract_with_a_version(new: Surface) -> None:
    abstract(new)
    new["contracts"]["router"]["api"] = ["router/9.0"]


def required(new: Surface) -> None:
    new["contracts"]["router"]["names"]["Arrival"].append("images: int")


def name(new: Surface) -> None:
    new["contracts"]["router"]["names"]["Drain"] = ["class Drain(ABC)", "replica: int"]


def shared(new: Surface) -> None:
    names = new["contracts"]["records"]["names"]
    names["RequestOptions"] = [line.replace("priority: int", "priority: float") for line in names["RequestOptions"]]
    assert names != stored()["contracts"]["records"]["names"]


def option(new: Surface) -> None:
    new["options"]["scheduler=fcfs"]["max_chunk"] = "int = 7"


def policy(new: Surface) -> None:
    names = new["contracts"]["scheduler"]["names"]
    names["PolicyScheduler"] = [line.replace("waiting", "queue") for line in names["PolicyScheduler"]]
    assert names != stored()["contracts"]["scheduler"]["names"]


def python(new: Surface) -> None:
    new["package"]["LLM"].pop()


def hook(new: Surface) -> None:
    del new["hooks"]["dovetail_tuning_tables"]


@pytest.mark.parametrize(
    ("change", "entry", "lacks"),
    [
        (method, "`Router.drain`", []),
        (method, "Routing", ["router: Router changed, but the section"]),
        (abstract, "`Router.drain`", ["router: Router changed, but the version is still router/0.1"]),
        (abstract_with_a_version, "Routing", ["router: Router changed, but the section"]),
        (abstract_with_a_version, "Contract `router/9.0`", []),
        (required, "`Arrival.images`", ["router: Arrival changed, but the version is still router/0.1"]),
        (name, "`Drain`", []),
        (shared, "RequestOptions", ["records: RequestOptions changed, which contracts share"]),
        (policy, "`PolicyScheduler`", ["scheduler: PolicyScheduler changed, but the version is still scheduler/"]),
        (python, "", ["package: LLM changed, but the section"]),
        (python, "`LLM` loses a method", []),
        (option, "", ["scheduler=fcfs: max_chunk changed, but the section"]),
        (option, "`scheduler.max_chunk` is 7", []),
        (
            hook,
            "no tables",
            ["hooks: dovetail_tuning_tables changed, which", "hooks: dovetail_tuning_tables changed, but"],
        ),
    ],
)
def test_what_a_change_needs(change, entry, lacks) -> None:
    new = copy.deepcopy(stored())
    change(new)
    found = missing(stored(), new, f"{HEAD}\n- {entry}\n\n## 0.0.1\n\n- Router max_chunk dovetail_tuning_tables\n")
    assert len(found) == len(lacks) and all(text.startswith(lack) for text, lack in zip(found, lacks, strict=True)), (
        found
    )


def test_every_public_name_is_compared() -> None:
    found = surface()
    known = {name for one in found["contracts"].values() for name in one["names"]} | set(found["package"])
    assert set(dovetail.__all__) - known == {"EngineConfig", "__version__"}


def test_a_released_version_takes_no_changes() -> None:
    (reason,) = missing(stored(), stored(), HEAD.replace(" (unreleased)", ""))
    assert "has no section" in reason
