"""Options of the built-in drafters."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from dovetail.core.compose import Config, Part, Selected
from dovetail.core.interfaces.spec_decode import MOST_NODES

Verify = Literal["draws", "rejection", "typical"]


class NoneConfig(Config):
    """No speculation: one token per sequence and step."""


class NgramConfig(Config):
    """Drafts the tokens that followed the last earlier occurrence of the sequence's suffix (prompt lookup)."""

    lookahead: int = Field(4, ge=1, le=32)
    """Draft tokens per sequence and step."""
    min_match: int = Field(2, ge=1, le=16)
    """Shortest matching suffix, in tokens."""
    max_match: int = Field(4, ge=1, le=16)
    """Longest suffix compared, in tokens. Longer matches win, then later ones."""

    @model_validator(mode="after")
    def _ordered(self) -> NgramConfig:
        if self.min_match > self.max_match:
            raise ValueError(f"min_match={self.min_match} is more than max_match={self.max_match}")
        return self


class SuffixConfig(Config):
    """Drafts the tokens that followed the longest earlier occurrence of the sequence's suffix, more of them after a
    longer match (suffix decoding)."""

    lookahead: int = Field(8, ge=1, le=32)
    """Most draft tokens per sequence and step."""
    growth: float = Field(1.0, gt=0, le=32)
    """Draft tokens per matched token, rounded down."""
    min_match: int = Field(1, ge=1, le=16)
    """Shortest matching suffix, in tokens."""
    max_match: int = Field(64, ge=16, le=256)
    """Longest suffix compared, in tokens. Longer matches win, then later ones."""


class Trees(Config):
    """Options of drafters that can draft trees."""

    lookahead: int = Field(4, ge=1, le=16)
    tree: int = Field(0, ge=0, le=MOST_NODES)
    """Draft tokens per sequence and step in a tree of `lookahead` levels, those with the highest joint confidence;
    0 = a chain of `lookahead` tokens. Trees need an attention backend with tree masks, and verify=draws."""
    width: int | None = Field(None, ge=1, le=MOST_NODES)
    """Drafts of each level of a tree that get children, and children of each; null = as many as `tree` has room for in
    passes of all levels but the last: tree / (lookahead - 1)."""
    verify: Verify = "draws"

    @property
    def drafts(self) -> int:
        """Draft tokens per sequence and step."""
        return self.tree or self.lookahead

    @property
    def branches(self) -> int:
        """Width of the tree."""
        return self.width or self.tree // max(self.lookahead - 1, 1)

    @model_validator(mode="after")
    def _grows(self) -> Trees:
        if not self.tree:
            if self.width is not None:
                raise ValueError(f"width={self.width} is that of a tree: set tree to the number of its drafts, too")
            return self
        levels, width = self.lookahead, self.branches
        if self.tree <= levels:
            raise ValueError(f"tree={self.tree} drafts in {levels} levels are a chain: set tree=0 or over {levels}")
        if self.verify != "draws":
            raise ValueError(f"verify={self.verify} verifies chains alone: set verify=draws, or tree=0")
        if (least := width * (levels - 1)) > self.tree:
            raise ValueError(
                f"width={width} drafts with children in {levels - 1} levels need tree={least} or more, and it is "
                f"{self.tree}: set width={self.tree // (levels - 1)} or less, or null"
            )
        if (grown := width + (levels - 1) * width * width) < self.tree:
            raise ValueError(f"width={width} in {levels} levels makes {grown} drafts, fewer than tree={self.tree}")
        return self


class DraftModelConfig(Trees):
    """Drafts by a smaller model with the same vocabulary, which has KV pages of its own."""

    lookahead: int = Field(4, ge=1, le=16)
    """Draft tokens per sequence and step, or levels of a tree of them; each is a pass of the draft model."""
    verify: Verify = "draws"
    """How drafts of requests that are not greedy are verified. draws: by comparison with plain sampling's draws, so the
    text is the same as without drafts. rejection: accepts more at high temperatures; the same distribution, but other
    text for a seed. typical: not lossless."""
    model: Selected = Part("model", default="tiny_draft")
    """The draft model: `model@spec_decode.model=llama spec_decode.model.path=<model folder>`."""
    quant: Selected = Part("quant", default="auto")
    """Quantizer of the draft model; auto: the one that reads its checkpoint."""


class HeadFiles(Trees):
    """Options of drafters that are trained for one target."""

    lookahead: int = Field(4, ge=1, le=16)
    """Draft tokens per sequence and step, or levels of a tree of them."""
    verify: Verify = "draws"
    """How drafts of requests that are not greedy are verified; as for spec_decode=draft_model."""
    path: str | None = None
    """Folder with config.json and the drafter's weights as safetensors, in the published layout."""
    load: Literal["auto", "dummy"] = "auto"
    """auto: weights from `path`. dummy: random weights of the same shapes (drafts are rarely accepted)."""
    hf: dict[str, Any] | None = Field(None)
    """Content of a config.json, in place of a folder; only with load=dummy."""
    quant: Selected = Part("quant", default="none")
    """Quantizer of the drafter."""

    @model_validator(mode="after")
    def _one_source(self) -> HeadFiles:
        if (self.path is None) == (self.hf is None):
            given = "both" if self.path is not None else "neither"
            raise ValueError(
                f"{given} of spec_decode.path and spec_decode.hf given: set spec_decode.path=<folder of the drafter>, "
                "or a variant that sets the shapes, such as spec_decode=eagle3_llama3_8b (random weights)"
            )
        if self.hf is not None and self.load != "dummy":
            raise ValueError(
                "spec_decode.hf has shapes but no weights: set spec_decode.load=dummy, or spec_decode.path=<folder>"
            )
        return self


class EagleConfig(HeadFiles):
    """Drafts by one layer over the target's last hidden states (EAGLE), with KV pages of its own."""


class Eagle3Config(HeadFiles):
    """Drafts by one layer over hidden states of three layers of the target (EAGLE-3), with KV pages of its own."""


class MedusaConfig(HeadFiles):
    """Drafts by heads that each predict one of the next tokens from the target's last hidden state (Medusa)."""
