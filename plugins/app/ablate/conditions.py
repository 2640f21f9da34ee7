"""Conditions of the machine during a start, and the rule by which its round is void. Samples come from nvidia-smi and
/proc, in the process that waits, so they cost the measured process nothing."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from dovetail.plugins.app.ablate.config import VoidConfig

SAMPLE_SECONDS = 2.0
SLOWDOWNS = 0x08 | 0x20 | 0x40 | 0x80
"""Clock event reasons of NVML: hardware slowdown, thermal slowdown by software and by hardware, power brake. The power
cap, 0x04, is the normal state of a loaded GPU."""


class Conditions:
    """Samples while it is entered; `found` then has what the rule reads. A value that this machine does not state is
    left out."""

    def __init__(self, rule: VoidConfig, *, gpu: bool) -> None:
        self._rule, self._gpu = rule, gpu
        self.found: dict[str, Any] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="dovetail-ablate-conditions", daemon=True)

    def __enter__(self) -> Self:
        self._began, self._busy, self._own = time.monotonic(), _busy_seconds(), _own_seconds()
        if self._gpu and (self._rule.throttled or self._rule.gpu_processes or self._rule.clock is not None):
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """The measured processes have ended, so their processor time counts as this process's."""
        self._end.set()
        if self._thread.ident is not None:
            self._thread.join()
        if (busy := _busy_seconds()) is not None and self._busy is not None:
            own = _own_seconds() - self._own
            capacity = (time.monotonic() - self._began) * (os.cpu_count() or 1)
            self.found["foreign_cpu"] = round(max(busy - self._busy - own, 0.0) / max(capacity, 1e-9), 4)

    def _sample(self) -> None:
        while not self._end.wait(SAMPLE_SECONDS):
            for gpu in _query("gpu", "clocks_throttle_reasons.active", "clocks.sm", "clocks.max.sm", "utilization.gpu"):
                self._add(*gpu)
            pids = {int(pid) for (pid,) in _query("compute-apps", "pid") if pid.isdigit()}
            ours = pids & _descendants(os.getpid())
            # In a container, nvidia-smi may list process ids of the host, which say nothing here.
            if ours:
                self.found["gpu_processes"] = max(self.found.get("gpu_processes", 0), len(pids - ours))

    def _add(self, reasons: str, clock: str, fastest: str, busy: str) -> None:
        with suppress(ValueError):
            self.found["throttled"] = self.found.get("throttled", 0) | int(reasons, 16) & SLOWDOWNS
        with suppress(ValueError, ZeroDivisionError):
            if float(busy) > 0:
                self.found["clock"] = min(self.found.get("clock", 1.0), round(float(clock) / float(fastest), 4))


def void(rule: VoidConfig, found: Mapping[str, Any]) -> str | None:
    """Return why a start does not count, or None."""
    if rule.throttled and found.get("throttled"):
        return f"the GPU was slowed down for its temperature or power (clock event reasons {found['throttled']:#x})"
    if rule.gpu_processes and found.get("gpu_processes"):
        return f"{found['gpu_processes']} other process(es) used the GPU"
    if rule.clock is not None and found.get("clock", 1.0) < rule.clock:
        return f"the GPU's clock fell to {found['clock']:.4g} of its maximum, below {rule.clock:g}"
    if rule.foreign_cpu is not None and found.get("foreign_cpu", 0.0) > rule.foreign_cpu:
        return f"other processes used {found['foreign_cpu']:.4g} of the processors, more than {rule.foreign_cpu:g}"
    return None


def unchecked(rule: VoidConfig, found: Mapping[str, Any], *, gpu: bool) -> list[str]:
    """Return the parts of the rule that say nothing of a start, since the machine did not state their values."""
    asked = {
        "throttled": gpu and rule.throttled,
        "gpu_processes": gpu and rule.gpu_processes,
        "clock": gpu and rule.clock is not None,
        "foreign_cpu": rule.foreign_cpu is not None,
    }
    return [name for name, wanted in asked.items() if wanted and name not in found]


def _query(what: str, *fields: str) -> list[list[str]]:
    """Return the lines of nvidia-smi, or none without it."""
    command = ["nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command += ["-i", visible]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    lines = ([cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip())
    return [cells for cells in lines if len(cells) == len(fields)]


def _busy_seconds() -> float | None:
    """Return the processor time of all processes of this machine since its start; None = unknown."""
    try:
        line = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
        user, nice, system, _, _, irq, softirq, *_ = map(int, line.split()[1:])
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """Return the processor time of this process and of its children that have ended."""
    return sum(os.times()[:4])


def _descendants(root: int) -> set[int]:
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found
