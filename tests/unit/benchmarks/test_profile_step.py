"""profile_step.py: its sums over kernels, prompts by the clock, and engines whose ranks are emulated."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from dovetail.core.compose import compose
from dovetail.core.errors import ConfigError

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "profile_step.py"


def test_overlapping_kernels_count_once() -> None:
    busy = runpy.run_path(str(SCRIPT))["busy"]
    assert busy([]) == 0
    long, within, across, after = ("long", 0.0, 10.0), ("within", 2.0, 3.0), ("across", 8.0, 4.0), ("after", 15.0, 1.0)
    assert busy([long, within, across, after]) == 13


def test_a_layer_by_place() -> None:
    """Kernels of one name are told apart by their place, each timed from its predecessor's end to its own."""
    by_place = runpy.run_path(str(SCRIPT))["by_place"]
    found, end = [("embed", 0.0, 2.0)], 2.0
    for layer in range(5):
        for name, us in (("attend", 7.0), ("product", 3.0), ("edge", 9.0), ("product", 5.0 + 10 * (layer == 2))):
            # It began while its predecessor still ran.
            found.append((name, end - 1.0, us + 1.0))
            end += us
    found += [("norm", end, 4.0), ("attend", end + 4.0, 7.0), ("sample", end + 11.0, 1.0)]
    layer = [("attend", 7.0), ("product", 3.0), ("edge", 9.0), ("product", 5.0)]
    assert by_place(found, "att") == [(name, pytest.approx(us)) for name, us in layer]
    assert by_place(found, "none of these") == []


def test_prompts_by_the_hosts_clock(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=tiny", "engine.device=cpu", "engine.max_len=64", "engine.token_budget=48"]
    runpy.run_path(str(SCRIPT))["main"](["2", "3", "--prefill", "--clock", "--context", "32", "--", *words])
    printed = re.findall(
        r"^(\d) rows: (\d+\.\d) ms a step by the host's clock, (\d) steps$", capsys.readouterr().out, re.M
    )
    assert [(rows, steps) for rows, _, steps in printed] == [("2", "2"), ("3", "2")]
    assert all(float(ms) > 0 for _, ms, _ in printed)


@pytest.mark.parametrize(
    ("ranks", "executor", "collective"),
    [
        (2, "multiproc", "symm_mem"),
        (24, "multiproc", "symm_mem"),
        (8, "multiproc", "nccl"),
        (8, "simulated", "symm_mem"),
    ],
)
def test_what_two_gpus_cannot_emulate_is_refused(ranks: int, executor: str, collective: str) -> None:
    pytest.importorskip("triton", reason="no Triton for this platform")
    emulate = runpy.run_path(str(SCRIPT.with_name("emulated_ranks.py")))["emulate"]
    with pytest.raises(ConfigError, match=rf"tp={ranks} with executor={executor} and collective={collective}: "):
        emulate(compose(["app=generate", f"executor={executor}", f"engine.tp={ranks}", f"collective={collective}"]))


def test_an_emulated_engine_differs_in_its_executor_alone() -> None:
    pytest.importorskip("triton", reason="no Triton for this platform")
    emulate = runpy.run_path(str(SCRIPT.with_name("emulated_ranks.py")))["emulate"]
    composition = compose(["app=generate", "+preset=h200_fp8_tp8"])
    emulated = emulate(composition)
    assert emulated.part("executor").component.target == "emulated_ranks:Executor"
    assert emulated.to_yaml() == composition.to_yaml()
