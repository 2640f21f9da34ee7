"""Options of the app `plan`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, JsonValue

from dovetail.core.compose import ENGINE_NODES, AppConfig

Count = Annotated[int, Field(ge=1)]


class PlanConfig(AppConfig):
    """Predict whether a model fits, how many sequences of each length, and how fast, from shapes and a cost model.
    Needs neither a GPU nor weights."""

    needs: ClassVar[tuple[str, ...]] = ENGINE_NODES

    lengths: tuple[Count, ...] = (1024, 4096, 16384, 32768, 131072)
    """Sequence lengths to tabulate, tokens."""
    batches: tuple[Count, ...] = (1, 16, 64, 256)
    """Numbers of running sequences to predict speed for; they are spread evenly over replicas."""
    context: int = Field(1024, ge=1)
    """Context length per sequence in the speed predictions, tokens."""
    load: str | None = None
    """Name of a workload, or path of a recording: simulate it on candidate layouts in place of the tables, and find the
    cheapest candidate that meets the objective."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Options of the workload of plan.load, such as {rates: [16.0], seconds: 30}."""
    ttft: float | None = Field(None, gt=0)
    """Objective of plan.load: limit of the 99th percentile of the time to first token, seconds."""
    tpot: float | None = Field(None, gt=0)
    """Objective of plan.load: limit of the 99th percentile of the time per output token, seconds."""
    gpus: int = Field(8, ge=1, le=64)
    """Most GPUs of a candidate. Candidates have all powers of two of tensor-parallel ranks and of replicas."""
    quants: tuple[str, ...] = ("fp8",)
    """Quantizers of the candidates, in addition to the one that was chosen."""
    layouts: tuple[str, ...] = ()
    """Candidates in place of those, each as overrides: "+preset=h200_fp8_tp8", or "engine.tp=4 engine.dp=2"."""
    price_hour: float | None = Field(None, gt=0)
    """Price of one GPU for an hour, in any currency."""
    format: Literal["table", "json"] = "table"
    """Output format."""
