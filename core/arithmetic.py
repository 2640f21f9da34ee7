"""Integer arithmetic that several parts need."""

from __future__ import annotations


def ceil_div(dividend: int, divisor: int) -> int:
    """Quotient rounded up."""
    return -(-dividend // divisor)
