"""The model seam: layers from a Hugging Face config, and the names its checkpoint uses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.core.interfaces.records import Pooling

if TYPE_CHECKING:
    import torch

    from dovetail.core.interfaces.adapter import Adapters
    from dovetail.core.interfaces.attention import AttentionBackend, AttnCtx
    from dovetail.core.interfaces.collective import Collective
    from dovetail.core.interfaces.kv_cache import KVGroup
    from dovetail.core.interfaces.quant import Quantizer


@dataclass(frozen=True, slots=True)
class MLA:
    """Attention over a compressed latent (DeepSeek-V2, 2024): a token's cache is kv_rank + rope_dim values, for all
    heads."""

    q_rank: int
    """0 = queries are not compressed."""
    kv_rank: int
    rope_dim: int
    nope_dim: int
    """Of each head's query and key, the part without rotary."""
    v_dim: int


@dataclass(frozen=True, slots=True)
class MoE:
    """Routed experts in place of the MLP (Shazeer et al. 2017)."""

    experts: int
    active: int
    """Routed experts that one token passes."""
    intermediate: int
    """Of one expert."""
    shared: int = 0
    """Experts, of the same size, that every token passes."""
    dense_layers: int = 0
    """The first layers, which have a plain MLP of ModelSpec.intermediate."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """How many weights a model has, by what becomes of them. Prediction layers past the last (MTP) are not counted."""

    embedding: int
    head: int
    """0 where the embedding serves as head."""
    attention: int
    """Matrices of attention."""
    mlp: int
    """Matrices of dense MLPs and shared experts."""
    experts: int = 0
    """Matrices of all routed experts."""
    active_experts: int = 0
    """Those of `experts` that one token passes."""
    rest: int = 0
    """Norms, biases and routers, which quantizers leave in the model's dtype."""

    @property
    def total(self) -> int:
        return self.embedding + self.head + self.attention + self.mlp + self.experts + self.rest

    @property
    def active(self) -> int:
        """What one token passes, embeddings included."""
        return self.total - self.experts + self.active_experts


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    """How a checkpoint means its hidden states to become one vector of a text."""

    pooling: Pooling
    normalize: bool = True
    """Scale to length 1."""
    dimensions: tuple[int, ...] | None = ()
    """Lengths to which it may be cut (Matryoshka, Kusupati et al. 2022); None = any."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Facts every part of the engine may need, read from config.json without weights and without torch."""

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
    """Of the checkpoint: "bfloat16", "float16", "float32"."""
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    tied: bool = False
    windows: tuple[int, ...] = ()
    """Attention window of each layer, 0 = full; empty = all full."""
    hf: Mapping[str, Any] | None = None
    """config.json as it stands."""
    mla: MLA | None = None
    """None = each kv head has a key and a value of head_dim."""
    moe: MoE | None = None
    """None = every layer has a plain MLP of `intermediate`."""
    parameters: Parameters | None = None
    """None = the model cannot say without being built."""
    embedding: EmbeddingSpec | None = None
    """None = the checkpoint states none."""
    head: bool = True
    """It can generate. Without a head `logits` is never called."""

    def longest(self, wanted: int | None) -> int:
        """Tokens of the longest sequence where so many are wanted: never more than the model was made for."""
        return min(wanted or self.max_len, self.max_len)

    def shares(self) -> dict[int, int]:
        """Numbers of ranks (engine.tp) that can share heads and MLP channels -> what both sides of each matrix of a
        rank divide by."""
        shares = {}
        for ranks in range(1, self.heads + 1):
            if self.intermediate % ranks == 0 and can_share_heads(self.heads, self.kv_heads, ranks):
                q = self.heads // ranks * self.head_dim
                kv = max(1, self.kv_heads // ranks) * self.head_dim
                shares[ranks] = gcd(self.hidden, q, 2 * kv, self.intermediate // ranks)
        return shares

    def kv_bytes_per_token(self, dtype_bytes: int, tp: int = 1) -> int:
        """KV cache of one token over all layers, on one of `tp` ranks, before any window slides. Heads are split over
        ranks as far as there are any; a compressed latent is on every rank."""
        return self.layers * self._kv_values(tp) * dtype_bytes

    def kv_bytes(self, tokens: int, dtype_bytes: int, tp: int = 1) -> int:
        """KV cache of a sequence of so many tokens; layers with a window keep no more than that."""
        windows = self.windows or (0,) * self.layers
        held = sum(min(tokens, window) if window else tokens for window in windows)
        return held * self._kv_values(tp) * dtype_bytes

    def _kv_values(self, tp: int) -> int:
        """Of one token in one layer."""
        if self.mla is not None:
            return self.mla.kv_rank + self.mla.rope_dim
        return 2 * max(1, self.kv_heads // tp) * self.head_dim


def can_share_heads(heads: int, kv_heads: int, ranks: int) -> bool:
    """Each rank gets as many query heads, and as many kv heads; with fewer kv heads than ranks, neighbouring ranks hold
    the same one."""
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model's files are."""

    folder: Path | None
    """With config.json, tokenizer.json and safetensors; None = shapes alone."""
    dummy: bool = False
    """Random weights even where the folder has real ones."""


@dataclass(frozen=True, slots=True)
class BuildContext:
    """What a model is built from, on one rank."""

    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    page_tokens: int
    max_len: int
    quantizer: Quantizer
    attention: AttentionBackend
    collective: Collective
    """rank and size of tensor parallelism are its."""
    adapters: Adapters | None = None
    """What every linear layer hands its products to (dovetail.core.layers.Linear does); None = no adapters."""


@dataclass(slots=True)
class ForwardContext:
    """One step as layers see it."""

    positions_T: torch.Tensor
    """int64"""
    attn: Mapping[int, AttnCtx]
    """By KV group id."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """Output of forward: final-norm hidden states_TC and the hidden states after each tapped layer."""

    states: torch.Tensor
    taps: Mapping[int, torch.Tensor]


Layers = Generator[Callable[[], Any], Any, Hidden]
"""A forward under way (Model.layers): yields collective calls, is sent what each returned, returns its outcome."""


class Model(ABC):
    """Built on the meta of ModelSpec with BuildContext; weights come through `load` (or `init_dummy`)."""

    def __init__(self, config: object, build: BuildContext) -> None:
        self.config, self.build = config, build

    @classmethod
    @abstractmethod
    def spec(cls, config: Any) -> ModelSpec:
        """Read the model folder's config.json. No torch, no weights. Raises ConfigError naming the file and the key."""

    @classmethod
    @abstractmethod
    def source(cls, config: Any) -> ModelSource:
        """Where weights and tokenizer come from. No torch. Raises ConfigError for a folder that is not there."""

    @property
    @abstractmethod
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """Known after construction: each layer in one group, with planes for this rank's heads."""

    @abstractmethod
    def load(self, weights: Iterable[tuple[str, Callable[[], Any]]]) -> None:
        """Take (name, opener) of every checkpoint tensor; the opener returns a lazily sliced tensor (safetensors
        get_slice). Raises ConfigError listing missing and unexpected names."""

    @abstractmethod
    def init_dummy(self, seed: int) -> None:
        """Random weights of sensible scale, equal on every rank layout as far as the device allows
        (model.load=dummy)."""

    @abstractmethod
    def embed(
        self, tokens_T: torch.Tensor, extra_TC: torch.Tensor | None = None, mask_T: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Token embeddings_TC; where mask_T, rows of extra_TC instead (images)."""

    @abstractmethod
    def forward(self, embeds_TC: torch.Tensor, ctx: ForwardContext, taps: tuple[int, ...] = ()) -> Hidden:
        """States after the final norm, and those after each tapped layer. Capturable; no host sync."""

    def layers(self, embeds_TC: torch.Tensor, ctx: ForwardContext, taps: tuple[int, ...] = ()) -> Layers:
        """`forward` as a generator that makes no collective call by itself: it yields each as a function without
        arguments, and goes on with what that returned. As many calls whatever the tokens, and nothing between two of
        them is kept on the model. Optional: with it, large steps may run as two halves in turns
        (`engine.overlap_tokens`), the calls on a stream of their own."""
        raise NotImplementedError(f"{type(self).__name__} has no `layers`: engine.overlap_tokens must be 0")

    @abstractmethod
    def logits(self, states_BC: torch.Tensor) -> torch.Tensor:
        """Full-vocabulary logits_BV, equal on every rank: float32, or the model's dtype, which sampling then widens."""

    def local_logits(self, states_BC: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The columns of `logits` that this rank computes, at least one, and the token of the first. With the default,
        all of them, draws gather the whole vocabulary on every rank; with less, one candidate of each rank."""
        return self.logits(states_BC), 0
