"""Options of the app `plan`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dovetail.core.compose import AppConfig

Count = Annotated[int, Field(ge=1)]


class PlanConfig(AppConfig):
    """Whether a model fits, how many sequences of which length, and how fast: from shapes and a cost model, without a
    GPU and without weights."""

    needs: ClassVar[tuple[str, ...]] = ("engine", "model", "quant", "adapter", "cost", "executor")

    lengths: tuple[Count, ...] = (1024, 4096, 16384, 32768, 131072)
    """Sequence lengths to tabulate, tokens."""
    batches: tuple[Count, ...] = (1, 16, 64, 256)
    """Running sequences to predict speed for, spread evenly over replicas."""
    context: int = Field(1024, ge=1)
    """Tokens of context per sequence in those predictions."""
    format: Literal["table", "json"] = "table"
    """For people or for programs."""
