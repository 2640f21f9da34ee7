"""`python run.py app=bench`: run workloads and report latency and throughput."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.core.compose import Selected, compose
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import App, Workload
from dovetail.plugins.app.bench.config import BenchConfig
from dovetail.plugins.app.bench.metrics import knee, summarize
from dovetail.plugins.app.bench.record import describe
from dovetail.plugins.app.bench.report import check_plot, draw, rows, show
from dovetail.plugins.app.bench.runs import Runs
from dovetail.plugins.app.bench.target import OnDone, Target
from dovetail.plugins.app.waiting import bar, line_console, phases

if TYPE_CHECKING:
    from dovetail.core.compose import Composition
    from dovetail.plugins.app.bench.calibrate import Calibrator

REFRESH = 0.5
"""Seconds between redraws of the progress bar; more frequent ones would disturb the measurement."""


class BenchApp(App):
    config: BenchConfig

    def run(self, composition: Composition, prompts: Sequence[str]) -> int:
        workloads = self._workloads(composition)
        check_plot(self.config.plot, "bench.plot")
        check_writable(self.config.out, "bench.out")
        check_apart({f"bench.{name}": getattr(self.config, name) for name in ("out", "plot", "calibrate")})
        if self.config.hold_out and self.config.calibrate is None:
            raise ConfigError("bench.hold_out is for a calibration: set bench.calibrate=PATH")
        self._calibrator: Calibrator | None = None
        if self.config.calibrate is None:
            return self._run(composition, workloads)
        from dovetail.plugins.app.bench.calibrate import Calibrator

        self._calibrator = Calibrator(composition, self.config, list(workloads))
        with self._calibrator.recorded() as recorded:
            return self._run(recorded, workloads)

    def _run(self, composition: Composition, workloads: dict[str, Selected]) -> int:
        self.console = line_console()
        target = self._target(composition)
        runs = Runs(self.config, target, self._bar, self.console.print)
        for name, part in workloads.items():
            runs.check(name, part.build())
        timelines: dict[str, Any] = {}
        with closing(target):
            with phases(self.console) as progress:
                startup = target.start(progress)
            result = describe(composition) | {"startup": startup, "results": []}
            for name, part in workloads.items():
                began = target.now()
                found, timelines[name] = self._measure(runs, name, part)
                result["results"].append(found)
                if self._calibrator is not None:
                    self._calibrator.measured(name, began, target.now())
        show(result)
        try:
            if self._calibrator is not None:
                result["calibration"] = self._calibrator.fit(startup["device"])
        finally:
            # The measurement is kept even if nothing can be fitted to it.
            if self.config.out is not None:
                Path(self.config.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if self.config.plot is not None:
            draw(self.config.plot, result, timelines)
        return 1 if any(run["failed"] for _, load in rows(result) for run in load["runs"]) else 0

    def _workloads(self, composition: Composition) -> dict[str, Selected]:
        """Return the workloads by name; several names may be one component with different options."""
        names = self.config.workloads
        if not names:
            return {composition.choices["workload"]: composition.part("workload")}
        if chosen := [text for text in composition.overrides if text.startswith("workload=")]:
            raise ConfigError(f"`{chosen[0]}` and bench.workloads={list(names)}: give one of them")
        found = {}
        for name in names:
            words = [*composition.overrides, f"workload={name}"]
            made = compose(words, registry=composition.registry, config_dirs=composition.config_dirs)
            found[name] = made.part("workload")
        return found

    def _target(self, composition: Composition) -> Target:
        if self.config.url is None:
            from dovetail.plugins.app.bench.inprocess import EngineTarget

            return EngineTarget(composition)
        from dovetail.plugins.app.bench.server import ServerTarget

        return ServerTarget(composition, self.config)

    def _measure(self, runs: Runs, name: str, part: Selected) -> tuple[dict[str, Any], list[Any]]:
        """Measure one workload at all its rates. Returns its figures, and for the plot each rate's last timelines."""
        workload: Workload = part.build()
        loads: list[dict[str, Any]] = []
        timelines = []
        for rate in workload.rates():
            found, lines = runs.measure(name, workload, rate, one_token_run=self.config.one_token_run)
            timelines.append((rate, lines))
            loads.append({"rate": rate, "summary": summarize(found), "runs": found})
        result: dict[str, Any] = {"workload": name, "options": part.to_node(), "loads": loads}
        if len(loads) > 1:
            points = [load["summary"] | {"rate": load["rate"]} for load in loads]
            bend = knee(points, runs.slo, self.config.slo.share)
            result["knee"] = {"rate": bend.rate, "rule": bend.rule} if bend else None
        return result, timelines

    @contextmanager
    def _bar(self, title: str, requests: int) -> Iterator[OnDone]:
        """Show a progress bar that redraws rarely, and only in the calling thread."""
        drawn = 0.0

        def done(number: int) -> None:
            nonlocal drawn
            now = time.perf_counter()
            if now - drawn >= REFRESH:
                drawn = now
                update(completed=number, refresh=True)

        with bar(self.console, title, requests, auto_refresh=False) as update:
            yield done


def check_writable(path: str | None, option: str) -> None:
    """Raise ConfigError before the measurement if the file cannot be written, or is no result of an earlier run."""
    if path is None:
        return
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        there = Path(path).exists()
        if there and not _is_result(Path(path)):
            raise ConfigError(f"{option}={path}: the file exists and is not a result of Dovetail: choose another name")
        with Path(path).open("a", encoding="utf-8"):
            pass
        if not there:
            Path(path).unlink()  # an interrupted run must not leave an empty file
    except OSError as error:
        raise ConfigError(f"{option}={path}: cannot be written ({error})") from None


def check_apart(paths: Mapping[str, str | None]) -> None:
    """Raise ConfigError if two options name the same file. `paths`: file by option; None = not set."""
    seen: dict[Path, str] = {}
    for option, path in paths.items():
        if path is not None and (first := seen.setdefault(Path(path).resolve(), option)) != option:
            raise ConfigError(f"{option}={path} is the file of {first}: choose another name")


def _is_result(path: Path) -> bool:
    """Whether a file is empty, or states near its beginning that Dovetail wrote it, as a JSON result, a timeline and a
    report do."""
    if not path.is_file():
        return True  # A folder cannot be opened, and a device such as /dev/stdout keeps nothing.
    with path.open("rb") as file:
        head = file.read(1000).lower()
    return not head or any(word in head for word in (b'"schema": "dovetail.', b'name="generator" content="dovetail"'))
