"""Estimates of a request's output length."""

from __future__ import annotations

from dovetail.core.interfaces import Sequence

HINT = "output_tokens"
"""Key in Request.hints."""


def expected_output(seq: Sequence, limit: int) -> float:
    """Return the hint, or else the most that is possible. `limit`: greatest length of the sequence."""
    most = limit - seq.prompt_len
    return min(max(seq.request.hints.get(HINT, most), 1), most)


def least_output(seq: Sequence, limit: int) -> float:
    """Return the hint, or else the least that is possible."""
    params = seq.request.params
    if HINT in seq.request.hints or params.ignore_eos:
        return expected_output(seq, limit)
    return max(params.min_tokens, 1)
