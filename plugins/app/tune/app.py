"""`python run.py app=tune`: measure the choices of all operations that a model runs on this GPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.core.compose import compose
from dovetail.core.errors import ConfigError, shown
from dovetail.core.interfaces import App
from dovetail.plugins.app.bench.app import check_writable
from dovetail.plugins.app.tune.config import TuneConfig
from dovetail.plugins.app.waiting import bar, line_console, phases_in_lines

if TYPE_CHECKING:
    import torch

    from dovetail.core.compose import Composition
    from dovetail.core.interfaces.tuning import Tunable
    from dovetail.core.tuning.cache import Cache
    from dovetail.core.tuning.search import Found, Point
    from dovetail.core.tuning.table import TuningTable


class TuneApp(App):
    config: TuneConfig

    def run(self, composition: Composition, prompts: Sequence[str]) -> int:
        self.console = line_console()
        self._reported: set[str] = set()
        compositions = self._compositions(composition)
        device = _gpu(composition)
        self._check_export()
        import torch

        from dovetail.core.ops.kernels.launch import keep_shared_memory

        torch.cuda.set_device(device)
        keep_shared_memory(device)
        with torch.inference_mode():
            return self._tune(compositions, device)

    @property
    def _export(self) -> Path | None:
        """The exported file, with ~ expanded, as in engine.tune_table, which reads it."""
        try:
            return None if self.config.export is None else Path(self.config.export).expanduser()
        except RuntimeError as error:
            raise ConfigError(f"tune.export={self.config.export}: {error}") from None

    def _check_export(self) -> None:
        """Raise ConfigError before the search if its entries cannot be added to the exported file."""
        if (path := self._export) is None:
            return
        check_writable(str(path), "tune.export")
        if path.exists() and not path.is_file():
            raise ConfigError(
                f"tune.export={path}: is a device or a pipe, and a table needs a file: choose another name"
            )
        try:
            _exported(path)
        except ConfigError as error:
            raise ConfigError(f"tune.export={error}: choose another name, or remove the file") from None

    def _report(self, line: str) -> None:
        """Print a line for the user once: an operation that follows meets the same full disk."""
        if line not in self._reported:
            self._reported.add(line)
            self.console.print(line, markup=False)

    def _compositions(self, composition: Composition) -> list[Composition]:
        if not self.config.models:
            return [composition]
        if chosen := [text for text in composition.overrides if text.startswith("model=")]:
            raise ConfigError(f"`{chosen[0]}` and tune.models={list(self.config.models)}: give one of them")
        return [
            compose(
                [*composition.overrides, f"model={name}"],
                registry=composition.registry,
                config_dirs=composition.config_dirs,
            )
            for name in self.config.models
        ]

    def _tune(self, compositions: Sequence[Composition], device: torch.device) -> int:
        from dovetail.core.ops.choices import install
        from dovetail.core.tuning.cache import Cache, this_machine
        from dovetail.core.tuning.search import read_found
        from dovetail.core.tuning.startup import choices_of, measured_table, predicted_table, serves
        from dovetail.core.tuning.table import merged
        from dovetail.plugins.app.tune.report import show

        tunables = self._tunables(compositions, device)
        machine = this_machine(device)
        cache = Cache(machine, self._report)
        measured = measured_table(compositions[0], device)
        if self.config.missing:
            own = measured
            for alike in measured.gpus.keys() - {machine.gpu}:
                own = own.without(alike)
            tunables = [one for one in tunables if not serves(own, one, machine.gpu)]
        # What the engine uses today; the search also times it.
        install(choices_of(merged([measured, predicted_table(tunables, measured, machine.gpu)])))
        results: list[Found] = []
        self._all_kept = True
        try:
            self._search(tunables, cache, read_found(cache.timed()), results)
        finally:
            # After Ctrl-C, too.
            show(results, len(tunables), cache.table, self._all_kept)
        return 0 if self._all_kept else 1

    def _tunables(self, compositions: Sequence[Composition], device: torch.device) -> list[Tunable]:
        from dovetail.core.host import detect_host, model_facts
        from dovetail.core.tuning.search import distinct
        from dovetail.core.worker.build import tunables_without_weights

        found: list[Tunable] = []
        for one in compositions:
            model = one.part("model")
            one.check(detect_host("cuda"), model_facts(model.target().spec(model.config)))
            found += tunables_without_weights(one, device, self.config.rows)
        have, wanted = sorted({one.op for one in found}), self.config.ops
        if unknown := [op for op in wanted if op not in have]:
            # Some operations are measured with certain numbers of rows only.
            of = f" for tune.rows={list(self.config.rows)}" if self.config.rows else ""
            raise ConfigError(f"tune.ops: there is no operation {shown(unknown[0])}{of}; there are {', '.join(have)}")
        return distinct(one for one in found if not wanted or one.op in wanted)

    def _keep(self, table: TuningTable, cache: Cache) -> None:
        """Add entries to the cache and to the exported file: an interrupted search loses nothing. A file that cannot be
        written is reported, since the other one may have the entries."""
        from dovetail.core.files import write_file
        from dovetail.core.tuning.table import merged

        self._all_kept &= cache.add(table)
        if (path := self._export) is not None:
            try:
                write_file(path, merged([table, _exported(path)]).text())
            except (OSError, ConfigError) as error:
                self._report(f"tune.export={path} is not written: {shown(error)}")
                self._all_kept = False

    def _search(self, tunables: list[Tunable], cache: Cache, known: dict[Point, Found], results: list[Found]) -> None:
        """Append the timings of each tunable to `results`, which keeps them if the search is interrupted."""
        from dovetail.core.ops.compile_ahead import compile_workers
        from dovetail.core.tuning.search import search, table_of
        from dovetail.core.tuning.timing import GraphTimer

        gpu, config = cache.machine.gpu, self.config
        timer = GraphTimer(gpu, compile_workers(1))
        began, measured = time.monotonic(), 0
        with (
            bar(self.console, "tune", len(tunables), left=True) as update,
            phases_in_lines(self.console, "tuning") as progress,
        ):

            def on_phase(phase: str) -> None:
                progress(phase, None)
                update(description=phase)

            steps = search(
                *(tunables, timer, gpu, known),
                seconds=config.seconds,
                compile_seconds=config.compile_seconds,
                most=config.candidates,
                on_phase=on_phase,
            )
            for tunable, found in steps:
                results.append(found)
                if found.point not in known:
                    measured += 1
                    cache.add_timing(found.line())
                self._keep(table_of([found], gpu, cache.machine.facts, "search"), cache)
                spent = time.monotonic() - began
                left = spent / measured * (len(tunables) - len(results)) if measured else 0.0
                name = f"{tunable.op} {' '.join(str(value) for _, value in tunable.key)}, {tunable.rows} rows"
                progress(f"{len(results)} of {len(tunables)}, {name}, about {left:.0f} s left", None)
                update(completed=len(results), description=name)


def _exported(path: Path) -> TuningTable:
    """Return the entries that the exported file has, or raise ConfigError."""
    from dovetail.core.tuning.cache import CHECKS
    from dovetail.core.tuning.table import TuningTable, read_table

    # Other programs create a file with a name of its own empty.
    return read_table(path, "export", CHECKS) if path.exists() and path.stat().st_size else TuningTable()


def _gpu(composition: Composition) -> torch.device:
    """Return the GPU of rank 0, or raise ConfigError."""
    from dovetail.core.worker.dtypes import resolve_device

    device = resolve_device(composition.engine.device, 0, composition.engine.first_gpu)
    if device.type != "cuda":
        raise ConfigError(
            "app=tune measures on a GPU, and engine.device is the CPU here, where nothing is tuned: run it on a GPU of "
            "the model for which the table is"
        )
    return device
