"""Options of the built-in cost models."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dovetail.core.compose import Config

Positive = Annotated[float, Field(gt=0)]


class NoneConfig(Config):
    """No cost model: nothing is predicted."""


class MeasuredConfig(Config):
    """Step times of a calibration, which app=bench bench.calibrate=PATH makes: the terms of a cost model, such as
    roofline, each scaled by a factor that was fitted to measured steps."""

    path: str
    """The calibration. It is for one GPU, one model and its number formats; other layouts are extrapolated."""
    memory: Positive | None = None
    """Memory of one device, GB (10^9 bytes); app=plan needs it. null = that of the cost model that was calibrated."""


class RooflineConfig(Config):
    """Memory time and compute time, which overlap, plus a fixed overhead per kernel. The numbers are rates that kernels
    reach, not peak rates; cost=h200, h100, a100, l40s and cpu set them."""

    device: str | None = None
    """Word of the name of the GPU whose numbers these are, such as H200, or cpu. A GPU without that word in its name
    gives a note at start-up; null gives none."""
    bandwidth: Positive
    """Memory bandwidth of one device, TB/s."""
    tflops: dict[str, Positive]
    """Matmul rate of one device, TFLOP/s by number format: float32, bfloat16, float16, fp8, int8, fp4."""
    memory: Positive | None = None
    """Memory of one device, GB (10^9 bytes)."""
    attention_share: float = Field(0.6, gt=0, le=1)
    """Fraction of tflops that attention over a long prompt reaches."""
    decode_share: float = Field(0.6, gt=0, le=1)
    """Fraction of tflops.fp8 that matmuls of many rows reach if weights of 4 bits are decoded as they are multiplied
    (quant.many_rows=exact)."""
    kv_share: float = Field(0.8, gt=0, le=1)
    """Fraction of bandwidth that reads of paged keys and values reach."""
    kernels: float = Field(8, ge=0)
    """Number of sequential kernels per layer."""
    kernel_us: float = Field(2.0, ge=0)
    """Overhead per kernel before its first load and after its last store, microseconds."""
    launch_us: float = Field(125.0, ge=0)
    """Time in which the host launches a kernel without a CUDA graph, microseconds."""
    step_us: float = Field(50.0, ge=0)
    """Overhead per step for embedding, sampling and launch, microseconds."""
    logits_passes: float = Field(2.0, ge=0)
    """Number of times that sampling reads or writes a row of logits, in float32."""
    link: Positive = 400.0
    """Bandwidth between devices of a host, GB/s per direction."""
    link_us: float = Field(8.0, ge=0)
    """Latency of an all-reduce, microseconds."""
