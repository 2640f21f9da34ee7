"""Options of the built-in collectives."""

from __future__ import annotations

from pydantic import Field

from dovetail.core.compose import Config


class NcclConfig(Config):
    """NCCL between GPUs, gloo between processes on a CPU."""

    timeout: float = Field(3600.0, gt=0)
    """Seconds that a rank waits for the others in one call. A dead one is noticed at once; this is for hanging ones."""


class OrderedConfig(NcclConfig):
    """Sums in rank order in float32: the same bits on any transport. Slower: each rank gets every summand."""
