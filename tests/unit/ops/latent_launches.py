"""Launches of attention over compressed latents, at the sizes of DeepSeek V2 and V3."""

from __future__ import annotations

import torch

from dovetail.core.interfaces import MLA, AttentionLayer, HostBounds, KVGroup, LatentNorm, Rope
from dovetail.core.memory.pools import make_pools
from dovetail.core.ops.latents import latent_planes
from dovetail.plugins.attention.config import TritonConfig
from dovetail.plugins.attention.triton.backend import Triton

from .emulated import BF16, E4M3, EVERYTHING, FP16, FP32, batch, cuda, has_fp8

SIZES = MLA(1536, 512, 64, 128, 128)
DECODE, FEW, DRAFTS, PROMPT, MIXED = (
    HostBounds((1,) * 64, (4096,) * 64, 64),
    HostBounds((1,), (4096,), 1),
    HostBounds((4,) * 16, (4096,) * 16, 16),
    HostBounds((2048,), (4096,), 0),
    HostBounds((1,) * 8 + (512, 9), (4096,) * 10, 8),
)


def latents() -> None:
    """The kernels for Hopper, which others replace by the one for all GPUs, and a small tile of the latter. EVERYTHING:
    whether to add shapes, and the kernels for the keys and values of expanded rows."""
    if has_fp8():
        attend(DRAFTS, 16, E4M3)
        attend(FEW, 16, E4M3)
        attend(DECODE, 16, E4M3)
        attend(FEW, 16, E4M3, gluon=False)
        attend(PROMPT, 16, E4M3)
    if EVERYTHING or not has_fp8():
        attend(DECODE, 128, BF16)
    if EVERYTHING:
        attend(DECODE, 16, BF16)
        attend(FEW, 5, BF16)
        attend(DECODE, 8, FP32, FP32)
        attend(MIXED, 16, BF16)
        attend(MIXED, 16, BF16, gluon=False)
        attend(DRAFTS, 16, E4M3, gluon=False)
        attend(DECODE, 128, FP16, FP16, page=16)
        attend(DRAFTS, 128, BF16, tree=True)


def attend(
    host: HostBounds,
    heads: int,
    kv_dtype: torch.dtype,
    dtype: torch.dtype = BF16,
    tree: bool = False,
    gluon: bool = True,
    page: int = 64,
) -> None:
    tokens = sum(host.counts)
    planes = latent_planes(SIZES, kv_dtype, dtype)
    backend = Triton(TritonConfig(gluon=gluon))
    backend.bind(make_pools([KVGroup(0, (0, 1), planes, "mla", page_tokens=page)], {0: 9}, torch.device("cuda")))
    dim = SIZES.nope_dim + SIZES.rope_dim
    layer = AttentionLayer(1, 0, 1, heads, heads, dim, dim**-0.5, mla=SIZES)
    ctx = backend.plan_device(batch(host, page, tree), host, backend.plan_host(host))
    columns = SIZES.kv_rank + SIZES.rope_dim
    q, x = cuda(tokens, heads * dim + columns, dtype=dtype).split((heads * dim, columns), dim=1)
    norm = LatentNorm(cuda(SIZES.kv_rank, dtype=dtype), 1e-6)
    q_THD = backend.write_mla(layer, ctx, q, x, Rope(cuda(8192, SIZES.rope_dim, dtype=FP32)), norm)
    backend.attend_mla(layer, ctx, q_THD, cuda(heads, SIZES.nope_dim + SIZES.v_dim, SIZES.kv_rank, dtype=dtype))
