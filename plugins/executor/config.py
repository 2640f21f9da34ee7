"""Options of the built-in executors."""

from __future__ import annotations

from pydantic import Field

from dovetail.core.compose import Config


class InprocConfig(Config):
    """One rank, in the calling process."""

    delay: int = Field(0, ge=0, le=64)
    """Plans held back before they run, as a slow device would; 0 = run at once. To test pipelining on a CPU."""


class MultiprocConfig(Config):
    """engine.tp ranks on one machine: rank 0 in the calling process, the others in processes of their own."""

    stop_timeout: float = Field(5.0, gt=0)
    """Seconds that worker processes get to end by themselves at shutdown; then they are killed."""
    plan_bytes: int = Field(1 << 20, ge=1 << 12)
    """Bytes of shared memory for plans on their way to the workers. Longer ones pass in pieces."""
    blob_bytes: int = Field(1 << 24, ge=1 << 12)
    """Bytes of shared memory for prompts and parameters on their way to the workers. Longer ones pass in pieces."""


class SimulatedConfig(Config):
    """No device: tokens are made up, and a step takes as long as the cost model says; no time with cost=none. To run
    scheduler, cache and server at a GPU's pace without one. engine.kv_pages says how large the cache is; by default
    every sequence finds room."""

    speed: float = Field(1.0, gt=0)
    """How many times faster than the cost model says."""
