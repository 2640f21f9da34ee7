"""Options of the app `quality`."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from dovetail.core.compose import ENGINE_NODES, AppConfig
from dovetail.plugins.app.ablate.config import Values


class QualityConfig(AppConfig):
    """Measure what number formats cost: perplexity, KL divergence, top-1 agreement and greedy divergence on held-out
    text, against the given composition."""

    needs: ClassVar[tuple[str, ...]] = ENGINE_NODES

    vary: dict[str, Values] = Field(default_factory=dict)
    """Kind or dotted option -> values to try, in every combination: {quant: [none, fp8], engine.kv_dtype: [auto,
    fp8_e4m3]}. The reference is the given composition."""
    variants: tuple[str, ...] = ()
    """The variants one by one, instead of `vary`: each is a line of overrides, such as "quant=fp8 quant.scales=tensor",
    added to the given composition."""
    text: str | None = None
    """UTF-8 text file that the model has not been trained on. null: modules of Python's standard library that the
    bundled model has not been trained on, which therefore measure only that model."""
    windows: int = Field(32, ge=2)
    """Windows of the text, the samples of all intervals."""
    length: int = Field(256, ge=2)
    """Length of a window, tokens."""
    tokens: int = Field(64, ge=0)
    """Greedy tokens after the beginning of each window, which is shorter by so many tokens; 0: no greedy outputs."""
    seed: int = 0
    """Seed of the choice of windows, if the text has more."""
    reference_bytes: int = Field(8 << 30, ge=0)
    """Maximum host memory for the reference's logits, bytes: windows x length x vocabulary x bytes of a logit."""
    out: str | None = None
    """Folder for quality.json, rewritten after each variant, and for the plot quality.svg, which needs the extra
    `bench`."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.vary and self.variants:
            raise ValueError("vary and variants both define the variants: give one of them")
        if self.tokens >= self.length:
            raise ValueError(f"tokens={self.tokens} leaves no prompt in windows of length={self.length}: lower it")
        return self
