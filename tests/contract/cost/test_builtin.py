"""Contract suite for every built-in cost model, with the numbers of each variant."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from dovetail.core.calibration import file
from dovetail.core.calibration.launches import Launches
from dovetail.core.compose import EngineConfig, compose
from dovetail.core.interfaces import CostModel, Formats, StepTerms
from dovetail.core.testing.cost import SPEC, CostContract
from dovetail.plugins.cost.config import MeasuredConfig
from dovetail.plugins.cost.measured import Measured


class Variant(CostContract):
    name: ClassVar[str]

    def make(self) -> CostModel:
        cost: CostModel = compose([f"cost={self.name}", "model=llama3_8b"], app="plan").build("cost")
        return cost


class TestNone(Variant):
    name = "none"


class TestH200(Variant):
    name = "h200"


class TestCPU(Variant):
    name = "cpu"
    formats = Formats("float32", 4, 32.0, "float32", 4)


class TestH200Int8(TestH200):
    formats = Formats("bfloat16", 2, 8.0, "int8", 1)


class TestMeasured(CostContract):
    """Factors with which products take over from weights at fewer tokens than the prior predicts."""

    factors = StepTerms(weights=0.9, products=1.7, prefill=2.0, decode=1.2, collectives=1.0, launches=0.0, sampling=3.0)

    @pytest.fixture(autouse=True)
    def _calibration(self, tmp_path: Path) -> None:
        cost = compose(["cost=h200", "model=llama3_8b"], app="plan").part("cost")
        made = file.Calibration(
            when="",
            command="",
            commit=None,
            versions={},
            device="cpu",
            drafter=None,
            model=file.shapes(SPEC),
            formats=file.formats(self.formats),
            layout={},
            parts={},
            overrides=[],
            workloads=[],
            held_out=[],
            ranges={},
            gap=None,
            host=Launches(300.0, 2.0, 900.0, 2048, 100, 350.0),
            prior=file.Prior("roofline", cost.config.model_dump(mode="json")),
            terms={name: file.Term(factor, True, 0.0, 0.0, 0.0) for name, factor in self.factors._asdict().items()},
            drafting=None,
            steps=0,
            errors=file.Errors(0.0, 0.0),
            uncalibrated=file.Errors(0.0, 0.0),
        )
        self.path = str(tmp_path / "calibration.json")
        file.write(self.path, made)

    def make(self) -> CostModel:
        return Measured(MeasuredConfig(path=self.path))

    def test_launches_without_a_graph_take_as_long_as_in_the_prior(self) -> None:
        cost = self.make()
        cost.bind(SPEC, EngineConfig(), self.formats)
        assert cost.eager_seconds == pytest.approx(SPEC.layers * 8 * 125e-6)
