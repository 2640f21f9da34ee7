"""Options and parts that lanes cannot have are refused in words, before anything is loaded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dovetail.core.compose import compose
from dovetail.core.compose.composition import Lane
from dovetail.core.engine.checks import check_fit
from dovetail.core.errors import DovetailError
from dovetail.core.interfaces import ExpertPlacement

LANES = ("app=generate", "model=small_moe", "engine.device=cpu", "engine.dp=2", "engine.ep=2", "experts=gather")


def refused(*overrides: str) -> str:
    with pytest.raises(DovetailError) as error:
        check_fit(replace(compose([*LANES, "engine.dp=1", *overrides]), lane=Lane(0, 2, "127.0.0.1:1")))
    return str(error.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["experts=whole"],
            ("experts=whole needs every row", "Would work: experts=all_to_all, experts=gather, engine.ep"),
        ),
        (["experts=tensor"], ("experts=tensor", "engine.ep=2")),
        (["engine.ep=3"], ("engine.ep=3 does not divide the 2 ranks of 2 lanes", "engine.ep=1, engine.ep=2")),
        (["engine.overlap_tokens=64"], ("engine.overlap_tokens=64", "Would work: engine.overlap_tokens=0")),
        (["engine.late_launch=true", "engine.depth=2"], ("engine.late_launch", "engine.late_launch=false")),
        (["engine.record=run.rec"], ("engine.record=run.rec", "engine.record=null")),
        (["adapter=lora"], ("adapter=lora", "adapter=none")),
        (["executor.delay=1"], ("executor=inproc with its options", "executor=inproc without delay")),
        (["executor=simulated"], ("executor=simulated with its options", "executor=multiproc")),
        (["model=tiny"], ("it must have routed experts", "experts=tensor")),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_lanes_refuse(overrides: list[str], words: tuple[str, ...]) -> None:
    message = refused(*overrides)
    assert all(part in message for part in words), message


def test_other_layouts_have_no_lanes() -> None:
    """Replicas stay apart while engine.ep is at most engine.tp."""
    found = [compose([*LANES, *more]).lanes for more in ((), ("engine.ep=null",), ("engine.tp=2",), ("engine.dp=1",))]
    assert found == [2, 1, 1, 1]
    assert compose([*LANES, "engine.tp=2", "engine.ep=4"]).expert_ranks == 4


def test_an_option_may_decide_which_rows_a_placement_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(self: ExpertPlacement, config: object) -> None:
        ExpertPlacement.__init__(self, config)
        self.rows = "own"

    monkeypatch.setattr(compose([*LANES, "experts=whole"]).part("experts").target(), "__init__", init)
    check_fit(replace(compose([*LANES, "engine.dp=1", "experts=whole"]), lane=Lane(0, 2, "127.0.0.1:1")))
