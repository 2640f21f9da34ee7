"""profile_step.py: kernels that run at once are time at work once."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from dovetail.core.compose import compose
from dovetail.core.errors import ConfigError

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "profile_step.py"


def test_what_runs_at_once_counts_once() -> None:
    at_work = runpy.run_path(str(SCRIPT))["at_work"]
    assert at_work([]) == 0
    long, within, across, after = ("long", 0.0, 10.0), ("within", 2.0, 3.0), ("across", 8.0, 4.0), ("after", 15.0, 1.0)
    assert at_work([long, within, across, after]) == 13


def test_a_layer_by_place() -> None:
    """Kernels of one name by where they stand, each to its end from the end of the one in front."""
    by_place = runpy.run_path(str(SCRIPT))["by_place"]
    found, end = [("embed", 0.0, 2.0)], 2.0
    for layer in range(5):
        for name, us in (("attend", 7.0), ("product", 3.0), ("edge", 9.0), ("product", 5.0 + 10 * (layer == 2))):
            # It began while the one in front still ran.
            found.append((name, end - 1.0, us + 1.0))
            end += us
    found += [("norm", end, 4.0), ("attend", end + 4.0, 7.0), ("sample", end + 11.0, 1.0)]
    layer = [("attend", 7.0), ("product", 3.0), ("edge", 9.0), ("product", 5.0)]
    assert by_place(found, "att") == [(name, pytest.approx(us)) for name, us in layer]
    assert by_place(found, "none of these") == []


def test_prompts_by_the_hosts_clock() -> None:
    script = runpy.run_path(str(SCRIPT))
    words = ["model=tiny", "engine.device=cpu", "engine.max_seqs=3", "engine.max_len=64", "engine.token_budget=48"]
    engine = script["start_engine"](compose(words))
    seconds, steps = script["clocked"](engine, 3, 32)
    assert seconds > 0 and steps >= 2 and not engine.has_work
    engine.shutdown()


@pytest.mark.parametrize(
    ("ranks", "executor", "collective"),
    [
        (2, "multiproc", "symm_mem"),
        (24, "multiproc", "symm_mem"),
        (8, "multiproc", "nccl"),
        (8, "simulated", "symm_mem"),
    ],
)
def test_what_two_gpus_cannot_play_is_refused(ranks: int, executor: str, collective: str) -> None:
    pytest.importorskip("triton", reason="no Triton for this platform")
    play = runpy.run_path(str(SCRIPT.with_name("played.py")))["play"]
    with pytest.raises(ConfigError, match=rf"tp={ranks} with executor={executor} and collective={collective}: "):
        play(compose(["app=generate", f"executor={executor}", f"engine.tp={ranks}", f"collective={collective}"]))


def test_a_played_engine_differs_in_its_executor_alone() -> None:
    pytest.importorskip("triton", reason="no Triton for this platform")
    play = runpy.run_path(str(SCRIPT.with_name("played.py")))["play"]
    composition = compose(["app=generate", "+preset=h200_fp8_tp8"])
    played = play(composition)
    assert played.part("executor").component.target == "played:Executor"
    assert played.to_yaml() == composition.to_yaml()
