"""Options of the built-in executors."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dovetail.core.compose import Config


class InprocConfig(Config):
    """One rank, in the calling process."""

    delay: int = Field(0, ge=0, le=64)
    """Number of plans by which execution lags behind submission, to test pipelining on a CPU; 0 = run at once."""


class MultiprocConfig(Config):
    """engine.tp ranks on one machine: rank 0 in the calling process, each other rank in a worker process."""

    stop_timeout: float = Field(5.0, gt=0)
    """Seconds until worker processes that do not exit at shutdown are killed."""
    plan_bytes: int = Field(1 << 20, ge=1 << 12)
    """Size of the shared memory that carries plans to the workers, in bytes. Longer plans are sent in pieces."""
    blob_bytes: int = Field(1 << 24, ge=1 << 12)
    """Size of the shared memory that carries prompts and parameters to the workers, in bytes. Longer ones are sent in
    pieces."""


class SimulatedConfig(Config):
    """No device: tokens are made up, and a step takes the time that the cost model predicts; none with cost=none. It
    runs scheduler, cache and server at a GPU's speed without one. engine.kv_pages sets the cache size; by default all
    sequences fit."""

    clock: Literal["real", "virtual"] = "real"
    """real: the engine waits as it would for a device. virtual: time jumps to the end of each step, and the work of the
    host takes none except for launches that a calibration has measured. So a run takes as long as its decisions, and
    repeats to the bit. For app=bench and app=ablate."""
    speed: float = Field(1.0, gt=0)
    """Speed relative to the cost model's prediction; 2 = twice as fast."""
    acceptance: float | None = Field(None, ge=0, le=1)
    """Probability that a draft is accepted if all drafts before it were; None = no drafter may be chosen, since there
    is no model that accepts drafts."""
