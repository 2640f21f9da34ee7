"""Options of the app `plan`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dovetail.core.compose import AppConfig

Count = Annotated[int, Field(ge=1)]


class PlanConfig(AppConfig):
    """Predict whether a model fits, how many sequences of each length, and how fast, from shapes and a cost model.
    Needs neither a GPU nor weights."""

    needs: ClassVar[tuple[str, ...]] = (
        "engine",
        "model",
        "quant",
        "adapter",
        "experts",
        "spec_decode",
        "cost",
        "executor",
    )

    lengths: tuple[Count, ...] = (1024, 4096, 16384, 32768, 131072)
    """Sequence lengths to tabulate, tokens."""
    batches: tuple[Count, ...] = (1, 16, 64, 256)
    """Numbers of running sequences to predict speed for; they are spread evenly over replicas."""
    context: int = Field(1024, ge=1)
    """Context length per sequence in the speed predictions, tokens."""
    format: Literal["table", "json"] = "table"
    """Output format."""
