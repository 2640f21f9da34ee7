"""Attention contract: write a step's K and V into pages and attend over them.

Shapes: T tokens of the step, B rows, H query heads, K kv heads, D head dim, P pages per table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dovetail.core.interfaces.activation import PLAIN, ActFormat, Bundle
from dovetail.core.interfaces.tuning import Tunable

if TYPE_CHECKING:
    import torch

    from dovetail.core.interfaces.kv_cache import KVGroup
    from dovetail.core.interfaces.model import MLA, BuildContext


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Facts about one layer on this rank."""

    index: int
    """Index of the layer in the model."""
    group: int
    """KV group id."""
    local: int
    """Index of the layer in its group's pool."""
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    """Multiplies q.k; usually 1/sqrt(D)."""
    window: int = 0
    """Tokens that each token sees, itself included; 0 = all."""
    k_scale: float | torch.Tensor = 1.0
    """Divides K before it is stored in 8 bits: a number, or float32 [kv_heads] on the device."""
    v_scale: float | torch.Tensor = 1.0
    """The same for V. Both are numbers or both are tensors."""
    soft_cap: float = 0.0
    """Scaled scores become cap * tanh(score / cap) (Gemma 2, 2024); 0 = they stay. Capability `scores`: "soft_cap"."""
    sinks: torch.Tensor | None = None
    """float32 [heads]: one more score of each head, which counts in the softmax's sum alone (gpt-oss, 2025); None =
    none. It may be filled after the layer is made. Capability `scores`: "sinks"."""
    mla: MLA | None = None
    """Sizes of a compressed latent. `write_mla` and `attend_mla` are called in place of the other methods: kv_heads is
    `heads`, head_dim is nope_dim + rope_dim, and there is no window, cap or sink. None = keys and values in pages."""


@dataclass(frozen=True, slots=True)
class HostBounds:
    """Facts about a step that the host knows before it runs. Lengths are upper bounds; the device has the exact ones.

    During capture of a graph for mixed steps, or for decode rows that verify unlike numbers of drafts (capability
    `graphs`: "mixed"), counts are upper bounds too, and their sum exceeds the number of tokens: rows may have fewer
    tokens or none, and tokens after the last row's belong to no row.
    """

    counts: tuple[int, ...]
    """Tokens of each row."""
    bounds: tuple[int, ...]
    """Upper bound of each row's KV length after the step."""
    num_decode: int
    """Number of decode rows. They come first."""
    decode_width: int = 0
    """Tokens of a decode row for which kernels are chosen, at least those of any. It has few values, so that kernels
    have few variants; 0 = those of the longest decode row."""

    @property
    def widest_decode(self) -> int:
        return self.decode_width or max(self.counts[: self.num_decode], default=0)


@dataclass(frozen=True, slots=True)
class TreeMask:
    """Visibility in decode rows that feed draft trees (SpecInfer, Miao et al. 2024). A row feeds its last accepted
    token, the root, and then the drafts, parents before their children. Several drafts may have one position, so a
    draft's index in the KV cache is not its position.

    A token sees all keys up to the root, and its ancestors and itself among the drafts. A layer's window counts
    positions: a token `depth` levels below the root, whose position is root + depth, sees those of its ancestors that
    are less than `window` levels above it, and keys from index root + depth - window + 1 on. `core.ops.trees` computes
    both.
    """

    root_T: torch.Tensor
    """int64: index of the row's root among the row's keys."""
    ancestors_T: torch.Tensor
    """int64: bit i is set if the token sees the key with index root + 1 + i. A draft's own bit is set, and the number
    of bits is its depth. 0 = the root, or padding. Tokens of other rows have arbitrary values: their mask is causal."""


@dataclass(slots=True)
class BatchMeta:
    """Device metadata of one step for one KV group. Written by the runner before `plan_device`; read-only for backends.
    The tensors have a fixed capacity, so that one CUDA graph serves every batch of its size."""

    row_start_B1: torch.Tensor
    """int32 [B+1]: first token of each row, then T."""
    kv_len_B: torch.Tensor
    """int32: exact KV length of each row after this step's write, padded draft positions included."""
    slots_B: torch.Tensor
    """int64: slot of each row."""
    positions_T: torch.Tensor
    """int64: position of each token in its sequence."""
    rows_T: torch.Tensor
    """int64: row of each token."""
    page_table_BP: torch.Tensor
    """int32: page ids of each row."""
    write_T: torch.Tensor
    """int64: flat token slot (page * page_tokens + offset) to which each token's K and V are written."""
    page_tokens: int
    tree: TreeMask | None = None
    """Mask of the decode rows, if they may feed draft trees (capability `tree`); None = every row is causal."""


@dataclass(slots=True)
class AttnCtx:
    """A backend's plan of one step for one KV group. Several exist at a time."""

    meta: BatchMeta
    host: HostBounds
    state: Any = None
    """Private to the backend."""


@dataclass(frozen=True, slots=True)
class KVPool:
    """Tensors of one KV group: planes[name] is [layers, pages + 1, page_tokens, *plane.shape]. Page 0 is scratch."""

    group: KVGroup
    planes: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def layer(self, local: int, name: str) -> torch.Tensor:
        """Return [pages + 1, page_tokens, *plane.shape] of one layer."""
        return self.planes[name][local]


@dataclass(frozen=True, slots=True)
class QKNorm:
    """RMSNorm over head_dim of q and k (Qwen 3), applied before the rotary embedding."""

    q_weight_D: torch.Tensor
    """Both weights have the dtype of q, or float32, as in core.ops.rms_norm."""
    k_weight_D: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary table of all positions, [max_len, rotary_dim] float32: the first half of the columns is cos, the second
    sin (NeoX halves)."""

    table: torch.Tensor


@dataclass(frozen=True, slots=True)
class LatentNorm:
    """RMSNorm over the kv_rank columns of a latent (DeepSeek-V2, 2024)."""

    weight_L: torch.Tensor
    """[kv_rank]: multiplies the normalized latent."""
    eps: float
    """Added to the mean square."""


class AttentionBackend(ABC):
    """Built once per rank. Between steps it keeps no state except what `bind` gives it."""

    exact_lengths: Literal["device", "host"] = "device"
    """"host" = plan_host needs exact KV lengths. The capability check then refuses to overlap speculation."""

    def __init__(self, config: object) -> None:
        self.config = config
        self.pools: Mapping[int, KVPool] = {}

    def bind(self, pools: Mapping[int, KVPool]) -> None:
        """Take the KV tensors, by group id. Called again whenever they change: with trial pools while memory is
        measured, with {} to release them, then with the final pools."""
        self.pools = pools

    def plan_host(self, bounds: HostBounds) -> Any:
        """Plan a step on the host, ahead of the device. The result is passed to plan_device as `state`."""
        return None

    def plan_device(self, meta: BatchMeta, host: HostBounds, state: Any) -> AttnCtx:
        """Plan a step on the device and return its AttnCtx. Capturable; no host sync."""
        return AttnCtx(meta, host, state)

    def write(
        self, layer: AttentionLayer, ctx: AttnCtx, qkv: torch.Tensor, rope: Rope | None, qk_norm: QKNorm | None = None
    ) -> torch.Tensor:
        """Split qkv [T, (H+2K)*D], norm and rotate q and k, write k and v to their pages, and return q_THD."""
        from dovetail.core.ops.kv_write import rope_kv_write

        return rope_kv_write(layer, ctx.meta, self.pools[layer.group], qkv, rope, qk_norm)

    def tunables(self, layer: AttentionLayer, build: BuildContext, rows: int) -> Sequence[Tunable]:
        """Return operations of a layer in steps of `rows` tokens that can be tuned. `build`: what the layer's model is
        built from; there are no pools yet."""
        return ()

    @abstractmethod
    def attend(
        self, layer: AttentionLayer, ctx: AttnCtx, q: torch.Tensor, emit: tuple[ActFormat, ...] = (PLAIN,)
    ) -> Bundle:
        """Causal attention of q_THD over each row's pages. Returns [T, H*D] in the formats of `emit`."""

    def write_and_attend(
        self,
        layer: AttentionLayer,
        ctx: AttnCtx,
        qkv: torch.Tensor,
        rope: Rope | None,
        qk_norm: QKNorm | None = None,
        emit: tuple[ActFormat, ...] = (PLAIN,),
    ) -> Bundle:
        """Run `write`, then `attend`. Override it in a backend that does both in one kernel.

        A kernel launched with PDL may run before its predecessor ends. Before its grid-dependency wait it may read only
        data written before this forward pass (KV of earlier steps, in a drafter also of earlier passes of the step;
        `rope`, `qk_norm`, the layer's scales) and the inputs of `plan_device`, which are ready when this is called.
        None of them is written until the pass ends.
        """
        return self.attend(layer, ctx, self.write(layer, ctx, qkv, rope, qk_norm), emit)

    def write_mla(
        self,
        layer: AttentionLayer,
        ctx: AttnCtx,
        q: torch.Tensor,
        latents: torch.Tensor,
        rope: Rope | None,
        norm: LatentNorm,
    ) -> torch.Tensor:
        """Norm the first kv_rank columns of latents [T, kv_rank + rope_dim], rotate the others and the last rope_dim of
        each head of q [T, H * (nope_dim + rope_dim)], write the latents to the planes of core.ops.latent_planes, and
        return q_THD. Its inputs are not modified."""
        from dovetail.core.ops.latent_write import latent_write

        return latent_write(layer, ctx.meta, self.pools[layer.group], q, latents, rope, norm)

    def attend_mla(
        self,
        layer: AttentionLayer,
        ctx: AttnCtx,
        q: torch.Tensor,
        up_HOL: torch.Tensor,
        emit: tuple[ActFormat, ...] = (PLAIN,),
    ) -> Bundle:
        """Causal attention of q_THD over compressed latents (DeepSeek-V2, 2024), [T, H * v_dim] in the formats of
        `emit`. Optional; implied by "mla" in capability `kinds`.

        up_HOL [H, nope_dim + v_dim, kv_rank] are the up-projections: a latent's key is its product with the first
        nope_dim rows of a head, followed by its rotated columns; its value is the product with the other rows. For each
        row of the step the backend chooses between two ways that give the same result. Absorbed: the projections
        multiply query and output, so that heads share one key of kv_rank + rope_dim columns; for few tokens. Expanded:
        keys and values of every head are computed; for many tokens, since each score then takes fewer products.
        """
        raise NotImplementedError(f"{type(self).__name__} has no MLA; its capability `kinds` must not name it")
