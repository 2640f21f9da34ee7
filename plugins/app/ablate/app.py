"""`python run.py app=ablate`: swap one part, keep everything else, and measure what changes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.core.errors import ConfigError
from dovetail.core.files import write_file
from dovetail.core.interfaces import App
from dovetail.core.parallel.process import order_for
from dovetail.plugins.app.ablate.children import Child, Failure
from dovetail.plugins.app.ablate.compare import comparisons
from dovetail.plugins.app.ablate.conditions import Conditions, void
from dovetail.plugins.app.ablate.config import AblateConfig
from dovetail.plugins.app.ablate.host import check
from dovetail.plugins.app.ablate.html import write_report
from dovetail.plugins.app.ablate.report import all_void, draw, show
from dovetail.plugins.app.ablate.resume import read_earlier, restore
from dovetail.plugins.app.ablate.stats import turns
from dovetail.plugins.app.ablate.variants import Variant, make
from dovetail.plugins.app.bench.app import check_apart, check_writable
from dovetail.plugins.app.bench.config import RunsConfig
from dovetail.plugins.app.bench.record import describe
from dovetail.plugins.app.bench.report import check_plot
from dovetail.plugins.app.waiting import bar, in_words, line_console, phases_in_lines

if TYPE_CHECKING:
    from dovetail.core.compose import Composition

SCHEMA = "dovetail.ablate/2"
"""Format version of the result file; changes when its readers have to change."""

REFRESHES = 2
"""Redraws of the progress bar per second. Few, since this process shares cores with the one being measured."""


class AblateApp(App):
    config: AblateConfig

    def run(self, composition: Composition, prompts: Sequence[str]) -> int:
        config = self.config
        check_plot(config.plot, "ablate.plot")
        check_writable(config.out, "ablate.out")
        check_writable(config.report, "ablate.report")
        check_apart({f"ablate.{name}": getattr(config, name) for name in ("out", "report", "plot")})
        if composition.engine.record is not None:
            raise ConfigError("engine.record: the starts of an ablation would all write to one file; use app=bench")
        make(config, composition)  # report composition errors before any process starts
        earlier = read_earlier(str(config.out)) if config.resume else None
        self.console = line_console()
        self._gpu = False
        """Whether the variants run on a GPU."""
        self._requests: dict[tuple[str, Any, int], str] = {}
        """(block, rate, run number) -> hash of the requests that its first variant got."""
        order: dict[str, Any] = {
            "config": config.model_dump(mode="json", include=set(RunsConfig.model_fields)),
            "ask": config.quality.model_dump(mode="json"),
            "primary": config.primary,
        }
        what = "every variant on this host"
        with bar(self.console, f"check {what}"), phases_in_lines(self.console, "check") as progress:
            progress(what, None)
            checked = check(config, composition, order)
        self._gpu = bool(checked.machine["gpus"])
        running = [*checked.running]
        workloads = [variant.composition.part("workload").build() for variant in running]
        rates = list(dict.fromkeys(rate for workload in workloads for rate in workload.rates()))
        records = [_record(variant) for variant in checked.variants]
        if config.rounds > 1:
            # Each baseline runs twice in each round: the difference shows what noise does.
            for base in checked.baselines:
                again = replace(base, name=f"{base.name}, again", baselines=(base.name,))
                running.append(again)
                records.append(_record(again) | {"repeats": True})
        result = describe(composition, checked.machine) | {
            "schema": SCHEMA,
            "workload": composition.choices["workload"],
            "rates": rates,
            "design": "ladder" if config.ladder else "arms" if config.arms else config.design,
            "quality": checked.quality,
            "interrupted": True,
            "variants": records,
            "void_rounds": {},
            "comparisons": [],
        }
        if earlier is not None:
            restore(str(config.out), earlier, result, config.rounds)
        try:
            self._measure(running, result, order)
            result["interrupted"] = False
        finally:
            # Save and show what was measured, also after Ctrl-C.
            if any(record["starts"] or record["failure"] for record in records):
                self._keep(result)
                show(result)
                if config.plot is not None:
                    draw(config.plot, result)
                if config.report is not None:
                    write_report(config.report, result)
        wrong = any(one["gate"] for one in result["comparisons"]) or all_void(result)
        return 1 if wrong or any(record["failure"] for record in records) else 0

    def _measure(self, running: Sequence[Variant], result: dict[str, Any], order: dict[str, Any]) -> None:
        """Run the rounds. Each round starts every variant once, except those whose start was restored."""
        records = {record["name"]: record for record in result["variants"]}
        for record in records.values():
            for start in record["starts"]:
                _check_runs(start, record["block"], start["round"] * self.config.runs, self._requests)
        plan = result["quality"]
        starts = self.config.rounds * len(running)
        with bar(self.console, "", starts, refresh_per_second=REFRESHES) as update:
            for number in range(self.config.rounds):
                for begun, place in enumerate(turns(len(running), number), number * len(running)):
                    record = records[running[place].name]
                    title = f"round {number + 1} of {self.config.rounds}, {record['name']}"
                    update(description=title, completed=begun)
                    if record["failure"] is None and all(start["round"] != number for start in record["starts"]):
                        self._start(running[place], record, number, order | {"quality": plan}, title, update)
                        # The first variant that answers samples the texts on which all others are scored.
                        windows = (record["quality"] or {}).pop("windows", None)
                        if plan is not None and windows is not None:
                            plan = result["quality"] = plan | {"windows": windows}
                        self._keep(result)
                # Answers do not change between starts: one round is enough.
                plan = None
                self._void(number, result)

    def _void(self, number: int, result: dict[str, Any]) -> None:
        """Exclude a round in which the conditions of any start break the rule, for all variants alike."""
        starts = [start for record in result["variants"] for start in record["starts"] if start["round"] == number]
        reasons = [reason for start in starts if (reason := void(self.config.void, start.get("conditions", {})))]
        if reasons:
            result["void_rounds"][str(number)] = reasons[0]
            for start in starts:
                start["void"] = True
            self._keep(result)

    def _start(
        self,
        variant: Variant,
        record: dict[str, Any],
        number: int,
        order: dict[str, Any],
        title: str,
        update: Callable[..., None],
    ) -> None:
        """Run one start of a variant in a process; store its runs, or the failure, in the record."""
        began = time.monotonic()
        conditions = Conditions(self.config.void, gpu=self._gpu)
        with (
            conditions,
            closing(Child("measure")) as child,
            phases_in_lines(self.console, record["name"]) as progress,
        ):

            def phase(name: str, share: float | None) -> None:
                progress(name, share)
                update(description=f"{title}: {in_words(name, share)}")

            try:
                first = number * self.config.runs
                workload = variant.composition.choices["workload"]
                wanted = order_for(variant.composition) | order | {"workload": workload, "first": first}
                found = child.ask(wanted, phase)
                _check_runs(found, variant.block, first, self._requests)
            except Failure as failure:
                record["failure"] = {"round": number, "reason": str(failure)}
        if record["failure"] is None:
            answers = found.pop("quality")
            record["quality"] = record["quality"] or answers
            record["starts"].append({"round": number, **found, "conditions": conditions.found})
        if not self.console.is_terminal:
            how = "failed" if record["failure"] else "done"
            self.console.print(f"{title}: {how} in {time.monotonic() - began:.1f} s", markup=False)

    def _keep(self, result: dict[str, Any]) -> None:
        config = self.config
        result["comparisons"] = comparisons(result["variants"], config.primary, config.gate.model_dump())
        if self.config.out is not None:
            # Atomic, so that an ablation that is killed here can be resumed.
            write_file(Path(self.config.out), json.dumps(result, indent=1) + "\n")


def _record(variant: Variant) -> dict[str, Any]:
    return {
        "name": variant.name,
        "block": variant.block,
        "changes": list(variant.changes),
        "baselines": list(variant.baselines),
        "overrides": list(variant.composition.overrides),
        "composition": variant.composition.nodes(),
        "skipped": variant.skipped,
        "failure": None,
        "starts": [],
        "quality": None,
    }


def _check_runs(found: Mapping[str, Any], block: str, first: int, requests: dict[tuple[str, Any, int], str]) -> None:
    """Raise Failure if the figures cannot be compared with those of other variants. Fills `requests`."""
    for load in found["loads"]:
        for number, run in enumerate(load["runs"], first):
            if run["failed"]:
                raise Failure(f"{run['failed']} of {run['requests']} requests failed: {run['failures'][0]}")
            if run.get("prefix_cache_kept"):
                raise Failure("its prefix cache could not be emptied between runs, which would make later runs faster")
            if requests.setdefault((block, load["rate"], number), run["requests_hash"]) != run["requests_hash"]:
                raise Failure("its requests differ from those of the other variants")
