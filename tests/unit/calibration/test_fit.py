"""Factors of a cost model's terms, fitted to steps whose times are known."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dovetail.core.calibration.fit import LEAST_STEPS, Fit, fit, least_squares
from dovetail.core.calibration.launches import fit_launches
from dovetail.core.calibration.steps import Step
from dovetail.core.compose import EngineConfig, compose
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import CostModel, Formats, RowWork, StepTerms
from dovetail.core.testing.cost import SPEC
from dovetail.plugins.app.bench.calibrate import Calibrator
from dovetail.plugins.app.bench.config import BenchConfig
from dovetail.plugins.cost.config import NoneConfig, RooflineConfig
from dovetail.plugins.cost.none import NoEstimate
from dovetail.plugins.cost.roofline import Roofline

RATES = {"bandwidth": 4.0, "tflops": {"bfloat16": 700.0}}


def bound(**options: float | dict[str, float]) -> CostModel:
    cost = Roofline(RooflineConfig(**RATES | options))
    cost.bind(SPEC, EngineConfig(), Formats("bfloat16", 2, 16.0, "bfloat16", 2))
    return cost


def batches(count: int, most_rows: int) -> list[tuple[RowWork, ...]]:
    """Return steps of decode rows, every third with a chunk of a prompt."""
    rng = random.Random(1)
    found = []
    for i in range(count):
        rows = [RowWork(1, rng.randrange(100, 8000)) for _ in range(rng.randrange(1, most_rows))]
        chunk = rng.randrange(64, 4096)
        found.append((*rows, RowWork(chunk, chunk + rng.choice([0, 4096]), 0)) if i % 3 == 0 else tuple(rows))
    return found


def fitted(device: CostModel, *, noise: float = 0.0, slow: int = 0, most_rows: int = 64) -> Fit:
    """Fit to 300 steps of a device. `slow`: steps that took a hundred times as long."""
    rng = random.Random(2)
    steps = []
    for i, rows in enumerate(batches(300, most_rows)):
        seconds = device.step_seconds(rows) * (1 + rng.uniform(-noise, noise)) * (100 if i < slow else 1)
        steps.append(Step(0.0, rows, seconds, (0, 0, 0)))
    return fit(steps, bound(), lambda most: most)


def seconds(found: Fit, rows: list[RowWork]) -> float:
    """Return the predicted time of a step."""
    terms = bound().terms(rows)
    assert terms is not None
    return terms.scaled(StepTerms(*[found.terms[name].factor for name in StepTerms._fields])).seconds


DEVICE = {"bandwidth": 3.2, "tflops": {"bfloat16": 500.0}, "kv_share": 0.5, "kernel_us": 5.0}
FACTORS = {"products": 7 / 5, "prefill": 7 / 5, "decode": 4 * 0.8 / (3.2 * 0.5)}


@pytest.mark.parametrize(("noise", "slow", "within"), [(0.0, 0, 0.01), (0.1, 6, 0.1)])
def test_the_rates_of_the_device_are_found(noise: float, slow: int, within: float) -> None:
    device = bound(**DEVICE)
    found = fitted(device, noise=noise, slow=slow)
    for name, factor in FACTORS.items():
        assert found.terms[name].fitted and found.terms[name].factor == pytest.approx(factor, rel=within), name
    # Steps of one dense model show the sum of weights and launches, not each of them.
    shortest = [RowWork(1, 1)]
    assert seconds(found, shortest) == pytest.approx(device.step_seconds(shortest), rel=within)
    assert found.errors.median < noise + 0.005 < found.uncalibrated.median


def test_what_was_not_measured_keeps_the_prediction() -> None:
    found = fitted(bound(**DEVICE))
    for name in ("collectives", "drafting"):
        assert not found.terms[name].fitted and found.terms[name].factor == 1.0
    assert sum(term.share for term in found.terms.values()) == pytest.approx(1.0, abs=1e-3)
    assert found.ranges["rows"][1] <= 64 and found.ranges["tokens"][0] >= 1


def test_a_fit_to_small_batches_predicts_large_ones() -> None:
    device = bound(**DEVICE)
    found = fitted(device, noise=0.02, most_rows=24)
    for rows in ([RowWork(1, 3000, times=256)], [RowWork(8192, 8192, 0)]):
        assert seconds(found, rows) == pytest.approx(device.step_seconds(rows), rel=0.08)


def test_drafting_has_a_factor_of_its_own() -> None:
    """Half of the steps verify drafts, which the device makes in three times the predicted time."""
    rng, cost = random.Random(3), bound()
    cost.drafter = bound()
    steps = []
    for i in range(100):
        rows, context = rng.randrange(1, 64), rng.randrange(100, 4000)
        works, drafts = (RowWork(4, context, 4, rows),), (rows, context, 3) if i % 2 else (0, 0, 0)
        drafting = cost.draft_seconds(rows, 3, context) if i % 2 else 0.0
        steps.append(Step(0.0, works, cost.step_seconds(works) + 3 * drafting, drafts))
    found = fit(steps, cost, lambda most: most).terms
    assert found["drafting"].factor == pytest.approx(3, rel=0.02) and found["drafting"].fitted
    assert found["decode"].factor == pytest.approx(1, rel=0.02)


def test_factors_are_not_negative() -> None:
    """A device without launch overhead that is quicker than the prior's bandwidth."""
    found = fitted(bound(bandwidth=9.0, kernel_us=0.0, step_us=0.0), noise=0.2)
    assert min(term.factor for term in found.terms.values()) >= 0


def test_too_few_steps_and_other_models_are_refused() -> None:
    steps = [Step(0.0, (RowWork(1, 10),), 1e-3, (0, 0, 0))] * LEAST_STEPS
    with pytest.raises(ConfigError, match="31 measured steps are too few"):
        fit(steps[1:], bound(), 0)
    with pytest.raises(ConfigError, match="NoEstimate has no terms"):
        fit(steps, NoEstimate(NoneConfig()), 0)


def test_the_overlap_of_reads_and_matmuls_is_not_perfect() -> None:
    assert StepTerms(weights=1.0, products=1.0).seconds == pytest.approx(2 ** (1 / 3))
    assert StepTerms(weights=4.0, products=1.0, sampling=0.5).seconds == pytest.approx(4.5, rel=0.01)


def test_a_gap_between_numbers_of_tokens_is_reported() -> None:
    """Bursts have decode steps and steps of a full budget. Steps with one prompt close the gap."""

    def gap(*tokens: int) -> tuple[int, int] | None:
        works = [(RowWork(1, 100, times=n % 200 + 1),) for n in range(40)] + [(RowWork(n, n, 0),) for n in tokens]
        return fit([Step(0.0, work, bound().step_seconds(work), (0, 0, 0)) for work in works], bound(), int).gap

    assert gap(8192) == (40, 8192)
    assert gap(8192, 2300, 600, 155) is None


def test_the_host_time_of_launches_is_fitted_without_steps_that_have_no_graph() -> None:
    rng, steps = random.Random(4), []
    for i in range(200):
        rows, prompts, tokens = rng.randrange(1, 100), i % 3 if i % 2 else 0, rng.choice([200, 300, 8000])
        works = (RowWork(1, 500, times=rows), *[RowWork(tokens, tokens)] * prompts)
        seconds = (400 + 2 * rows + 900 * prompts) * 1e-6 * (1 + rng.uniform(-0.05, 0.05))
        steps.append(Step(0.0, works, 1e-3, (0, 0, 0), 50e-3 if prompts and tokens == 8000 else seconds))
    found = fit_launches(steps, 2048, least_squares())
    assert found is not None and found.steps < 200
    assert found.step_us == pytest.approx(400, rel=0.05) and found.prompt_us == pytest.approx(900, rel=0.05)
    assert found.row_us == pytest.approx(2, rel=0.2) and found.seconds(50, 1) == pytest.approx(1.4e-3, rel=0.05)
    assert fit_launches(steps[:20], 2048, least_squares()) is None


@pytest.mark.parametrize(("given", "most"), [([], 4096), (["engine.graph_tokens=512"], 512)])
def test_a_calibration_of_a_gpu_knows_which_steps_have_graphs(given: list[str], most: int, tmp_path: Path) -> None:
    words = ["model=llama32_1b", "model.load=dummy", "executor=simulated", "attention=sdpa", "engine.kv_dtype=auto"]
    composition = compose(["app=bench", "+preset=h200_fp8_tp1", *words, *given])
    calibrator = Calibrator(composition, BenchConfig(calibrate=str(tmp_path / "made.json")), ["latency"])
    steps = [Step(0.0, (RowWork(1, 500, times=rows),), 1e-3, (0, 0, 0), 4e-4) for rows in range(1, 101)]
    found = calibrator._launches("NVIDIA H200", steps)
    assert found is not None and found.most_tokens == most
