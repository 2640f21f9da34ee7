"""How many tokens an output will have, as far as the request tells."""

from __future__ import annotations

from dovetail.core.interfaces import Sequence

HINT = "output_tokens"
"""The key of Request.hints."""


def expected_output(seq: Sequence, limit: int) -> float:
    """The hint, else as many as there may be. `limit` is the length that the sequence may grow to."""
    most = limit - seq.prompt_len
    return min(max(seq.request.hints.get(HINT, most), 1), most)


def least_output(seq: Sequence, limit: int) -> float:
    """The hint, else as few as there may be."""
    params = seq.request.params
    if HINT in seq.request.hints or params.ignore_eos:
        return expected_output(seq, limit)
    return max(params.min_tokens, 1)
