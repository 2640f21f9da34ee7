"""Drafter contract: tokens of which one target step can accept several (Leviathan et al. 2023, Chen et al. 2023)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

from dovetail.core.interfaces.collective import Alone

if TYPE_CHECKING:
    import torch

    from dovetail.core.interfaces.kv_cache import KVGroup
    from dovetail.core.interfaces.model import BuildContext, ForwardContext, Hidden, ModelSource, ModelSpec, MTPLayer
    from dovetail.core.interfaces.quant import Quantizer
    from dovetail.core.interfaces.records import Request

Verify = Literal["draws", "rejection", "typical"]
"""How drafts of rows that are not greedy are verified. Greedy rows accept the drafts that equal the target's arg-max.

- draws: a draft is accepted if it equals the token that plain sampling draws at its position. The text is that of plain
  decoding, seed by seed.
- rejection: with probability min(1, p/q) (Leviathan et al. 2023). The distribution is that of plain decoding, the text
  is not. Every draft must come from `DraftContext.draw`, and in trees from `DraftContext.best` (`Draft.drawn_BK`).
- typical: if the target's probability p is at least min(0.09, 0.3 exp(-entropy of p)) (Medusa, Cai et al. 2024). Not
  lossless: the distribution is sharper than that of plain decoding.
"""


MOST_NODES = 64
"""Most drafts of a tree: the ancestors of a draft are the bits of one int64."""


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    """Facts from which the memory of a drafter is planned, computed from its config by the function that
    `Component.facts` names."""

    lookahead: int = 0
    spec: ModelSpec | None = None
    """The model inside the drafter, cut over `tp` ranks; None = no weights and pages of its own."""
    weight_bits: float | None = None
    """Bits per weight of that model's linear layers; None = those of the model's dtype."""
    verify: Verify = "draws"
    head_bits: float | None = None
    """The same of its matrix of logits, also if the embedding is tied to it."""
    embedding_bits: float | None = None
    """The same of an embedding that is not tied."""
    one_pass: bool = False
    """All drafts come from one pass over the model's layers, instead of one pass per draft."""
    target_share: float = 0.0
    """Share of the target's layers that a pass of the drafter runs; 0 = none."""
    tp: int | None = None
    """Ranks over which the model inside the drafter is cut; None = engine.tp."""
    mtp: bool = False
    """The model inside the drafter is the target's layer for multi-token prediction (ModelSpec.mtp), in the target's
    number formats; `spec` is None then."""
    product: str | None = None
    """Number format of the matmuls in that model's linear layers, as Formats.product; None = the model's dtype."""
    made_for: tuple[int, int] | None = None
    """(hidden size, vocabulary) of the targets that the drafter was trained for; None = any."""

    def of(self, target: ModelSpec) -> DrafterFacts:
        """Return the facts for this target, whose layer for multi-token prediction they name if the drafter runs it."""
        return replace(self, spec=target.mtp) if self.mtp else self


def _no_layers(embeds_TC: torch.Tensor, ctx: ForwardContext) -> Hidden:
    raise NotImplementedError("this TargetView has no layers of the target")


def _no_mtp_layer(build: BuildContext) -> MTPLayer:
    raise NotImplementedError("this TargetView has no layer for multi-token prediction")


@dataclass(frozen=True, slots=True)
class TargetView:
    """The parts of the target model that a drafter may use, on this rank, and the inputs of layers of its own."""

    build: BuildContext
    """Inputs from which the target was built: spec, device, dtypes, attention, collective."""
    source: ModelSource
    """The target's files."""
    max_seqs: int
    """Number of slots. Tensors by slot have one more entry, for padding."""
    max_len: int
    first_group: int
    """Id of the drafter's first KV group; others follow."""
    embed: Callable[[torch.Tensor], torch.Tensor]
    """Model.embed"""
    logits: Callable[[torch.Tensor], torch.Tensor]
    """Model.logits"""
    forward: Callable[[torch.Tensor, ForwardContext], Hidden] = _no_layers
    """Model.forward, for drafters with `on_target_pages`."""
    mtp_layer: Callable[[BuildContext], MTPLayer] = _no_mtp_layer
    """Model.mtp_layer"""
    part_of_logits: Callable[[torch.Tensor], tuple[torch.Tensor, int]] | None = None
    """Model.local_logits; None = every rank computes all logits."""

    def local_logits(self, states_BC: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Model.local_logits"""
        return (self.logits(states_BC), 0) if self.part_of_logits is None else self.part_of_logits(states_BC)

    def build_context(self, spec: ModelSpec, quantizer: Quantizer, tp: int | None = None) -> BuildContext:
        """Return the inputs of a model inside the drafter: the target's device, dtypes, attention and collective,
        and no adapters. Its operations are tuned together with the target's. `tp`: DrafterFacts.tp; with 1 this rank
        has the whole model."""
        if tp not in (None, 1, self.build.collective.size):
            raise ValueError(f"tp={tp}: a drafter is cut over 1 or all {self.build.collective.size} ranks")
        build = self.build if tp != 1 else replace(self.build, collective=Alone(None), placement=None)
        return replace(build, spec=spec, quantizer=quantizer, adapters=None, first_group=self.first_group)


class LogitsHead(Protocol):
    """A model inside a drafter, or the target (TargetView), whose ranks may have a part of the vocabulary each."""

    @property
    def build(self) -> BuildContext: ...

    def local_logits(self, states_BC: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Model.local_logits"""
        ...


class DrawFrom(Protocol):
    def __call__(
        self, head: LogitsHead, logits: Callable[[torch.Tensor], torch.Tensor], states_BC: torch.Tensor, w: int
    ) -> torch.Tensor: ...


@dataclass(slots=True)
class DraftContext:
    """Decode rows of a step that verifies drafts, before it feeds them. Shapes: B rows, S slots, L tokens a slot, V
    vocabulary. Padding rows have the last slot and want no drafts."""

    slots_B: torch.Tensor
    """int64"""
    tokens_SL: torch.Tensor
    """int32: all known tokens of every slot; tokens_SL[slot, :length] is valid."""
    lengths_B: torch.Tensor
    """int64: exact length of each row, including its last token, which the step feeds before the drafts."""
    k: int
    """Draft tokens to return per row."""
    k_B: torch.Tensor
    """int64: drafts that the step verifies at most, 0 .. k. Rows of 0 need no work."""
    key_S: torch.Tensor
    """int64: key of each slot's random draws (core.ops.random), the only permitted source of randomness."""
    draw: Callable[[torch.Tensor, int], torch.Tensor]
    """draw(logits_BV, w): draft w of each row, int64 [B], from the drafter's logits (any float dtype). Greedy rows have
    the arg-max. Other rows have a draw with the temperature, the filters and, unless `Drafter.verify` is "rejection",
    the noise that sampling uses at this position, so that drafts equal the target's draws where the logits agree. -1 =
    some logit is NaN or +inf. It does not write to the logits: no mask and no logits processor applies to them."""
    best: Callable[[torch.Tensor, int, int], tuple[torch.Tensor, torch.Tensor]]
    """best(logits_MV, w, n): siblings at depth w of a tree, for M = B * m rows of logits, m of each row. Returns the n
    tokens that sampling, with its noise at this position, would prefer in this order, int64 [M, n], and the logarithm
    of each one's share in the scores, float32, as a confidence. For greedy rows this is log q. -1 and -inf = filters
    leave fewer tokens, or some logit is NaN or +inf. With `Drafter.verify` = "rejection" the noise is of their own, and
    a proposal has at most `lookahead` rows of logits for each row of the step."""
    lay_out: LayOut
    """Inputs of a forward pass of the drafter's own layers."""
    draw_from: DrawFrom
    """draw_from(head, logits, states_BC, w): what `draw` returns for logits(states_BC), the head's logits over the
    target's vocabulary. Where neither filters nor rejection need all of them, each rank draws from its part, and the
    ranks exchange one candidate a row."""


class LayOut(Protocol):
    def __call__(
        self, first_S: torch.Tensor, count: int, bits_BN: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ForwardContext]:
        """Return the inputs of a forward pass over `count` tokens of each row, which follow first_S[slot] (int64, by
        slot) tokens in the cache: their ids, int32 [B * count], which are meaningless from index `length` on, and
        positions and attention of the drafter's own KV groups, or with `on_target_pages` of the target's.

        `bits_BN`: int64 [B, count]; the tokens are drafts of a tree whose root is the row's last token, at index
        length - 1, and these are their bits in TreeMask.ancestors_T. None = they are consecutive.

        Pages have room up to index length + k_B - 1, in trees up to length + k - 1; what is written past that is lost.
        """
        ...


@dataclass(frozen=True, slots=True)
class AcceptedPath:
    """Drafts that a step accepted from trees. R rows, D longest path of drafts."""

    slots_R: torch.Tensor
    """int64. Rows of the last slot are padding."""
    root_R: torch.Tensor
    """int64: index of the last token before the drafts in its sequence."""
    index_RD: torch.Tensor
    """int64 [R, 1 + D]: index of the root, 0, and of each accepted draft among the tokens that the row fed. Entries
    past accepted_R are meaningless."""
    accepted_R: torch.Tensor
    """int64: number of accepted drafts, 0 .. D."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Draft tokens of each row: a chain, or a tree if `Drafter.depth` < lookahead."""

    tokens_BK: torch.Tensor
    """Integer; entries from count_B on are ignored. An id outside of the vocabulary ends its row's drafts."""
    count_B: torch.Tensor
    """Integer: number of draft tokens of each row, 0 .. k. The step verifies at most k_B of them."""
    parents_BK: torch.Tensor | None = None
    """Integer: index of each draft's parent, which precedes it; -1 = the row's last token. None = a chain. A row may
    verify only its first drafts, so the most likely ones come first. Drafts end before the first one with an invalid
    parent or of more than `Drafter.depth` levels."""
    drawn_BK: torch.Tensor | None = None
    """Integer; for trees with `Drafter.verify` = "rejection": which row of logits each draft was drawn from, counted by
    row of the step over all calls of `DraftContext.best` of this proposal. Siblings have the order in which `best`
    returned them, from the first one on. Which drafts exist must not depend on their own ids."""


@dataclass(slots=True)
class FedTokens:
    """Tokens that a step fed to the target. Shapes: T tokens, B rows. Some rows and tokens may be padding: rows of the
    last slot, rows without tokens, and tokens of the last slot at the end."""

    ids_T: torch.Tensor
    """int32"""
    slots_T: torch.Tensor
    """int64: slot of each token."""
    ctx: ForwardContext
    """Positions of the tokens, and attention of the target's KV groups; with `follow` also of the drafter's own."""
    slots_B: torch.Tensor
    """int64: slot of each row."""
    row_start_B1: torch.Tensor
    """int32: index of each row's first token, then the number of tokens."""
    kv_len_B: torch.Tensor
    """int32: KV length of each row, the fed tokens included."""
    decodes: int
    """Number of decode rows, which come first and feed a sampled token and its drafts, of which the step may reject
    any. The other rows are chunks of prompts."""
    follow: bool = True
    """Whether a drafter with pages of its own feeds these tokens to its layers. False = the step has no chunks of
    prompts, or their rows are not expected to have drafts that pay: the drafter then leaves them behind."""


class Drafter(ABC):
    """Proposes draft tokens. Built once per rank; all ranks must propose the same tokens.

    On a GPU, calls of `propose` and `observe` are captured in CUDA graphs, one per number of rows and tokens: a step
    repeats their kernels, not their Python code. State that differs from step to step must be in tensors that the
    drafter allocates in `bind`."""

    needs_host_tokens: bool = False
    """True = drafts come from propose_host, which needs every token on the host, so depth must be 1."""
    taps: tuple[int, ...] = ()
    """Indices of the target's layers whose output is passed to `observe` (Hidden.taps). Read after `bind`."""
    follows_features: bool = False
    """True = the KV of token p is computed from this token and the hidden state of token p - 1. KV then depends on its
    own prefix alone, so pages can be shared. A sequence that finds its first tokens in the cache feeds the last of them
    again, without writing KV, since hidden states are not cached. Not for targets with attention windows, which may
    have given back pages that this token reads."""
    window: int | None = None
    """Most tokens of a row that a proposal feeds to the drafter's own layers. A row with more tokens since the last
    proposal, after steps without drafts, has none. None = drafts do not depend on earlier proposals."""
    resumes: bool = True
    """Whether such a row catches up, by `window` tokens per proposal, or by larger chunks (`catch_up`). False = it has
    no more drafts."""
    on_target_pages: bool = False
    """True = `propose` runs layers of the target over its pages, which hold the KV of all tokens before position
    `length` - 1. What it writes from there on is replaced by the step that verifies. Rows use their adapter."""
    autoregressive: bool = False
    """True = each draft takes a pass, after those before it, so fewer drafts take less time (`draft_counts`). False =
    `propose` is always asked for `lookahead` drafts. Trees are not cut off, so it has no effect on them."""
    verify: Verify = "draws"
    """How its drafts are verified."""
    simulated_rates: tuple[float, ...] = ()
    """For measurements: by position, the probability that a draft is accepted if those before it were, by a coin and
    not by verification. () = drafts are verified."""

    def __init__(self, config: object) -> None:
        self.config = config

    @property
    @abstractmethod
    def lookahead(self) -> int:
        """Maximum number of drafts per row and step; 0 = speculation off."""

    @property
    def depth(self) -> int:
        """Longest path of drafts, and so the most that a step accepts of a row. Less than `lookahead` = drafts are a
        tree of up to 64 (SpecInfer, Miao et al. 2024), which needs an attention backend with capability `tree` and
        a `verify` that is not "typical". The default is a chain."""
        return self.lookahead

    @property
    def draft_counts(self) -> tuple[int, ...]:
        """Numbers of drafts that `propose` is asked for (DraftContext.k), the smallest first and `lookahead` last: of a
        step the first that is not less than the most drafts of a row. They are few (1, 2, 3, 4, 6, 8, 12, ...), as each
        has CUDA graphs."""
        if not self.autoregressive or self.depth < self.lookahead:
            return (self.lookahead,) if self.lookahead else ()
        return (*(n for n in range(1, self.lookahead) if n.bit_count() == 1 or n == 3 * (n & -n)), self.lookahead)

    def passes(self, most: int) -> int:
        """Return the length of the longest path that `propose` drafts where a row verifies at most `most`."""
        return self.depth if self.depth < self.lookahead else next(n for n in self.draft_counts if n >= most)

    @property
    def catches_up(self) -> bool:
        """Whether rows that were left behind also catch up by chunks."""
        return self.window is not None and self.resumes and type(self).catch_up is not Drafter.catch_up

    def check_files(self, target: TargetView) -> None:
        """Compare the headers of the drafter's own files with what `bind` loads of them. Called on each rank before a
        device is used, on a drafter that is not bound afterwards: `target.build.device` is the meta device. Raises
        ConfigError naming file and tensor. The default checks nothing."""

    def bind(self, target: TargetView) -> None:
        """Take the target model. Called once, after it is built."""
        self.target = target

    def kv_groups(self) -> tuple[KVGroup, ...]:
        """KV groups of the drafter's own layers, valid after `bind`. Their ids begin at target.first_group. Their pages
        are allocated, shared as prefixes, preempted and moved together with the target's."""
        return ()

    def join(self, slots_J: torch.Tensor, computed_J: torch.Tensor) -> None:
        """Called before the first step of new sequences (int64, on the device): each takes a slot, and the KV of its
        first `computed` tokens is in its pages, because another sequence computed it or it was forked. The target's
        pages may hold more. With `follows_features` the first step feeds the last token of the target's again."""

    def enter(self, slot: int, request: Request) -> None:
        """A sequence of this request takes the slot. Called on the host of each rank, before `join`. Work on the device
        is in the order of the steps, and in no CUDA graph. The default does nothing."""

    def leave(self, slot: int, tokens_L: torch.Tensor, length: torch.Tensor) -> None:
        """The slot's sequence has ended or is preempted. `tokens_L` (int32) and `length` (int64, no dimension) have its
        text on the device, for work that this call enqueues. Called as `enter` is. The default does nothing."""

    def catch_up(self, fed: FedTokens, lengths_B: torch.Tensor) -> None:
        """Feed earlier tokens of decode rows to the drafter's own layers: chunks of rows that steps without drafts, or
        prompts that it did not follow, have left behind. Called before `propose`, in no CUDA graph, for drafters that
        have a `window`, resume, and override this method (`catches_up`); otherwise rows catch up in proposals alone.
        `fed` has the layout of the drafter's own KV groups alone, and no decode rows. A chunk may begin with tokens
        that the drafter has fed already, and those from index `lengths_B` (int64) of a row on are meaningless."""

    def observe(self, fed: FedTokens, hidden: Hidden) -> None:
        """Receive the tokens and hidden states of a step, after the target's layers and before any token is sampled.
        Called in every step, with and without drafts."""

    def keep(self, path: AcceptedPath) -> None:
        """Called after a step that verified trees: the path that it accepted is now contiguous, token root + d for the
        draft at depth d. A drafter that keeps something of each fed token moves it. The target's KV is moved by the
        core; a drafter's own layers are fed the accepted tokens by its next proposal."""

    @abstractmethod
    def propose(self, ctx: DraftContext) -> Draft:
        """Propose up to ctx.k tokens per row. Called at the start of a step that verifies drafts, for its decode rows.
        Runs on the device without host sync."""

    def propose_host(self, tokens: Sequence[int], k: int) -> Sequence[int]:
        """Return at most k tokens to follow `tokens`. Called on the host in rank 0's process, only with
        needs_host_tokens and without `bind`: its sole input is `tokens`."""
        raise NotImplementedError(f"{type(self).__name__} sets needs_host_tokens and has no propose_host")
