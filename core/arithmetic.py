"""Integer arithmetic shared by several modules."""

from __future__ import annotations


def ceil_div(dividend: int, divisor: int) -> int:
    """Quotient rounded up."""
    return -(-dividend // divisor)
