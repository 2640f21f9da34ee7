"""Options of the built-in drafters."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from dovetail.core.compose import Config, Part, Selected
from dovetail.core.compose.wording import naming_place
from dovetail.core.interfaces.spec_decode import MOST_NODES
from dovetail.plugins.spec_decode.shape import Shape, shape_of

if TYPE_CHECKING:
    from dovetail.core.interfaces import ModelSpec

Verify = Literal["draws", "rejection", "typical"]


class NoneConfig(Config):
    """No speculation: one token per sequence and step."""


def rates_of(mean: float, drafts: int) -> tuple[float, ...]:
    """Return the equal acceptance rates at `drafts` positions with which a step brings `mean` tokens on average."""
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        low, high = (rate, high) if sum(rate**k for k in range(drafts + 1)) < mean else (low, rate)
    return (high,) * drafts


class DrafterOptions(Config):
    """Options of all drafters."""

    simulate_acceptance: float | tuple[float, ...] | None = None
    """For measurements with random weights: accept drafts by a seeded coin. A number: mean tokens per step with all
    drafts, 1 to 1 + lookahead. A list: for each position, the probability that its draft is accepted if those before
    it were. Every pass is real, the text has no meaning, results say SIMULATED, and app=serve refuses it."""

    @model_validator(mode="after")
    def _simulable(self) -> DrafterOptions:
        wanted, drafts = self.simulate_acceptance, getattr(self, "lookahead", 0)
        if wanted is None:
            return self
        if getattr(self, "verify", "draws") != "draws":
            raise ValueError(f"simulate_acceptance={wanted} replaces the verification: it needs verify=draws")
        if isinstance(wanted, tuple):
            if len(wanted) != drafts or not all(0 <= rate <= 1 for rate in wanted):
                raise ValueError(
                    f"simulate_acceptance={list(wanted)}: give {drafts} probabilities from 0 to 1, one for each draft "
                    f"(lookahead={drafts}), or the mean number of tokens per step"
                )
        elif not 1 <= wanted <= 1 + drafts:
            raise ValueError(
                f"simulate_acceptance={wanted:g}: a step of {drafts} drafts (lookahead={drafts}) brings 1 to "
                f"{1 + drafts} tokens"
            )
        return self

    @property
    def simulated_rates(self) -> tuple[float, ...]:
        """Acceptance rates by position; () = acceptance is not simulated."""
        wanted = self.simulate_acceptance
        if wanted is None:
            return ()
        drafts: int = self.lookahead  # type: ignore[attr-defined]
        return wanted if isinstance(wanted, tuple) else rates_of(wanted, drafts)


class NgramConfig(DrafterOptions):
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


class SuffixConfig(DrafterOptions):
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
    ring: int = Field(16384, ge=0, le=2**20)
    """Tokens of earlier outputs that are searched too, the newest ones; 0 = none. A request matches those with its own
    cache_salt alone."""
    prediction: int = Field(4096, ge=0, le=2**20)
    """Most tokens of a request's prediction that are searched; 0 = predictions are not used."""


class Trees(DrafterOptions):
    """Options of drafters that can draft trees."""

    lookahead: int = Field(4, ge=1, le=16)
    tree: int = Field(0, ge=0, le=MOST_NODES)
    """Draft tokens per sequence and step in a tree of at most `lookahead` levels; 0 = a chain of `lookahead` tokens.
    Trees need an attention backend with tree masks, and verify=draws or verify=rejection."""
    width: int | None = Field(None, ge=1, le=MOST_NODES)
    """With tree_shape=joint, drafts of each level that get children, and children of each; null = as many as `tree` has
    room for in passes of all levels but the last: tree / (lookahead - 1)."""
    tree_shape: str = "joint"
    """joint: the drafts with the highest joint confidence, another tree in each step (EAGLE-2). sequoia: a fixed tree,
    for acceptance that falls with the rank among siblings as is typical (Sequoia). Otherwise a file with the measured
    acceptance by rank, for the best fixed tree (docs/kinds/spec_decode.md). verify=rejection needs a fixed tree."""
    verify: Verify = "draws"

    @property
    def drafts(self) -> int:
        """Draft tokens per sequence and step."""
        return self.tree or self.lookahead

    @property
    def depth(self) -> int:
        """Levels of the drafts."""
        return self.lookahead if self.shape is None else max(self.shape.levels)

    @cached_property
    def shape(self) -> Shape | None:
        """Shape of a fixed tree; None = drafts are a chain, or the shape is joint. Raises ConfigError."""
        return shape_of(self.tree_shape, self.tree, self.lookahead) if self.tree_shape != "joint" else None

    @property
    def branches(self) -> int:
        """Width of the tree."""
        return self.width or self.tree // max(self.lookahead - 1, 1)

    @model_validator(mode="after")
    def _grows(self) -> Trees:
        if not self.tree:
            for name, default in (("width", None), ("tree_shape", "joint")):
                if (given := getattr(self, name)) != default:
                    raise ValueError(f"{name}={given} is that of a tree: set tree to the number of its drafts, too")
            return self
        levels, width = self.lookahead, self.branches
        if self.tree <= levels:
            raise ValueError(f"tree={self.tree} drafts in {levels} levels are a chain: set tree=0 or over {levels}")
        if self.simulate_acceptance is not None:
            raise ValueError(f"simulate_acceptance={self.simulate_acceptance} accepts chains alone: set tree=0")
        if self.verify == "typical":
            raise ValueError("verify=typical verifies chains alone: set verify=draws, or tree=0")
        if self.tree_shape != "joint":
            if self.width is not None:
                raise ValueError(f"width={self.width} is that of trees with tree_shape=joint: leave it out")
            return self
        if self.verify == "rejection":
            raise ValueError(
                "verify=rejection is lossless only for trees whose shape does not depend on their drafts: set "
                "tree_shape=sequoia or a file of measured ranks, or verify=draws"
            )
        if (least := width * (levels - 1)) > self.tree:
            raise ValueError(
                f"width={width} drafts with children in {levels - 1} levels need tree={least} or more, and it is "
                f"{self.tree}: set width={self.tree // (levels - 1)} or less, or null"
            )
        if (grown := width + (levels - 1) * width * width) < self.tree:
            if self.width is None:
                raise ValueError(
                    f"tree={self.tree} has room for one draft with children in each of {levels - 1} levels, a chain: "
                    f"set tree={2 * (levels - 1)} or more, lookahead={self.tree // 2 + 1} or less, or tree=0"
                )
            raise ValueError(
                f"width={width} in {levels} levels makes {grown} drafts, fewer than tree={self.tree}: set a greater "
                "width, or null"
            )
        return self


class OwnLayers(Trees):
    """Options of drafters with layers and weights of their own."""

    tp: Literal[1] | None = None
    """Ranks over which the drafter's layers are cut. null: engine.tp, as the model's. 1: every rank has the whole
    drafter, so that its passes need no all-reduce, which takes most of a small layer's time; embedding and logits of
    the model stay cut. More weights and KV cache on each GPU."""


class DraftModelConfig(OwnLayers):
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

    def naming_its_model(self) -> AbstractContextManager[None]:
        """Let errors about the draft model's files name its options: spec_decode.model.path for model.path."""
        return naming_place("model", "spec_decode.model", self.model.component.config.model_fields)

    def spec(self) -> ModelSpec:
        """Return the shapes of the draft model."""
        with self.naming_its_model():
            return self.model.facts() or self.model.target().spec(self.model.config)


class LayerSkipConfig(DrafterOptions):
    """Drafts by some of the model's own layers, on the model's pages: without training, weights or pages of its own."""

    lookahead: int = Field(4, ge=1, le=16)
    """Draft tokens per sequence and step; each is a pass over the layers that are kept."""
    verify: Verify = "draws"
    """How drafts of requests that are not greedy are verified; as for spec_decode=draft_model."""
    share: float = Field(0.5, gt=0, lt=1)
    """Share of the layers that drafts run: the first, the last, and others at equal distances."""


class HeadFiles(OwnLayers):
    """Options of drafters that are trained for one target."""

    lookahead: int = Field(4, ge=1, le=16)
    """Draft tokens per sequence and step, or levels of a tree of them."""
    verify: Verify = "draws"
    """How drafts of requests that are not greedy are verified; as for spec_decode=draft_model."""
    bundled: ClassVar[str | None] = None
    """Folder of the drafter of the bundled model."""
    variant: ClassVar[str] = "eagle3_llama3_8b"
    """Variant that sets the shapes of such a drafter."""
    path: str | None = None
    """Folder with config.json and the drafter's weights as safetensors, in the published layout. null without `hf`:
    a bundled drafter of model=tiny; there is none for spec_decode=parallel."""
    load: Literal["auto", "dummy"] = "auto"
    """auto: weights from `path`. dummy: random weights of the same shapes (drafts are rarely accepted)."""
    hf: dict[str, Any] | None = Field(None)
    """Content of a config.json, in place of a folder; only with load=dummy."""
    quant: Selected = Part("quant", default="none")
    """Quantizer of the drafter."""

    @property
    def folder(self) -> str | None:
        """Folder of the drafter; None = it has the shapes of `hf`."""
        return self.path if self.path is not None or self.hf is not None else self.bundled

    @model_validator(mode="after")
    def _one_source(self) -> HeadFiles:
        if (self.folder is None) == (self.hf is None):
            given = "both" if self.folder is not None else "neither"
            raise ValueError(
                f"{given} of spec_decode.path and spec_decode.hf given: set spec_decode.path=<folder of the drafter>, "
                f"or a variant that sets the shapes, such as spec_decode={self.variant} (random weights)"
            )
        if self.hf is not None and self.load != "dummy":
            raise ValueError(
                "spec_decode.hf has shapes but no weights: set spec_decode.load=dummy, or spec_decode.path=<folder>"
            )
        return self


class EagleConfig(HeadFiles):
    """Drafts by one layer over the target's last hidden states (EAGLE), with KV pages of its own."""

    bundled = "pkg://dovetail.plugins.spec_decode.bundled/eagle"


class Eagle3Config(HeadFiles):
    """Drafts by one layer over hidden states of three layers of the target (EAGLE-3), with KV pages of its own."""

    bundled = "pkg://dovetail.plugins.spec_decode.bundled/eagle3"


class ParallelConfig(HeadFiles):
    """Drafts all tokens in one pass of an EAGLE-3 layer that was trained with mask tokens (P-EAGLE)."""

    variant = "parallel_llama3_8b"

    @model_validator(mode="after")
    def _chains(self) -> ParallelConfig:
        if self.tree:
            raise ValueError(f"tree={self.tree}: spec_decode=parallel drafts chains alone: set tree=0")
        return self


class MedusaConfig(HeadFiles):
    """Drafts by heads that each predict one of the next tokens from the target's last hidden state (Medusa)."""

    bundled = "pkg://dovetail.plugins.spec_decode.bundled/medusa"
    variant = "medusa_llama3_8b"


class MTPConfig(Trees):
    """Drafts by the checkpoint's own layer for multi-token prediction, with KV pages of its own."""

    lookahead: int = Field(1, ge=1, le=16)
    """Draft tokens per sequence and step, or levels of a tree of them; each is a pass of the layer, which was trained
    for the first."""
    verify: Verify = "draws"
    """How drafts of requests that are not greedy are verified; as for spec_decode=draft_model."""
