"""`python run.py app=ablate`: swap one part, keep everything else, and measure what changes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.core.interfaces import App
from dovetail.core.parallel.process import order_for
from dovetail.plugins.app.ablate.children import Child, Failure
from dovetail.plugins.app.ablate.compare import comparisons
from dovetail.plugins.app.ablate.config import AblateConfig
from dovetail.plugins.app.ablate.host import Checked, check
from dovetail.plugins.app.ablate.report import draw, show
from dovetail.plugins.app.ablate.stats import turns
from dovetail.plugins.app.ablate.variants import Variant, make
from dovetail.plugins.app.bench.app import check_writable
from dovetail.plugins.app.bench.config import RunsConfig
from dovetail.plugins.app.bench.record import describe
from dovetail.plugins.app.bench.report import check_plot
from dovetail.plugins.app.waiting import bar, in_words, line_console, phases_in_lines

if TYPE_CHECKING:
    from dovetail.core.compose import Composition

SCHEMA = "dovetail.ablate/1"
"""Format version of the result file; changes when its readers have to change."""

REFRESHES = 2
"""Redraws of the progress bar per second. Few, since this process shares cores with the one being measured."""


class AblateApp(App):
    config: AblateConfig

    def run(self, composition: Composition, prompts: Sequence[str]) -> int:
        config = self.config
        check_plot(config.plot, "ablate.plot")
        check_writable(config.out, "ablate.out")
        make(config, composition)  # report composition errors before any process starts
        self.console = line_console()
        self._requests: dict[tuple[Any, int], str] = {}
        """(rate, run number) -> hash of the requests that the first variant got."""
        order: dict[str, Any] = {
            "workload": composition.choices["workload"],
            "config": config.model_dump(mode="json", include=set(RunsConfig.model_fields)),
            "ask": config.quality.model_dump(mode="json"),
        }
        what = "every variant on this host"
        with bar(self.console, f"check {what}"), phases_in_lines(self.console, "check") as progress:
            progress(what, None)
            checked = check(config, composition, order)
        rates = list(composition.part("workload").build().rates())
        records = [_record(variant) for variant in checked.variants]
        result = describe(composition, checked.machine) | {
            "schema": SCHEMA,
            "workload": order["workload"],
            "rates": rates,
            "design": "ladder" if config.ladder else config.design,
            "quality": checked.quality,
            "interrupted": True,
            "variants": records,
            "comparisons": [],
        }
        try:
            self._measure(checked, result, order)
            result["interrupted"] = False
        finally:
            # Save and show what was measured, also after Ctrl-C.
            if any(record["starts"] or record["failure"] for record in records):
                self._keep(result)
                show(result)
                if config.plot is not None:
                    draw(config.plot, result)
        return 1 if any(record["failure"] for record in records) else 0

    def _measure(self, checked: Checked, result: dict[str, Any], order: dict[str, Any]) -> None:
        """Run the rounds. Each round starts every variant once."""
        records = {record["name"]: record for record in result["variants"]}
        running, plan = checked.running, checked.quality
        starts = self.config.rounds * len(running)
        with bar(self.console, "", starts, refresh_per_second=REFRESHES) as update:
            for number in range(self.config.rounds):
                for begun, place in enumerate(turns(len(running), number), number * len(running)):
                    record = records[running[place].name]
                    title = f"round {number + 1} of {self.config.rounds}, {record['name']}"
                    update(description=title, completed=begun)
                    if record["failure"] is None:
                        self._start(running[place], record, number, order | {"quality": plan}, title, update)
                        # The first variant that answers samples the texts on which all others are scored.
                        windows = (record["quality"] or {}).pop("windows", None)
                        if plan is not None and windows is not None:
                            plan = result["quality"] = plan | {"windows": windows}
                        self._keep(result)
                # Answers do not change between starts: one round is enough.
                plan = None

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
        with closing(Child("measure")) as child, phases_in_lines(self.console, record["name"]) as progress:

            def phase(name: str, share: float | None) -> None:
                progress(name, share)
                update(description=f"{title}: {in_words(name, share)}")

            try:
                found = child.ask(order_for(variant.composition) | order | {"first": number * self.config.runs}, phase)
                _check_runs(found, number * self.config.runs, self._requests)
            except Failure as failure:
                record["failure"] = {"round": number, "reason": str(failure)}
        if record["failure"] is None:
            answers = found.pop("quality")
            record["quality"] = record["quality"] or answers
            record["starts"].append({"round": number, **found})
        if not self.console.is_terminal:
            how = "failed" if record["failure"] else "done"
            self.console.print(f"{title}: {how} in {time.monotonic() - began:.1f} s", markup=False)

    def _keep(self, result: dict[str, Any]) -> None:
        result["comparisons"] = comparisons(result["variants"], result["rates"])
        if self.config.out is not None:
            Path(self.config.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _record(variant: Variant) -> dict[str, Any]:
    return {
        "name": variant.name,
        "changes": list(variant.changes),
        "baselines": list(variant.baselines),
        "overrides": list(variant.composition.overrides),
        "skipped": variant.skipped,
        "failure": None,
        "starts": [],
        "quality": None,
    }


def _check_runs(found: Mapping[str, Any], first: int, requests: dict[tuple[Any, int], str]) -> None:
    """Raise Failure if the figures cannot be compared with those of other variants. Fills `requests`."""
    for load in found["loads"]:
        for number, run in enumerate(load["runs"], first):
            if run["failed"]:
                raise Failure(f"{run['failed']} of {run['requests']} requests failed: {run['failures'][0]}")
            if run.get("prefix_cache_kept"):
                raise Failure("its prefix cache could not be emptied between runs, which would make later runs faster")
            if requests.setdefault((load["rate"], number), run["requests_hash"]) != run["requests_hash"]:
                raise Failure("its requests differ from those of the other variants")
