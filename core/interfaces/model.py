"""The model seam: layers from a Hugging Face config, and the names its checkpoint uses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from dovetail.core.interfaces.attention import AttentionBackend, AttnCtx
    from dovetail.core.interfaces.collective import Collective
    from dovetail.core.interfaces.kv_cache import KVGroup
    from dovetail.core.interfaces.quant import Quantizer


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


class Model(ABC):
    """Built on the meta of ModelSpec with BuildContext; weights come through `load` (or `init_dummy`)."""

    def __init__(self, config: object, build: BuildContext) -> None:
        self.config, self.build = config, build

    @classmethod
    @abstractmethod
    def spec(cls, config: Any) -> ModelSpec:
        """Read the model folder's config.json. No torch, no weights. Raises ConfigError naming the file and the key."""

    @property
    @abstractmethod
    def kv_groups(self) -> tuple[KVGroup, ...]: ...

    @abstractmethod
    def load(self, weights: Iterable[tuple[str, Callable[[], Any]]]) -> None:
        """Take (name, opener) of every checkpoint tensor; the opener returns a lazily sliced tensor (safetensors get_slice).
        Raises ConfigError listing missing and unexpected names."""

    @abstractmethod
    def init_dummy(self, seed: int) -> None:
        """Random weights of sensible scale, equal on every rank layout as far as the device allows (model.load=dummy)."""

    @abstractmethod
    def embed(self, tokens_T: torch.Tensor, extra_TC: torch.Tensor | None = None, mask_T: torch.Tensor | None = None) -> torch.Tensor:
        """Token embeddings_TC; where mask_T, rows of extra_TC instead (images)."""

    @abstractmethod
    def forward(self, embeds_TC: torch.Tensor, ctx: ForwardContext, taps: tuple[int, ...] = ()) -> Hidden: ...

    @abstractmethod
    def logits(self, states_BC: torch.Tensor) -> torch.Tensor:
        """Full-vocabulary logits_BV float32, equal on every rank."""
