"""Which processes are left."""

from __future__ import annotations

from pathlib import Path


def runs(pid: int) -> bool:
    """Whether the process exists and has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    # An orphan whose new parent has not asked for its exit status has ended all the same.
    return state != "Z"
