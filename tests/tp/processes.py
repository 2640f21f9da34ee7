"""Which processes are left."""

from __future__ import annotations

from pathlib import Path


def state(pid: int) -> str:
    """Linux's letter for it; "" = there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def runs(pid: int) -> bool:
    """Whether the process exists and has not ended."""
    # An orphan whose new parent has not asked for its exit status has ended all the same.
    return state(pid) not in ("", "Z")
