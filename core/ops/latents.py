"""Pages of compressed latents (DeepSeek-V2, 2024): their planes, and how much work attention over them takes.

Shapes: S token slots, L kv rank, R rotary dim, G groups of the columns of a latent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces.kv_cache import Plane
from dovetail.core.interfaces.model import LATENT_GROUP

if TYPE_CHECKING:
    from dovetail.core.interfaces.attention import AttentionLayer, KVPool
    from dovetail.core.interfaces.model import MLA

LATENT, SCALES, ROTARY = "latent", "latent_scale", "latent_rope"
"""Names of planes. The last two exist only beside 8-bit latents."""
GROUP = LATENT_GROUP
LARGEST = torch.finfo(torch.float8_e4m3fn).max
SMALLEST_SCALE = 1e-12
"""Scale of a group of zeros."""


def latent_planes(mla: MLA, kv_dtype: torch.dtype, dtype: torch.dtype) -> tuple[Plane, ...]:
    """Return the planes of a KV group with latents: one of L + R columns, the rotated ones last, or for
    kv_dtype=float8_e4m3fn L columns in 8 bits, a float32 scale for each GROUP of them, and R columns of the model's
    `dtype`. A DeepSeek-V3 token then takes 512 + 16 + 128 = 656 bytes per layer."""
    if kv_dtype != torch.float8_e4m3fn:
        return (Plane(LATENT, (mla.kv_rank + mla.rope_dim,), kv_dtype),)
    return (
        Plane(LATENT, (mla.kv_rank,), kv_dtype),
        Plane(SCALES, (ceil_div(mla.kv_rank, GROUP),), torch.float32),
        Plane(ROTARY, (mla.rope_dim,), dtype),
    )


def expands(mla: MLA, tokens: int) -> bool:
    """Whether a row of so many tokens takes fewer multiplications if its keys and values are expanded.

    Absorbed, a score and its share of the output take 2 L + R products; expanded, nope + R + v, and each key is first
    expanded by (nope + v) L. So the number of keys cancels.
    """
    return tokens * absorbed_excess(mla) > (mla.nope_dim + mla.v_dim) * mla.kv_rank


def absorbed_excess(mla: MLA) -> int:
    """Return how many more products a head takes for a pair of a query and a key absorbed than expanded."""
    return 2 * mla.kv_rank - mla.nope_dim - mla.v_dim


def quantize_latents(latents_SL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (E4M3 values, float32 scales [S, G]). A scale is the greatest magnitude in its group, over the format's
    greatest value."""
    slots, rank = latents_SL.shape
    groups = ceil_div(rank, GROUP)
    padded_SGC = torch.nn.functional.pad(latents_SL.float(), (0, groups * GROUP - rank)).view(slots, groups, GROUP)
    scales_SG = (padded_SGC.abs().amax(-1) / LARGEST).clamp(min=SMALLEST_SCALE)
    values_SGC = (padded_SGC / scales_SG[..., None]).clamp(-LARGEST, LARGEST)
    return values_SGC.flatten(1)[:, :rank].to(torch.float8_e4m3fn), scales_SG


def read_latents(
    layer: AttentionLayer, pool: KVPool, slots_S: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (latents [S, L], rotated columns [S, R]) of flat token slots, in `dtype`."""
    assert layer.mla is not None
    rank = layer.mla.kv_rank
    stored = pool.layer(layer.local, LATENT).flatten(0, 1)
    if SCALES not in pool.planes:
        return stored.index_select(0, slots_S).to(dtype).split((rank, layer.mla.rope_dim), dim=1)
    # torch cannot index 8-bit floats, so their bytes are indexed instead.
    values_SL = stored.view(torch.uint8).index_select(0, slots_S).view(stored.dtype).float()
    scales_SG = pool.layer(layer.local, SCALES).flatten(0, 1).index_select(0, slots_S)
    rotary_SR = pool.layer(layer.local, ROTARY).flatten(0, 1).index_select(0, slots_S)
    spread_SL = scales_SG.repeat_interleave(GROUP, dim=1).narrow(1, 0, rank)
    return (values_SL * spread_SL).to(dtype), rotary_SR.to(dtype)
