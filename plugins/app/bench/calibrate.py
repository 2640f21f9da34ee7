"""Calibration of a benchmark: its engine is recorded, and the cost model is fitted to the recorded steps."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from dovetail.core.calibration import file
from dovetail.core.calibration.fit import Fit, fit, least_squares
from dovetail.core.calibration.launches import Launches, fit_launches
from dovetail.core.calibration.steps import Step, measured_steps
from dovetail.core.compose import ENGINE_NODES, compose
from dovetail.core.engine.cost import bind_cost
from dovetail.core.errors import ConfigError
from dovetail.core.host import detect_host
from dovetail.core.interfaces import ModelSpec
from dovetail.core.recording.recording import Recording
from dovetail.core.worker.graph_sizes import most_graph_tokens
from dovetail.plugins.app.bench.record import commit, versions
from dovetail.plugins.app.tables import console

if TYPE_CHECKING:
    from dovetail.core.compose import Composition
    from dovetail.core.interfaces import CostModel
    from dovetail.plugins.app.bench.config import BenchConfig

OPTION = "bench.calibrate"


class Calibrator:
    """Calibrates the cost model of a composition to the steps of a benchmark."""

    def __init__(self, composition: Composition, config: BenchConfig, workloads: Sequence[str]) -> None:
        """Raises ConfigError for whatever would fail after the measurement."""
        assert config.calibrate is not None
        self._path, self._held_out, self._workloads = config.calibrate, config.hold_out, workloads
        self._composition = composition
        if config.url is not None:
            raise ConfigError(f"{OPTION} measures the steps of an engine in this run, and bench.url is a server")
        if unknown := set(self._held_out) - set(workloads):
            raise ConfigError(f"bench.hold_out={sorted(unknown)}: the workloads of this run are {list(workloads)}")
        if set(self._held_out) == set(workloads):
            raise ConfigError("bench.hold_out leaves no workload to fit")
        file.check_absent(self._path, OPTION)
        least_squares()
        if composition.part("cost").name == "measured":
            raise ConfigError(f"cost=measured is a calibration already: for {OPTION} choose the hardware's roofline")
        simulated = composition.choices["executor"] == "simulated"
        self._cost = self._bound_cost("simulated" if simulated else detect_host(composition.engine.device).device)
        self._intervals: list[tuple[float, float]] = []
        """Engine time of the workloads that are fitted."""

    def _bound_cost(self, device: str) -> CostModel:
        model, part = self._composition.part("model"), self._composition.part("cost")
        spec: ModelSpec = model.facts() or model.target().spec(model.config)
        cost = bind_cost(self._composition, spec, device) if part.name != "none" else None
        if cost is None or cost.terms([]) is None:
            raise ConfigError(
                f"cost={part.name} has no terms that {OPTION} could fit: choose the hardware's roofline, such as "
                "cost=h200, h100 or cpu"
            )
        return cost

    @contextmanager
    def recorded(self) -> Iterator[Composition]:
        """Yield the composition with a recording that is deleted afterwards, or with that of engine.record."""
        if self._composition.engine.record is not None:
            self._record = Path(self._composition.engine.record)
            yield self._composition
            return
        with tempfile.TemporaryDirectory(prefix="dovetail-calibrate-") as folder:
            self._record = Path(folder) / "run.rec"
            # Token ids are of no use here, but their pseudonyms would cost the host time.
            words = [f"engine.record={json.dumps(str(self._record))}", "engine.record_tokens=true"]
            given = self._composition
            overrides = [*given.overrides, *words]
            yield compose(overrides, registry=given.registry, config_dirs=given.config_dirs)

    def measured(self, workload: str, began: float, ended: float) -> None:
        """Note the engine's time of a workload."""
        if workload not in self._held_out:
            self._intervals.append((began, ended))

    def fit(self, device: str) -> dict[str, Any]:
        """Fit to the recording of the engine, which has ended, and write the file. Returns what it has."""
        composition = self._composition
        steps = [step for recording in self._recordings() for step in measured_steps(recording) if self._fits(step)]
        found, launches = fit(steps, self._cost, composition.build("spec_decode").passes), self._launches(device, steps)
        made = self._calibration(device, found, launches)
        file.write(self._path, made)
        _show(self._path, found, launches)
        return {"path": self._path, "steps": found.steps, "median_error": made.errors.median, "p90": made.errors.p90}

    def _launches(self, device: str, steps: list[Step]) -> Launches | None:
        engine = self._composition.engine
        if device == "cpu":
            return fit_launches(steps, engine.token_budget, least_squares())
        most = most_graph_tokens(engine, self._cost.spec)
        return fit_launches(steps, most, least_squares()) if engine.cuda_graphs else None

    def _recordings(self) -> Iterator[Recording]:
        replicas, path = self._composition.engine.dp, self._record
        names = [path] if replicas == 1 else [path.with_stem(f"{path.stem}.{i}") for i in range(replicas)]
        for name in names:
            yield Recording(str(name), "engine.record")

    def _fits(self, step: Step) -> bool:
        return any(began <= step.clock < ended for began, ended in self._intervals)

    def _calibration(self, device: str, found: Fit, launches: Launches | None) -> file.Calibration:
        composition, cost = self._composition, self._cost
        part, engine = composition.part("cost"), composition.engine
        terms = dict(found.terms)
        drafting = terms.pop("drafting")
        drafter = cost.drafter
        return file.Calibration(
            when=datetime.now(UTC).isoformat(timespec="seconds"),
            command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            commit=commit(),
            versions=versions(),
            device=device,
            model=file.shapes(cost.spec),
            drafter=None if drafter is None else file.shapes(drafter.spec),
            formats=file.formats(cost.formats),
            layout={"tp": engine.tp, "pp": engine.pp, "dp": engine.dp},
            parts={kind: name for kind in ENGINE_NODES[1:] if (name := composition.choices.get(kind)) is not None},
            overrides=list(composition.overrides),
            workloads=list(self._workloads),
            held_out=list(self._held_out),
            prior=file.Prior(part.component.name, part.config.model_dump(mode="json")),
            terms=terms,
            drafting=drafting if drafter is not None else None,
            host=launches,
            ranges=found.ranges,
            gap=found.gap,
            steps=found.steps,
            errors=found.errors,
            uncalibrated=found.uncalibrated,
        )


def _show(path: str, found: Fit, launches: Launches | None) -> None:
    out = console(110, highlight=False)
    table = Table("term", "factor", "share of the time", "predicted, us", title="calibration", title_justify="left")
    for name, term in found.terms.items():
        factor = f"{term.factor:.3f}" if term.fitted else "1 (not measured)"
        table.add_row(name, factor, f"{term.share:.1%}", f"{term.least_us:.1f} to {term.most_us:.1f}")
    out.print(table)
    errors, before = found.errors, found.uncalibrated
    if launches is not None:
        out.print(
            f"host time of a launch: {launches.step_us:.0f} us, {launches.row_us:.1f} more for each row, "
            f"{launches.prompt_us:.0f} for each prompt (median of {launches.steps}: {launches.median_us:.0f} us)"
        )
    if found.gap is not None:
        least, most = found.gap
        out.print(f"No step of {least + 1} to {most - 1} tokens was measured: add a workload that has such steps.")
    out.print(
        f"{found.steps} steps; error of a step's time: median {errors.median:.1%}, p90 {errors.p90:.1%} (uncalibrated "
        f"{before.median:.1%}, {before.p90:.1%}); written to {path}",
        markup=False,
    )
