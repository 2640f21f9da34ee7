"""Options of the built-in schedulers."""

from __future__ import annotations

from pydantic import Field

from dovetail.core.compose import Config


class FCFSConfig(Config):
    """First come, first served, with chunked prefill beside decode."""

    max_chunk: int | None = Field(None, ge=1)
    """Prefill tokens of one sequence in a step, at most; None = whatever engine.token_budget leaves."""


class StaticConfig(Config):
    """Static batching: a batch runs until its last sequence is done, then the next one starts. The ablation baseline."""

    batch_size: int | None = Field(None, ge=1)
    """Sequences of a batch; None = engine.max_seqs."""
