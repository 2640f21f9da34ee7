"""This machine's cache of measured choices: a table, and the timings from which it was made.

Each combination of GPU, driver, library versions and kernel sources has its own files, so an entry is never used where
it was not measured. A cache never ends a run: a fault is reported in one line, and the run goes on without the file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from os import SEEK_END, devnull, environ
from pathlib import Path

import torch

from dovetail.core.errors import ConfigError, shown
from dovetail.core.files import write_file
from dovetail.core.ops import expert_choice, packed_tiles, sampling_programs, tile_choice
from dovetail.core.tuning.table import Check, GpuFacts, TuningTable, merged, read_table

CHECKS: Mapping[str, Check] = {
    tile_choice.OP: tile_choice.check_matmul,
    packed_tiles.OP: packed_tiles.check_packed,
    expert_choice.UP: expert_choice.check_experts,
    expert_choice.DOWN: expert_choice.check_experts,
    sampling_programs.DRAW: sampling_programs.check_sampling,
    sampling_programs.FILTER: sampling_programs.check_sampling,
}
"""Checks of the core's own operations."""

CACHED = "cache"
"""Origin of the cache's entries."""
KERNELS = ("core/ops", "plugins/attention")
"""Folders of the operations that are tuned."""

Report = Callable[[str], None]
"""Receives one line for the user."""


@dataclass(frozen=True)
class Machine:
    """Everything on which measured times depend."""

    gpu: str
    facts: GpuFacts
    driver: str
    torch: str
    triton: str
    kernels: str
    """Hash of the kernels' sources."""

    @cached_property
    def stem(self) -> str:
        """Name of this machine's files without a suffix."""
        return f"{self.slug}-{hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]}"

    @property
    def slug(self) -> str:
        return re.sub(r"\W+", "_", self.gpu.lower())


def this_machine(device: torch.device) -> Machine:
    """Describe this GPU, and the software that runs on it."""
    import triton  # An engine on a CPU need not wait for it.

    properties = torch.cuda.get_device_properties(device)
    return Machine(
        properties.name,
        GpuFacts(f"{properties.major}.{properties.minor}", properties.multi_processor_count),
        _driver(),
        torch.__version__,
        triton.__version__,
        kernels_hash(),
    )


def _driver() -> str:
    """Return the version of the GPU driver; "" if the system does not tell."""
    try:
        found = re.search(r"\b(\d+(\.\d+)+)\b", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return ""
    return found[1] if found else ""


def kernels_hash() -> str:
    """Hash of the sources of the operations and their kernels, those of attention among them."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for folder in KERNELS:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """Return the folder of this user's cache. Raises RuntimeError if the user has no home folder."""
    home = environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path("~/.cache").expanduser()) / "dovetail" / "tuning"


class Cache:
    """Files of one machine in the cache folder."""

    def __init__(self, machine: Machine, report: Report, folder: Path | None = None) -> None:
        self.machine, self.report = machine, report
        try:
            self.folder = folder or cache_folder()
        except RuntimeError:
            report("there is no tuning cache, because this user has no home folder: set XDG_CACHE_HOME")
            self.folder = Path(devnull) / "dovetail"  # It has no files, and none can be created.
        self.table = self.folder / f"{machine.stem}.json"
        self.timings = self.folder / f"{machine.stem}.timings.jsonl"

    def read(self) -> TuningTable:
        """Return the table; an empty one if there is none or it cannot be used."""
        try:
            found = self.table.exists()
            others = [] if found else sorted(self.folder.glob(f"{self.machine.slug}-*.json"))
        except OSError as error:
            self.report(f"the tuning cache {shown(self.folder)} is not used: {shown(error)}")
            return TuningTable()
        if not found:
            if others:
                self.report(
                    f"the tuning cache has entries for {self.machine.gpu} with another driver or version of torch, "
                    "Triton or Dovetail, which are not used: app=tune measures again"
                )
            return TuningTable()
        try:
            return read_table(self.table, CACHED, CHECKS)
        except ConfigError as error:
            self.report(f"the tuning cache is not used: {error}")
            return TuningTable()

    def add(self, table: TuningTable) -> bool:
        """Add entries, which replace those of the same subject and rows. Entries that another process adds at the same
        time are kept. Returns whether they were written."""
        with self._reported(), self._locked():
            write_file(self.table, merged([table, self.read()]).text())
            return True
        return False

    def timed(self) -> Iterator[str]:
        """Yield the lines of the file of timings."""
        try:
            with self.timings.open(encoding="utf-8", errors="replace") as file:
                yield from file
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            self.report(f"the timings in {shown(self.timings)} are not used: {shown(error)}")

    def add_timing(self, line: str) -> None:
        """Append a line to the file of timings. If a full disk cut off the last one, that one alone is lost."""
        with self._reported(), self._locked(), self.timings.open("ab+") as file:
            file.seek(max(0, file.seek(0, SEEK_END) - 1))
            begin = b"" if file.read(1) in (b"", b"\n") else b"\n"
            file.write(begin + f"{line}\n".encode())

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Report a file system's error in one line."""
        try:
            yield
        except OSError as error:
            self.report(f"the tuning cache {shown(self.folder)} is not written: {shown(error)}")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude other processes that write files of this machine."""
        import fcntl  # Not on Windows, where there is no Triton either.

        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{self.machine.stem}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
