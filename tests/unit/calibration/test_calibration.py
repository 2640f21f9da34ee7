"""bench.calibrate and cost=measured end to end, on the CPU with the bundled model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail.core.calibration.fit import LEAST_STEPS
from dovetail.core.compose import Host, compose
from dovetail.core.compose.cli import main
from dovetail.core.engine.checks import check_cost
from dovetail.core.engine.cost import bind_cost
from dovetail.core.errors import ConfigError

TINY = ("engine.device=cpu", "engine.max_len=128", "engine.kv_pages=200", "engine.token_budget=64")
BENCH = ("app=bench", *TINY, "cost=cpu", "workload=fixed", "workload.requests=2", "workload.output_tokens=36")


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return a calibration of this machine, and the result file of its run."""
    folder = tmp_path_factory.mktemp("calibration")
    path, out = folder / "cpu.json", folder / "bench.json"
    assert (
        main([*BENCH, f"bench.calibrate={path}", f"bench.out={out}", "bench.warmup=1", "bench.one_token_run=false"])
        == 0
    )
    return path, json.loads(out.read_text())


@pytest.fixture
def changed(calibration: tuple[Path, dict[str, Any]], tmp_path: Path) -> Callable[..., str]:
    def write(**values: Any) -> str:
        path = tmp_path / "changed.json"
        path.write_text(json.dumps(json.loads(calibration[0].read_text()) | values))
        return str(path)

    return write


def bound(path: str, *words: str) -> Any:
    composition = compose([*TINY, "cost=measured", f"cost.path={path}", *words], app="generate")
    model = composition.part("model")
    spec = model.target().spec(model.config)
    check_cost(composition, spec, Host())
    return bind_cost(composition, spec, "cpu")


def test_a_calibration_states_what_it_was_measured_with(calibration: tuple[Path, dict[str, Any]]) -> None:
    path, bench = calibration
    made = json.loads(path.read_text())
    assert made["schema"] == "dovetail.calibration/2" and made["device"] == "cpu"
    assert made["formats"]["dtype"] == "float32" and made["parts"]["executor"] == "inproc"
    assert made["model"]["layers"] > 0 and made["prior"]["name"] == "roofline"
    assert bench["calibration"]["steps"] == made["steps"] >= LEAST_STEPS
    assert made["errors"]["median"] < made["uncalibrated"]["median"], "the fit is closer to this machine than conf/cost"
    assert not Path(json.loads(json.dumps(bench["config"]))["engine"]["record"]).exists(), "the recording was temporary"


def test_measured_steps_are_predicted(calibration: tuple[Path, dict[str, Any]]) -> None:
    path, bench = calibration
    cost = bound(str(path))
    (load,) = bench["results"][0]["loads"]
    measured = load["runs"][0]["tpot_ms"]["median"] / 1e3
    assert cost.decode_seconds(2, 50) == pytest.approx(measured, rel=1.0), "within a factor of 2 on a shared machine"
    assert cost.memory is None


def test_another_device_model_or_format_is_refused(changed: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match=r"measured on NVIDIA H200, and this device is cpu"):
        bound(changed(device="NVIDIA H200"))
    with pytest.raises(ConfigError, match=r"another model: .*layers \d+ \(here 32\)"):
        bound(changed(), "model=llama3_8b")
    with pytest.raises(ConfigError, match=r"other number formats: dtype float32 \(here bfloat16\)"):
        bound(changed(), "engine.dtype=bfloat16")


def test_the_model_inside_the_drafter_has_the_factor_of_drafting(
    calibration: tuple[Path, dict[str, Any]], changed: Callable[..., str]
) -> None:
    made = json.loads(calibration[0].read_text())
    other = made["model"] | {"layers": 99}
    term = {"factor": 2.5, "fitted": True, "share": 0.1, "least_us": 1.0, "most_us": 2.0}
    drafter = bound(changed(model=other, drafter=made["model"], drafting=term))
    plain = compose([*TINY, "cost=cpu"], app="generate")
    spec = plain.part("model").target().spec(plain.part("model").config)
    prior = bind_cost(plain, spec, "cpu")
    assert prior is not None
    assert drafter.decode_seconds(4, 50) == pytest.approx(2.5 * prior.decode_seconds(4, 50))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "it is no calibration, or was cut off or damaged"),
        (lambda text: text.replace("calibration/2", "calibration/7"), "its format is dovetail.calibration/7"),
        (
            lambda text: '{"schema": "dovetail.bench/2"}',
            "it is no calibration; app=bench bench.calibrate=PATH makes one",
        ),
        (lambda text: text.replace('"launches"', '"starts"'), "its terms are"),
        (lambda text: text.replace('"factor": ', '"factor": -'), "the factor of weights is -"),
        (lambda text: re.sub(r'"factor": [\d.]+', '"factor": 1e300', text), "the factor of weights is 1e+300"),
        (
            lambda text: text.replace('"step_us": ', '"step_us": "x", "steps_us": ', 1),
            "does not accept here (step_us: ",
        ),
    ],
)
def test_a_damaged_file_is_refused(
    calibration: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[str], str],
    message: str,
) -> None:
    path = tmp_path / "damaged.json"
    path.write_text(damage(calibration[0].read_text()))
    assert main(["app=generate", *TINY, "cost=measured", f"cost.path={path}"]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("bench.calibrate={path}",), "the file exists, and nothing is overwritten"),
        (("bench.calibrate=no/folder/x.json",), "there is no folder"),
        (("bench.calibrate={new}", "cost=none"), "cost=none has no terms"),
        (("bench.calibrate={new}", "cost=measured", "cost.path={path}"), "is a calibration already"),
        (("bench.calibrate={new}", "bench.hold_out=[chat]"), "the workloads of this run are"),
        (("bench.calibrate={new}", "bench.hold_out=[fixed]"), "leaves no workload to fit"),
        (("bench.hold_out=[fixed]",), "set bench.calibrate=PATH"),
        (("bench.calibrate={new}", "bench.url=http://localhost:1/v1"), "bench.url is a server"),
    ],
)
def test_a_calibration_that_cannot_be_made_is_refused_before_the_run(
    calibration: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    message: str,
) -> None:
    path, before = calibration[0], calibration[0].read_text()
    names = {"path": path, "new": tmp_path / "new.json"}
    given = [word.format(**names) for word in words]
    chosen = [word for word in BENCH if not any(new.startswith(word.partition("=")[0] + "=") for new in given)]
    assert main([*chosen, *given]) == 2
    assert message in capsys.readouterr().err
    assert path.read_text() == before and not (tmp_path / "new.json").exists()


def test_a_run_that_is_too_short_to_fit_keeps_its_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "cpu.json", tmp_path / "bench.json"
    short = [word for word in BENCH if "output_tokens" not in word]
    words = ["workload.output_tokens=4", "bench.warmup=0", "bench.one_token_run=false", f"bench.out={out}"]
    assert main([*short, *words, f"bench.calibrate={path}"]) == 2
    assert "too few to fit" in capsys.readouterr().err and not path.exists()
    assert json.loads(out.read_text())["results"]
