"""Model contract: layers built from a Hugging Face config, and the tensor names of its checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import gcd
from typing import TYPE_CHECKING, Any

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces.records import Pooling

if TYPE_CHECKING:
    import torch

    from dovetail.core.interfaces.adapter import Adapters
    from dovetail.core.interfaces.attention import AttentionBackend, AttentionLayer, AttnCtx
    from dovetail.core.interfaces.checkpoint import Checkpoint
    from dovetail.core.interfaces.collective import Collective
    from dovetail.core.interfaces.kv_cache import KVGroup
    from dovetail.core.interfaces.placement import ExpertPlacement
    from dovetail.core.interfaces.quant import Quantizer
    from dovetail.core.interfaces.tuning import Tunable


LATENT_GROUP = 128
"""Columns of an 8-bit latent that share a scale."""


@dataclass(frozen=True, slots=True)
class MLA:
    """Attention over a compressed latent (DeepSeek-V2, 2024). The cache holds kv_rank + rope_dim values per token,
    shared by all heads."""

    q_rank: int
    """0 = queries are not compressed."""
    kv_rank: int
    rope_dim: int
    nope_dim: int
    """Per-head dimensions of query and key without rotary embedding."""
    v_dim: int

    def bytes_per_token(self, dtype_bytes: int) -> int:
        """Cached bytes of one token in one layer. Beside latents of 8 bits there are a float32 scale for each
        LATENT_GROUP columns, and rotated columns in 16 bits."""
        if dtype_bytes > 1:
            return (self.kv_rank + self.rope_dim) * dtype_bytes
        return self.kv_rank + 4 * ceil_div(self.kv_rank, LATENT_GROUP) + 2 * self.rope_dim


@dataclass(frozen=True, slots=True)
class MoE:
    """Routed experts in place of the MLP (Shazeer et al. 2017)."""

    experts: int
    active: int
    """Routed experts per token."""
    intermediate: int
    """Channels of one expert."""
    shared: int = 0
    """Experts of the same size that process every token."""
    dense_layers: int = 0
    """Number of leading layers with a plain MLP of ModelSpec.intermediate."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Number of weights, by role. Layers for multi-token prediction are not counted; ModelSpec.mtp has their own."""

    embedding: int
    head: int
    """0 if the embedding also serves as head."""
    attention: int
    """Attention matrices."""
    mlp: int
    """Matrices of dense MLPs and of shared experts."""
    experts: int = 0
    """Matrices of all routed experts."""
    active_experts: int = 0
    """The part of `experts` that processes one token."""
    rest: int = 0
    """Norms, biases and routers. Quantizers leave them in the model's dtype."""

    @property
    def total(self) -> int:
        return self.embedding + self.head + self.attention + self.mlp + self.experts + self.rest

    @property
    def active(self) -> int:
        """Weights that process one token, embeddings included."""
        return self.total - self.experts + self.active_experts


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    """How a checkpoint turns hidden states into one vector per text."""

    pooling: Pooling
    normalize: bool = True
    """Scale the vector to length 1."""
    dimensions: tuple[int, ...] | None = ()
    """Lengths to which the vector may be truncated (Matryoshka, Kusupati et al. 2022); None = any."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Facts about a model, read from config.json without weights and without torch."""

    architecture: str
    vocab: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    max_len: int
    dtype: str
    """Dtype of the checkpoint: "bfloat16", "float16" or "float32"."""
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    tied: bool = False
    windows: tuple[int, ...] = ()
    """Attention window of each layer, 0 = full; empty = all full."""
    hf: Mapping[str, Any] | None = None
    """The unmodified config.json."""
    checkpoint: str | None = field(default=None, compare=False)
    """Path of the checkpoint whose weights are loaded, as `open_checkpoint` takes it; None = random weights."""
    mla: MLA | None = None
    """None = each kv head has a key and a value of head_dim."""
    moe: MoE | None = None
    """None = every layer has a plain MLP of `intermediate`."""
    mtp: ModelSpec | None = None
    """The checkpoint's layer for multi-token prediction (`Model.mtp_layer`), as a model of one layer; its `parameters`
    count no embedding and no head, which are the model's. None = there is none."""
    parameters: Parameters | None = None
    """None = unknown until the model is built."""
    embedding: EmbeddingSpec | None = None
    """None = the checkpoint does not define one."""
    head: bool = True
    """Whether the model can generate. If False, `logits` is never called."""

    def longest(self, wanted: int | None) -> int:
        """Maximum sequence length: `wanted` tokens, limited by the model's own maximum."""
        return min(wanted or self.max_len, self.max_len)

    def shares(self) -> dict[int, int]:
        """Return a map: number of ranks (engine.tp) that can split heads and channels of MLPs and experts evenly ->
        greatest common divisor of the sides of a rank's matrices."""
        channels = [self.intermediate] if self.moe is None or self.moe.dense_layers else []
        channels += [] if self.moe is None else [self.moe.intermediate]
        shares = {}
        for ranks in range(1, self.heads + 1):
            if gcd(*channels) % ranks == 0 and can_share_heads(self.heads, self.kv_heads, ranks):
                sides = self._attention_sides(ranks)
                shares[ranks] = gcd(self.hidden, *sides, *(count // ranks for count in channels))
        return shares

    def _attention_sides(self, ranks: int) -> tuple[int, ...]:
        """Return sides of a rank's attention matrices."""
        own = self.heads // ranks
        if (mla := self.mla) is None:
            return own * self.head_dim, 2 * max(1, self.kv_heads // ranks) * self.head_dim
        query, latent = own * (mla.nope_dim + mla.rope_dim), mla.kv_rank + mla.rope_dim
        up = own * (mla.nope_dim + mla.v_dim)
        return mla.q_rank, (mla.q_rank or query) + latent, query, mla.kv_rank, up, own * mla.v_dim

    def kv_bytes_per_token(self, dtype_bytes: int, tp: int = 1) -> int:
        """KV cache bytes of one token over all layers, on one of `tp` ranks, ignoring windows. Heads are split over
        ranks, with at least one per rank; a compressed latent is replicated."""
        return self.layers * self._kv_bytes(dtype_bytes, tp)

    def kv_bytes(self, tokens: int, dtype_bytes: int, tp: int = 1) -> int:
        """KV cache bytes of a sequence of `tokens` tokens. A layer with a window keeps at most that many tokens."""
        windows = self.windows or (0,) * self.layers
        held = sum(min(tokens, window) if window else tokens for window in windows)
        return held * self._kv_bytes(dtype_bytes, tp)

    def _kv_bytes(self, dtype_bytes: int, tp: int) -> int:
        """Cached bytes of one token in one layer."""
        if self.mla is not None:
            return self.mla.bytes_per_token(dtype_bytes)
        return 2 * max(1, self.kv_heads // tp) * self.head_dim * dtype_bytes


def can_share_heads(heads: int, kv_heads: int, ranks: int) -> bool:
    """Whether heads split evenly over ranks: each rank gets equally many query and kv heads. With fewer kv heads than
    ranks, adjacent ranks hold copies of one head."""
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's files."""

    checkpoint: Checkpoint | None
    """Config, tokenizer and weights; None = shapes only."""
    dummy: bool = False
    """Use random weights even if the checkpoint has real ones."""

    @property
    def weights(self) -> Checkpoint | None:
        """The checkpoint whose weights are loaded; None = random weights."""
        return None if self.dummy else self.checkpoint


Tuned = Callable[[int], "Iterable[Tunable]"]
"""tuned(rows): operations that a layer runs in a step of `rows` tokens and that can be tuned."""


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Everything that a model is built from, on one rank."""

    spec: ModelSpec
    """Its max_len is that of the engine, if engine.max_len is smaller."""
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    page_tokens: int
    max_len: int
    """Number of positions, with those of drafts beyond the longest sequence."""
    quantizer: Quantizer
    attention: AttentionBackend
    collective: Collective
    """Also holds rank and size of tensor parallelism."""
    adapters: Adapters | None = None
    """Every linear layer passes its output to it (dovetail.core.layers.Linear does so); None = no adapters."""
    tuned: list[Tuned] = field(default_factory=list)
    """Layers append functions that return their tunable operations for a number of rows (dovetail.core.layers do so).
    They must not read weights, which may be on the meta device."""
    first_group: int = 0
    """Id of the model's first KV group; others follow. Not 0 for a model inside a drafter."""
    placement: ExpertPlacement | None = None
    """Bound placement of routed experts (dovetail.core.layers.Experts calls it); None = each rank has some channels of
    every expert."""
    placed: list[Any] = field(default_factory=list)
    """Layers whose experts move (ExpertPlacement.rebalance) append themselves, in the order in which they run
    (dovetail.core.layers.Experts does so)."""

    def tune_attention(self, layer: AttentionLayer) -> None:
        """Append what the attention backend can tune of a layer to `tuned`."""
        # Without `tuned` in it, so that no cycle of references keeps a collective and its port alive.
        self.tuned.append(partial(self.attention.tunables, layer, replace(self, tuned=[], placed=[])))


@dataclass(slots=True)
class ForwardContext:
    """The data of one step that layers read."""

    positions_T: torch.Tensor
    """int64: position of each token in its sequence."""
    attn: Mapping[int, AttnCtx]
    """Attention plan of each KV group, by group id."""
    live_T: torch.Tensor | None = None
    """bool: which tokens belong to a sequence. The others are padding, whose states mean nothing and may be NaN; layers
    whose work depends on a token's values, such as experts, leave them out. None = all."""
    skip: frozenset[int] = frozenset()
    """Layers that this pass leaves out, for drafts. A model that states the capability `skips_layers` does so; the
    others are not given any."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """Output of forward: hidden states_TC after the final norm, and those after each tapped layer, by layer."""

    states: torch.Tensor
    taps: Mapping[int, torch.Tensor]


Layers = Generator[Callable[[], Any], Any, Hidden]
"""A forward in progress (Model.layers). It yields collective calls, is sent the result of each, and returns Hidden."""


class MTPLayer(ABC):
    """Layer that predicts the token after the next one from a model's last hidden states (multi-token prediction,
    DeepSeek-V3, 2024). It is part of the model's checkpoint; embedding and logits are the model's. Built by
    `Model.mtp_layer`, without weights."""

    def __init__(self, build: BuildContext) -> None:
        self.build = build

    @property
    @abstractmethod
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """Its KV groups, whose ids begin at build.first_group. Valid after construction."""

    def check_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Compare the headers of the model's checkpoint with the tensors that `load` takes. Like
        Model.check_checkpoint."""
        return None

    @abstractmethod
    def load(self, weights: Iterable[tuple[str, Callable[[], Any]]]) -> None:
        """Load the layer's weights from (name, opener) pairs of all tensors of the model's checkpoint. Tensors of other
        layers are not opened. Like Model.load."""

    @abstractmethod
    def init_dummy(self, seed: int) -> None:
        """Fill in random weights. Like Model.init_dummy."""

    @abstractmethod
    def forward(self, embeds_TC: torch.Tensor, states_TC: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Predict the token after each of these. `embeds_TC`: Model.embed of the tokens. `states_TC`: for each token,
        Hidden.states of the token before it, or for a token that this layer drafted, what this call returned before;
        zeros for the first token of a sequence. Return states_TC for Model.logits. Capturable; no host sync."""


class Model(ABC):
    """Built from BuildContext, without weights. `load` or `init_dummy` then fills them in."""

    capturable = True
    """False = code of a library runs in `forward`, and may wait for the device. The engine then tries to capture the
    layers of one step of each kind; if that fails, steps run without CUDA graphs, and a start-up note has the error."""

    def __init__(self, config: object, build: BuildContext) -> None:
        self.config, self.build = config, build

    @classmethod
    @abstractmethod
    def spec(cls, config: Any) -> ModelSpec:
        """Read config.json of the checkpoint, without torch or weights. Raises ConfigError naming file and key."""

    @classmethod
    @abstractmethod
    def source(cls, config: Any) -> ModelSource:
        """Return weights and tokenizer, unread and without torch. Raises ConfigError for a missing checkpoint."""

    @property
    @abstractmethod
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """Valid after construction. Each layer is in exactly one group; planes are sized for this rank's heads."""

    def check_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Compare the headers of a checkpoint with the tensors that `load` takes. Called on a model that was built on
        the meta device, on each rank, before a device is used. Raises ConfigError naming file and tensor. The default
        checks nothing: `load` then finds what does not fit."""
        return None

    @abstractmethod
    def load(self, weights: Iterable[tuple[str, Callable[[], Any]]]) -> None:
        """Load weights from (name, opener) pairs of all checkpoint tensors. An opener returns a lazily sliced tensor
        (safetensors get_slice), whose slices may be on the model's device. Raises ConfigError listing missing and
        unexpected names."""

    @abstractmethod
    def init_dummy(self, seed: int) -> None:
        """Fill in random weights of a sensible scale, equal for every rank layout as far as the device allows."""

    @abstractmethod
    def embed(
        self, tokens_T: torch.Tensor, extra_TC: torch.Tensor | None = None, mask_T: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return token embeddings_TC. Where mask_T is true, the row of extra_TC replaces them (images)."""

    @abstractmethod
    def forward(self, embeds_TC: torch.Tensor, ctx: ForwardContext, taps: tuple[int, ...] = ()) -> Hidden:
        """Return the states after the final norm and after each tapped layer. Capturable; no host sync."""

    def layers(self, embeds_TC: torch.Tensor, ctx: ForwardContext, taps: tuple[int, ...] = ()) -> Layers:
        """Like `forward`, as a generator that yields each collective call as a function without arguments and receives
        its result. The number of calls must not depend on the tokens, and the model must keep no state between two
        calls. Optional: large steps can then run as two interleaved halves (`engine.overlap_tokens`)."""
        raise NotImplementedError(f"{type(self).__name__} has no `layers`: engine.overlap_tokens must be 0")

    def mtp_layer(self, build: BuildContext) -> MTPLayer:
        """Build the layer of ModelSpec.mtp. `build`: as TargetView.build_context makes it of that spec. Only called on
        a model with such a layer, which also states the capability `mtp_layers`, the number of them."""
        raise NotImplementedError(f"{type(self).__name__} has no layer for multi-token prediction")

    @abstractmethod
    def logits(self, states_BC: torch.Tensor) -> torch.Tensor:
        """Return logits_BV over the full vocabulary, equal on every rank, in float32 or the model's dtype."""

    def local_logits(self, states_BC: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the `logits` columns that this rank computes (at least one), and the token id of the first. With the
        default every rank gathers the whole vocabulary; with a share, sampling exchanges one candidate per rank."""
        return self.logits(states_BC), 0
