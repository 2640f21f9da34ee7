"""`python run.py app=bench`: a workload in, figures out."""

from __future__ import annotations

import json
import random
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from dovetail.core.compose import Selected, compose
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import SLO, App, TimedRequest, Workload, WorkloadContext
from dovetail.plugins.app.bench.config import BenchConfig
from dovetail.plugins.app.bench.metrics import knee, measure, per_token_of_run, summarize
from dovetail.plugins.app.bench.record import describe
from dovetail.plugins.app.bench.report import check_plot, draw, show
from dovetail.plugins.app.bench.target import Target
from dovetail.plugins.app.waiting import phases_in_lines

if TYPE_CHECKING:
    from dovetail.core.compose import Composition

WARMUP_TOKENS = 4
REFRESH = 0.5
"""Seconds between two drawings of the progress bar, which would otherwise be measured too."""


class BenchApp(App):
    config: BenchConfig

    def run(self, composition: Composition, prompts: Sequence[str]) -> int:
        workloads = self._workloads(composition)
        check_plot(self.config.plot)
        check_writable(self.config.out, "bench.out")
        self.slo = SLO(self.config.slo.ttft, self.config.slo.tpot)
        self.seed = composition.engine.seed
        self.console = Console(stderr=True, highlight=False)
        self._sent: set[int] = set()
        self._told = False
        target = self._target(composition)
        for name, part in workloads.items():
            # What cannot be made is found before minutes of loading.
            workload: Workload = part.build()
            self._check_adapters(target, self._requests(workload, self._context(target, name, 0, workload.rates()[0])))
        timelines: dict[str, Any] = {}
        with closing(target):
            with self._bar("start") as bar, phases_in_lines(self.console) as told:

                def phase(name: str, share: float | None) -> None:
                    told(name, share)
                    bar.phase(name, share)

                startup = target.start(phase)
            result = describe(composition) | {"startup": startup, "results": []}
            for name, part in workloads.items():
                found, timelines[name] = self._measure(target, name, part)
                result["results"].append(found)
        show(result)
        if self.config.out is not None:
            Path(self.config.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if self.config.plot is not None:
            draw(self.config.plot, result, timelines)
        return 1 if any(run["failed"] for run in all_runs(result)) else 0

    def _workloads(self, composition: Composition) -> dict[str, Selected]:
        """By the name they were chosen by: several named ones may be the same component with other options."""
        names = self.config.workloads
        if not names:
            return {chosen_name(composition): composition.part("workload")}
        if chosen := [text for text in composition.overrides if text.startswith("workload=")]:
            raise ConfigError(f"`{chosen[0]}` and bench.workloads={list(names)}: give one of them")
        return {name: self._compose(composition, name).part("workload") for name in names}

    @staticmethod
    def _compose(composition: Composition, workload: str) -> Composition:
        return compose(
            [*composition.overrides, f"workload={workload}"],
            registry=composition.registry,
            config_dirs=composition.config_dirs,
        )

    def _target(self, composition: Composition) -> Target:
        if self.config.url is None:
            from dovetail.plugins.app.bench.inprocess import EngineTarget

            return EngineTarget(composition)
        from dovetail.plugins.app.bench.server import ServerTarget

        return ServerTarget(composition, self.config)

    def _measure(self, target: Target, name: str, part: Selected) -> tuple[dict[str, Any], list[Any]]:
        """Every rate of one workload: its figures, and the timelines of the last run at each rate for the plot."""
        workload: Workload = part.build()
        loads: list[dict[str, Any]] = []
        timelines = []
        for rate in workload.rates():
            title = name if rate is None else f"{name} at {rate:g}/s"
            contexts = (self._context(target, name, i, rate) for i in range(2 * self.config.runs + 1))
            self._warm_up(target, title, self._requests(workload, next(contexts)))
            runs = []
            for i in range(self.config.runs):
                of = f"{title}, run {i + 1} of {self.config.runs}"
                figures, lines = self._run(target, of, self._requests(workload, next(contexts)))
                runs.append(figures | self._tpot_of_run(target, of, self._requests(workload, next(contexts)), figures))
            timelines.append((rate, lines))
            loads.append({"rate": rate, "summary": summarize(runs), "runs": runs})
        found: dict[str, Any] = {"workload": name, "options": part.to_node(), "loads": loads}
        if len(loads) > 1:
            points = [load["summary"] | {"rate": load["rate"]} for load in loads]
            bend = knee(points, self.slo, self.config.slo.share)
            found["knee"] = {"rate": bend.rate, "rule": bend.rule} if bend else None
        return found, timelines

    def _context(self, target: Target, workload: str, number: int, rate: float | None) -> WorkloadContext:
        """Every run of every workload and rate draws prompts of its own, and the same ones the next time: a server
        would find those of the run before in its prefix cache. What comes from a file may come again all the same."""
        seed = zlib.crc32(f"{self.seed} {workload} {rate} {number}".encode())
        return WorkloadContext(target.vocab, target.max_len, seed, rate, target.encode)

    def _requests(self, workload: Workload, ctx: WorkloadContext) -> Sequence[TimedRequest]:
        """Of one run, spread over adapters where names are given."""
        requests, names = workload.requests(ctx), self.config.adapters
        if not names:
            return requests
        shares = [k**-self.config.adapter_skew for k in range(1, len(names) + 1)]
        chosen = random.Random(f"adapters {ctx.seed}").choices(names, shares, k=len(requests))
        return [replace(request, adapter=name) for request, name in zip(requests, chosen, strict=True)]

    def _check_adapters(self, target: Target, requests: Sequence[TimedRequest]) -> None:
        known = target.adapters
        wanted = dict.fromkeys((*self.config.adapters, *(request.adapter for request in requests)))
        if known is not None and (missing := [name for name in wanted if name and name not in known]):
            raise ConfigError(
                f"requests name adapters that are not loaded: {', '.join(missing)}; there is "
                f"{', '.join(known) or 'none'}. adapter=lora 'adapter.load={{name: folder}}' loads some at start-up"
            )

    def _warm_up(self, target: Target, title: str, requests: Sequence[TimedRequest]) -> None:
        if few := requests[: self.config.warmup]:
            short = [replace(r, arrival=0.0, output_tokens=min(r.output_tokens, WARMUP_TOKENS)) for r in few]
            self._run(target, f"{title}, warm-up", short)

    def _run(self, target: Target, title: str, requests: Sequence[TimedRequest]) -> tuple[dict[str, Any], list[Any]]:
        with self._bar(title, total=len(requests)) as bar:
            timelines, told = target.run(requests, bar.done)
        figures = measure(timelines, self.slo) | told
        if target.remembers and (again := self._sent_before(requests)):
            figures["prompts_sent_before"] = again
        failures = dict.fromkeys(line.failure for line in timelines if line.failure)
        if figures["failed"] == len(timelines):
            raise ConfigError(f"{title}: every request failed; the first: {next(iter(failures))}")
        if failures:
            figures["failures"] = list(failures)[:5]
        return figures, timelines

    def _sent_before(self, requests: Sequence[TimedRequest]) -> int:
        """Prompts that an earlier run had: the target may know them, and is quicker by that."""
        prompts = {hash(request.prompt_ids) for request in requests}
        again = len(prompts & self._sent)
        if again and not self._told:
            self._told = True
            self.console.print(
                f"{again} of {len(requests)} prompts had been sent before, and the server may still have them in its "
                "prefix cache: prompts_sent_before in the results counts them for each run"
            )
        self._sent |= prompts
        return again

    def _tpot_of_run(
        self, target: Target, title: str, requests: Sequence[TimedRequest], figures: dict[str, Any]
    ) -> dict[str, Any]:
        """With prompts of its own: a server may remember those of the run."""
        lengths = {request.output_tokens for request in requests}
        at_once = all(request.arrival == 0.0 for request in requests)
        if not self.config.one_token_run or not at_once or len(lengths) > 1 or lengths == {1} or figures["failed"]:
            return {}
        first, _ = self._run(target, f"{title}, one token", [replace(r, output_tokens=1) for r in requests])
        tpot = per_token_of_run(figures["seconds"], first["seconds"], lengths.pop())
        return {"one_token_run_s": first["seconds"], "run_tpot_ms": round(tpot, 4)}

    @contextmanager
    def _bar(self, title: str, total: int | None = None) -> Iterator[Bar]:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        shown = columns if total else (columns[0], columns[1], columns[3])
        hidden = not self.console.is_terminal
        with Progress(*shown, console=self.console, transient=True, auto_refresh=not total, disable=hidden) as progress:
            yield Bar(progress, progress.add_task(title, total=total))


class Bar:
    """A progress bar that draws itself rarely, and in this thread while something is measured."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task
        self._drawn = 0.0

    def phase(self, name: str, share: float | None) -> None:
        total = None if share is None else 1.0
        self._progress.update(self._task, description=name, total=total, completed=share or 0.0)

    def done(self, requests: int) -> None:
        now = time.perf_counter()
        if now - self._drawn >= REFRESH:
            self._drawn = now
            self._progress.update(self._task, completed=requests, refresh=True)


def chosen_name(composition: Composition) -> str:
    """What stands after `workload=`, which may be a variant; else the component's name."""
    chosen = [text.partition("=")[2] for text in composition.overrides if text.startswith("workload=")]
    return chosen[-1] if chosen else composition.part("workload").name


def all_runs(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (run for found in result["results"] for load in found["loads"] for run in load["runs"])


def check_writable(path: str | None, option: str) -> None:
    """Before minutes of measuring, not after."""
    if path is None:
        return
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        there = Path(path).exists()
        with Path(path).open("a", encoding="utf-8"):
            pass
        if not there:
            Path(path).unlink()  # or a run that is interrupted would leave an empty one
    except OSError as error:
        raise ConfigError(f"{option}={path}: cannot be written ({error})") from None
