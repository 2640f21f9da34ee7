"""State of other processes."""

from __future__ import annotations

from pathlib import Path


def state(pid: int) -> str:
    """Process state letter from Linux; "" = no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def runs(pid: int) -> bool:
    """Whether the process exists and has not ended."""
    # An orphan may remain a zombie until its new parent collects its exit status; it has ended nevertheless.
    return state(pid) not in ("", "Z")
