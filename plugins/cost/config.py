"""Options of the built-in cost models."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dovetail.core.compose import Config

Positive = Annotated[float, Field(gt=0)]


class NoneConfig(Config):
    """No cost model: nothing is predicted."""


class RooflineConfig(Config):
    """Memory or compute, whichever takes longer, and a fixed price per kernel. The numbers are what kernels reach, not
    what a data sheet promises; cost=h200, h100, a100, l40s and cpu have them."""

    bandwidth: Positive
    """Of one device's memory, TB/s."""
    tflops: dict[str, Positive]
    """Of one device's matrix products, TFLOP/s by number format: float32, bfloat16, float16, fp8, int8, fp4."""
    memory: Positive | None = None
    """Of one device, GB (10^9 bytes)."""
    attention_share: float = Field(0.6, gt=0, le=1)
    """Of tflops, reached by attention over a long prompt."""
    kv_share: float = Field(0.8, gt=0, le=1)
    """Of bandwidth, reached when reading paged keys and values."""
    kernels: float = Field(8, ge=0)
    """Kernels of one layer, one after another."""
    kernel_us: float = Field(2.0, ge=0)
    """Of each kernel, microseconds until its first load and after its last store."""
    step_us: float = Field(50.0, ge=0)
    """Of each step, microseconds: embedding, sampling, launch."""
    link: Positive = 400.0
    """Between devices of a host, GB/s per direction."""
    link_us: float = Field(8.0, ge=0)
    """Of each all-reduce, microseconds whatever its size."""
