"""Cost model of a calibration: the terms of the cost model that was fitted, each times its measured factor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pydantic import ValidationError

from dovetail.core.calibration.file import Calibration, differences, formats, read, shapes
from dovetail.core.compose import EngineConfig, installed
from dovetail.core.compose.selected import Selected
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import CostModel, Formats, ModelSpec, Row, RowWork, StepPlan, StepTerms
from dovetail.core.interfaces.plan import DECODE
from dovetail.core.interfaces.request_values import faults
from dovetail.plugins.cost.config import MeasuredConfig


class Measured(CostModel):
    """Bound to the calibrated model, it scales each term by that term's factor. Bound to the model inside the drafter,
    it scales all of them by the factor of drafting."""

    config: MeasuredConfig

    def __init__(self, config: MeasuredConfig) -> None:
        super().__init__(config)
        self._found: Calibration = read(config.path, "cost.path")

    def bind(self, spec: ModelSpec, engine: EngineConfig, formats: Formats) -> None:
        super().bind(spec, engine, formats)
        found = self._found
        if shapes(spec) == found.model:
            self._check_formats()
            self._factors = found.factors
        elif shapes(spec) == found.drafter:
            factor = 1.0 if found.drafting is None else found.drafting.factor
            self._factors = StepTerms(*[factor] * len(StepTerms._fields))
        else:
            raise ConfigError(
                f"{self._where} was measured with another model: {differences(shapes(spec), found.model)}"
            )
        self._prior = self._made_prior()
        self._prior.bind(spec, engine, formats)

    def _check_formats(self) -> None:
        if different := differences(formats(self.formats), self._found.formats):
            raise ConfigError(f"{self._where} was measured with other number formats: {different}")

    @property
    def _where(self) -> str:
        return f"cost.path={self.config.path}: the calibration"

    def _made_prior(self) -> CostModel:
        """Build the cost model that was calibrated, with the options that it had."""
        name, options = self._found.prior.name, self._found.prior.options
        registered = installed().get("cost", name)
        try:
            config = registered.component.config(**options)
        except ValidationError as error:
            raise ConfigError(
                f"{self._where} was made with options that cost={name} does not accept here ({faults(error)}): make "
                "another one"
            ) from None
        made: CostModel = Selected(registered, config).build()
        return made

    def check_device(self, device: str) -> None:
        if device != self._found.device:
            raise ConfigError(
                f"{self._where} was measured on {self._found.device}, and this device is {device}: choose a roofline "
                "such as cost=h200, or make a calibration here with app=bench bench.calibrate=PATH"
            )

    @property
    def memory(self) -> float | None:
        return self._prior.memory if self.config.memory is None else self.config.memory

    def step_seconds(self, rows: Iterable[RowWork]) -> float:
        return self.terms(rows).seconds

    def terms(self, rows: Iterable[RowWork]) -> StepTerms:
        terms = self._prior.terms(rows)
        assert terms is not None
        return terms.scaled(self._factors)

    def lanes_terms(self, lanes: Sequence[Sequence[RowWork]]) -> Sequence[StepTerms] | None:
        found = self._prior.lanes_terms(lanes)
        return None if found is None else [terms.scaled(self._factors) for terms in found]

    def launch_seconds(self, plan: StepPlan) -> float:
        launches = self._found.host
        if launches is None:
            return 0.0
        rows = plan.rows
        prompts = sum(row.flags & DECODE == 0 for row in rows)
        return launches.seconds(len(rows), prompts)

    @property
    def eager_seconds(self) -> float:
        return self._prior.eager_seconds

    def works(self, rows: Iterable[Row]) -> Iterable[RowWork]:
        return self._prior.works(rows)
