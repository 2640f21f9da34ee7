"""The tuned choices with which a rank starts. They come from the table given by hand, this machine's cache and tables
of packages, in this order. Operations of which none of them has entries take those of a GPU that is alike, or else a
prediction. All ranks use those of rank 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dovetail.core.arithmetic import ceil_div
from dovetail.core.errors import ConfigError, shown
from dovetail.core.interfaces.tuning import Key, Tunable
from dovetail.core.ops.choices import Choices, far_below, install, temporarily
from dovetail.core.ops.compile_ahead import compile_workers
from dovetail.core.startup_notes import note
from dovetail.core.tuning.cache import CACHED, CHECKS, Cache, this_machine
from dovetail.core.tuning.packages import package_tables
from dovetail.core.tuning.search import distinct, read_found, search, table_of
from dovetail.core.tuning.table import Subject, TuningTable, merged, parse_table, read_table
from dovetail.core.tuning.timing import GraphTimer

if TYPE_CHECKING:
    from dovetail.core.compose import Composition, EngineConfig
    from dovetail.core.interfaces import Collective, Progress

PREDICTED = "prediction"
"""Origin of predicted entries."""
MOST_ROWS = 512
"""Rows up to which operations are tuned. Larger matmuls are bound by the tensor cores, which the library uses well."""


def install_choices(
    composition: Composition,
    tunables: Iterable[Tunable],
    collective: Collective,
    device: torch.device,
    progress: Progress,
) -> str:
    """Install the choices of this rank before its kernels compile. A collective call. `tunables`: operations that the
    model runs. Return the hash of the measured entries for this GPU; "" if nothing is tuned."""
    if device.type != "cuda" or composition.engine.tune == "off":
        if composition.engine.tune == "full":
            note("engine.tune=full: on a CPU nothing is tuned")
        install(Choices())
        return ""
    if collective.rank == 0:
        wanted = distinct(tunables)
        if composition.engine.tune == "full":
            _search(wanted, collective, device, progress)
        table = measured_table(composition, device)
        table = merged([table, predicted_table(wanted, table, torch.cuda.get_device_properties(device).name)])
        share(table.text(), collective, device)
    else:
        if composition.engine.tune == "full":
            _await_search(collective, device)
        table = parse_table(share("", collective, device), "the table of rank 0", PREDICTED)
    install(choices_of(table))
    return table.without(PREDICTED).hash()


def choices_of(table: TuningTable) -> Choices:
    entries: dict[tuple[str, str, Key], Any] = {(s.op, s.gpu, s.key): rows for s, rows in table.entries.items()}
    return Choices(entries)


def measured_table(composition: Composition, device: torch.device) -> TuningTable:
    """Return the measured entries for this GPU, and those of GPUs that are alike. Sources that cannot be used become
    start-up notes, but for the table that was given by hand, which raises ConfigError."""
    machine = this_machine(device)
    by_hand = table_by_hand(composition.engine, machine.gpu)
    cached = Cache(machine, note).read()
    shipped, problems = package_tables(composition.registry, CHECKS)
    for problem in problems:
        note(f"package {problem.package}: {problem.reason}; the engine runs without it")
    found = merged([by_hand, cached, shipped])
    own, alike = found.for_gpu(machine.gpu), found.for_alike(machine.gpu, machine.facts)
    if alike.entries and not own.entries:
        others = ", ".join(alike.counts())
        note(
            f"no tuning table has {machine.gpu}: it takes the choices that were measured on {others}, which is alike; "
            "app=tune measures this GPU"
        )
    return merged([own, alike])


def table_by_hand(engine: EngineConfig, gpu: str | None) -> TuningTable:
    """Read engine.tune_table, or raise ConfigError. `gpu`: name of the GPU; None = the engine runs on a CPU."""
    if engine.tune_table is None:
        return TuningTable()
    word = f"engine.tune_table={shown(Path(engine.tune_table))}"
    if engine.tune == "off":
        raise ConfigError(f"{word} and engine.tune=off: set engine.tune=auto, or engine.tune_table=null")
    if gpu is None:
        raise ConfigError(f"{word}: on a CPU nothing is tuned; set engine.tune_table=null")
    try:
        table = read_table(Path(engine.tune_table), "engine.tune_table", CHECKS)
    except ConfigError as error:
        raise ConfigError(f"{word}: {error}. {_ALTERNATIVES}") from None
    if table.entries and not table.for_gpu(gpu).entries:
        others = ", ".join(sorted({subject.gpu for subject in table.entries}))
        raise ConfigError(f"{word}: its entries are for {shown(others)}, and this GPU is {gpu}. {_ALTERNATIVES}")
    return table


_ALTERNATIVES = (
    "Would work: a table that `app=tune tune.export=PATH` wrote on such a GPU, or engine.tune_table=null, with which "
    "entries come from the cache, installed packages and a prediction"
)


def predicted_table(tunables: Iterable[Tunable], known: TuningTable, gpu: str) -> TuningTable:
    """Return the most promising choices of operations that no entry serves, where they are predicted to beat the
    default. The cache's may end at a number of rows up to which a search got; tables of packages serve all greater
    numbers, with the default. It also runs without a prediction where a shape has entries for far more rows alone."""
    found = {}
    for tunable in tunables:
        subject = Subject(tunable.op, gpu, tunable.key)
        entries = known.entries.get(subject, {})
        most = max(entries, default=0)
        if serves(known, tunable, gpu) or (0 < most < tunable.rows and known.origins[subject, most] != CACHED):
            continue
        default = tunable.predicted(None)
        if default is not None:
            choice = next(iter(tunable.candidates()), None)
            seconds = tunable.predicted(choice)
            found[subject, tunable.rows] = choice if seconds is not None and seconds < default else None
        elif tunable.rows < most:
            # An entry of nothing may mean something else than none, such as the library for packed weights.
            with temporarily(Choices()):
                found[subject, tunable.rows] = tunable.unlisted()
    return TuningTable.of(found, PREDICTED)


def serves(table: TuningTable, tunable: Tunable, gpu: str) -> bool:
    """Return whether an entry of the table is for the operation's number of rows. The least entry of a shape does not
    serve numbers far below its own."""
    entries = table.entries.get(Subject(tunable.op, gpu, tunable.key), {})
    if not entries or tunable.rows > max(entries):
        return False
    return not far_below(tunable.rows, min(entries))


# Search at start-up.


def _search(tunables: Sequence[Tunable], collective: Collective, device: torch.device, progress: Progress) -> None:
    """Measure what the cache lacks, while the other ranks wait in `_await_search`."""
    machine = this_machine(device)
    cache = Cache(machine, note)
    known = read_found(cache.timed())
    timer = GraphTimer(machine.gpu, compile_workers(1))
    results = []
    for _, found in search(tunables, timer, machine.gpu, known):
        results.append(found)
        progress("tune", len(results) / len(tunables))
        if found.point not in known:
            cache.add_timing(found.line())
            _beat(True, collective, device)
    _beat(False, collective, device)
    cache.add(table_of(results, machine.gpu, machine.facts, "search"))


def _await_search(collective: Collective, device: torch.device) -> None:
    while _beat(False, collective, device):
        pass


def _beat(more: bool, collective: Collective, device: torch.device) -> bool:
    """Return whether rank 0 is still searching. A collective's time limit is shorter than a search."""
    if collective.size == 1:
        return more
    return bool(collective.broadcast(torch.tensor([int(more)], device=device)).item())


def share(text: str, collective: Collective, device: torch.device) -> str:
    """Return rank 0's text on every rank. A collective call."""
    if collective.size == 1:
        return text
    data = text.encode()
    size = int(collective.broadcast(torch.tensor([len(data)], device=device)).item())
    # As whole words, which every collective can broadcast.
    padded = bytearray(data.ljust(ceil_div(size + 1, 8) * 8, b"\0"))
    shared = collective.broadcast(torch.frombuffer(padded, dtype=torch.int64).to(device))
    return shared.cpu().numpy().tobytes()[:size].decode()
