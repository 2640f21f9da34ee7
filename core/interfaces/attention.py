"""The attention seam: writes a step's K and V into pages and attends over them.

Shape suffixes: T tokens of the step, B rows, H query heads, K kv heads, D head dim, P pages per table, S slots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dovetail.core.interfaces.activation import PLAIN, ActFormat, Bundle

if TYPE_CHECKING:
    import torch

    from dovetail.core.interfaces.kv_cache import KVGroup


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What a backend must know of one layer, on this rank."""

    index: int
    """Model layer."""
    group: int
    """KV group id."""
    local: int
    """Position of the layer in its group's pool."""
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    """Multiplies q.k; 1/sqrt(D) as a rule."""
    window: int = 0
    """Tokens to look back, the current one included; 0 = all."""
    k_scale: float | torch.Tensor = 1.0
    """What K is divided by before it is stored in 8 bits: one number, or float32 [kv_heads] on the device."""
    v_scale: float | torch.Tensor = 1.0
    """The same of V; both are numbers or both tensors."""


@dataclass(frozen=True, slots=True)
class HostBounds:
    """What the host knows of a step before it runs. Lengths are upper bounds; the device has the exact ones.

    While a graph of mixed steps is captured (capability `graphs`: "mixed") counts are upper bounds, too, and together
    more than the step has tokens: rows may have fewer or none, and tokens after those of the last row belong to none.
    """

    counts: tuple[int, ...]
    """Tokens of each row."""
    bounds: tuple[int, ...]
    """KV length of each row after the step, at most."""
    num_decode: int
    """The first rows, each of equal count when speculation is uniform, are decode rows."""


@dataclass(slots=True)
class BatchMeta:
    """Device metadata of one step for one KV group. Tensors of fixed capacity, so that one graph serves any batch of
    its size.

    Written by the runner before `plan_device`; read-only for backends.
    """

    row_start_B1: torch.Tensor
    """int32 [B+1]: first token of each row, then T."""
    kv_len_B: torch.Tensor
    """int32: exact KV length of each row after this step's write, counting padded draft positions too."""
    slots_B: torch.Tensor
    """int64: slot of each row."""
    positions_T: torch.Tensor
    """int64: position of each token in its sequence."""
    rows_T: torch.Tensor
    """int64: row of each token."""
    page_table_BP: torch.Tensor
    """int32: page ids of each row."""
    write_T: torch.Tensor
    """int64: flat token slot (page * page_tokens + offset) where each token's K and V go."""
    page_tokens: int
    tree_mask_TW: torch.Tensor | None = None
    """bool [T, W]: which of the row's last W tokens a tree-draft token sees; None = causal chain."""


@dataclass(slots=True)
class AttnCtx:
    """One step's plan of one backend for one KV group; several live at once."""

    meta: BatchMeta
    host: HostBounds
    state: Any = None
    """The backend's own."""


@dataclass(frozen=True, slots=True)
class KVPool:
    """The tensors of one KV group: planes[name] is [layers, pages + 1, page_tokens, *plane.shape]; page 0 is
    scratch."""

    group: KVGroup
    planes: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def layer(self, local: int, name: str) -> torch.Tensor:
        """[pages + 1, page_tokens, *plane.shape] of one layer."""
        return self.planes[name][local]


@dataclass(frozen=True, slots=True)
class QKNorm:
    """RMSNorm over head_dim of q and k (Qwen 3), applied before rotary."""

    q_weight_D: torch.Tensor
    k_weight_D: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Rope:
    """cos|sin of every position, [max_len, rotary_dim] float32: the first half cos, the second sin (NeoX halves)."""

    table: torch.Tensor


class AttentionBackend(ABC):
    """Stateless between steps but for what `bind` gives it. Built once per rank."""

    exact_lengths: Literal["device", "host"] = "device"
    """"host": plan_host needs exact KV lengths, so speculation cannot overlap; the capability check says so."""

    def __init__(self, config: object) -> None:
        self.config = config
        self.pools: Mapping[int, KVPool] = {}

    def bind(self, pools: Mapping[int, KVPool]) -> None:
        """Take the KV tensors, by group id. Called again whenever they change: with
        trial pools while memory is measured, with {} to let go of them, then with the real ones."""
        self.pools = pools

    def plan_host(self, bounds: HostBounds) -> Any:
        """Host-side planning of a step; runs ahead of the device. The result is AttnCtx.state for plan_device to
        refine."""
        return None

    def plan_device(self, meta: BatchMeta, host: HostBounds, state: Any) -> AttnCtx:
        """Device-side planning, capturable: no host sync."""
        return AttnCtx(meta, host, state)

    def write(
        self, layer: AttentionLayer, ctx: AttnCtx, qkv: torch.Tensor, rope: Rope | None, qk_norm: QKNorm | None = None
    ) -> torch.Tensor:
        """Split qkv_T(H+2K)D, norm and rotate q and k, write k and v to their pages; returns q_THD. Default: the
        core's op."""
        from dovetail.core.ops.kv_write import rope_kv_write

        return rope_kv_write(layer, ctx.meta, self.pools[layer.group], qkv, rope, qk_norm)

    @abstractmethod
    def attend(
        self, layer: AttentionLayer, ctx: AttnCtx, q: torch.Tensor, emit: tuple[ActFormat, ...] = (PLAIN,)
    ) -> Bundle:
        """Causal attention of q_THD over each row's pages; T x (H*D) in the formats asked for. Rows see position <=
        their own."""

    def write_and_attend(
        self,
        layer: AttentionLayer,
        ctx: AttnCtx,
        qkv: torch.Tensor,
        rope: Rope | None,
        qk_norm: QKNorm | None = None,
        emit: tuple[ActFormat, ...] = (PLAIN,),
    ) -> Bundle:
        """`attend` of what `write` returns. For backends that do both in one kernel.

        A backend may read what is older than the step while the kernel in front still runs. So the keys of earlier
        steps and what `plan_device` is told stand before it is called, `rope`, `qk_norm` and the layer's scales
        before the step begins, and nothing writes any of them until it ends.
        """
        return self.attend(layer, ctx, self.write(layer, ctx, qkv, rope, qk_norm), emit)

    def attend_mla(
        self,
        layer: AttentionLayer,
        ctx: AttnCtx,
        q_nope: torch.Tensor,
        q_rope: torch.Tensor,
        emit: tuple[ActFormat, ...] = (PLAIN,),
    ) -> Bundle:
        """Attention over a compressed latent (DeepSeek-V2, 2024). Optional: the capability `kinds` says who has it."""
        raise NotImplementedError(f"{type(self).__name__} has no MLA; its capability `kinds` must not name it")
