"""Options of the app `ablate`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from dovetail.core.compose import ENGINE_NODES, Config
from dovetail.plugins.app.bench.config import RunsConfig

Value = bool | int | float | str | None
Values = Annotated[tuple[Value, ...], Field(min_length=1)]
Design = Literal["grid", "one_at_a_time"]


class QualityConfig(Config):
    """Quality check: answers of each variant, generated apart from the timed runs, are compared with the baseline's."""

    prompts: int = Field(8, ge=0)
    """Number of prompts, cut from the ends of workload prompts; 0: no quality check."""
    prompt_tokens: int = Field(128, ge=1)
    """Maximum length of each prompt, tokens."""
    tokens: int = Field(64, ge=2)
    """Tokens generated from each prompt."""
    text: str | None = None
    """UTF-8 text file. Log-likelihoods are computed on `prompts` windows of this text, each `prompt_tokens` + `tokens`
    long, instead of on text sampled by the first variant. Needs a model with a tokenizer."""


class AblateConfig(RunsConfig):
    """Swap parts and measure what each one changes: same requests for all, ratios with confidence intervals."""

    needs: ClassVar[tuple[str, ...]] = (*ENGINE_NODES, "workload")

    vary: dict[str, Values] = Field(default_factory=dict)
    """Kind or dotted option -> values to try: {kv_cache: [paged, radix], engine.page_size: [16, 32]}. The baseline is
    the given composition."""
    design: Design = "grid"
    """grid: every combination of values. one_at_a_time: the baseline with one value changed."""
    ladder: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Ordered steps, instead of `vary`: name -> overrides added to the previous step. Each step is compared with the
    previous and with the first one. `app=ladder` is the built-in ladder."""
    rounds: int = Field(5, ge=1)
    """Starts of each variant, each in a new process. Every round starts all variants once, in a different order."""
    runs: int = Field(2, ge=1)
    """Runs of the workload per start. Intervals are computed over rounds; more runs make each round more precise."""
    quality: QualityConfig = QualityConfig()
    """How the answers of the variants are compared."""
    out: str | None = None
    """JSON file for all runs and comparisons, rewritten after each start."""
    plot: str | None = None
    """Plot of the ratios with their intervals, for a ladder also of the cumulative ratio (png, svg or pdf). Needs the
    extra `bench`."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if self.vary and self.ladder:
            raise ValueError("vary and ladder both define the variants: give one of them")
        return self
