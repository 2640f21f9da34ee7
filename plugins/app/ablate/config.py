"""Options of the app `ablate`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from dovetail.core.compose import ENGINE_NODES, Config
from dovetail.plugins.app.bench.config import RunsConfig

Value = bool | int | float | str | None
Values = Annotated[tuple[Value, ...], Field(min_length=1)]


class QualityConfig(Config):
    """What each variant answers beside the runs, so that its answers can be held against the baseline's."""

    prompts: int = Field(8, ge=0)
    """How many prompts, the ends of such as the workload has; 0: no quality is looked at."""
    prompt_tokens: int = Field(128, ge=1)
    """Of each prompt at most."""
    tokens: int = Field(64, ge=2)
    """Generated from each prompt."""
    text: str | None = None
    """A text file (UTF-8): log-likelihoods are then of this text, in that many windows of `prompt_tokens` + `tokens`,
    and not of what the first variant sampled. Needs a model with a tokenizer."""


class AblateConfig(RunsConfig):
    """Swap parts and measure what each changes: the same requests for all, ratios with confidence intervals."""

    needs: ClassVar[tuple[str, ...]] = (*ENGINE_NODES, "workload")

    vary: dict[str, Values] = Field(default_factory=dict)
    """Kind or dotted option -> the values to try: {kv_cache: [paged, radix], engine.page_size: [16, 32]}. The baseline
    is the composition as given."""
    design: Literal["grid", "one_at_a_time"] = "grid"
    """grid: every combination of values. one_at_a_time: the baseline with one of them changed."""
    ladder: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """In place of `vary`, steps in order: name -> overrides that it adds to the step before, with which it is compared,
    and with the first. `app=ladder` has one."""
    rounds: int = Field(5, ge=1)
    """Starts of each variant, each in a process of its own; in each round all take a turn, in another order."""
    runs: int = Field(2, ge=1)
    """Of the workload in each start. Intervals come from the rounds; runs make each of those more precise."""
    quality: QualityConfig = QualityConfig()
    """How the answers of variants are compared."""
    out: str | None = None
    """Write every run and every comparison to this JSON file, after each start."""
    plot: str | None = None
    """Draw ratios with their intervals, for a ladder with its climb, to this file (png, svg or pdf). Needs the extra
    `bench`."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if self.vary and self.ladder:
            raise ValueError("vary and ladder are two ways to name variants: give one of them")
        return self
