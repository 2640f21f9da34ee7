"""Launches of attention, in the head layouts and kinds of rows that select kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import torch
import triton

from dovetail.core.interfaces import AttentionLayer, HostBounds, KVGroup, Plane, QKNorm, Rope
from dovetail.core.memory.pools import make_pools
from dovetail.plugins.attention.config import TritonConfig
from dovetail.plugins.attention.triton.backend import Triton
from dovetail.plugins.attention.triton.tiles import Shape, Tile, Tiles, fit

from .emulated import BF16, E4M3, E5M2, EVERYTHING, FP16, FP32, batch, cuda, has_fp8

DECODE, SCARCE, CHUNKS, LONG, MIXED, DRAFTS = (
    HostBounds((1,) * 64, (512,) * 64, 64),
    HostBounds((1,), (32768,), 1),
    HostBounds((512, 512), (512, 512), 0),
    HostBounds((8192,), (32768,), 0),
    HostBounds((1,) * 64 + (448,), (4096,) * 65, 64),
    HostBounds((4,) * 16, (4096,) * 16, 16),
)


class WarpTiles(Tiles):
    """Decode tiles whose warps each process different keys."""

    def __init__(self, warps: int) -> None:
        self.warps = warps

    def decode(self, shape: Shape, tokens: int, programs: float) -> Tile:
        rows = triton.next_power_of_2(max(8, shape.group * tokens))
        return fit(Tile(rows, 16, self.warps, 3, 2, key_warps=self.warps, pairs=True), shape)


def attention(
    host: HostBounds,
    dtype: torch.dtype = BF16,
    kv_dtype: torch.dtype | None = None,
    heads: tuple[int, int, int] = (32, 8, 128),
    page: int = 16,
    window: int = 0,
    tree: bool = False,
    rotary: int = 128,
    norm: bool = False,
    head_scales: bool = False,
    key_warps: int = 0,
    gluon: bool = True,
    soft_cap: float = 0.0,
    sinks: bool = False,
    wide_norm: bool = False,
) -> None:
    if kv_dtype is E4M3 and not has_fp8():
        return  # The backend's capabilities refuse it.
    query_heads, kv_heads, dim = heads
    tokens = sum(host.counts)
    planes = tuple(Plane(name, (kv_heads, dim), kv_dtype or dtype) for name in "kv")
    backend = Triton(TritonConfig(gluon=gluon))
    if key_warps:
        backend.tiles = WarpTiles(key_warps)
    backend.bind(make_pools([KVGroup(0, (0, 1), planes, page_tokens=page)], {0: 9}, torch.device("cuda")))
    scale = cuda(kv_heads, dtype=FP32) if head_scales else 0.5
    layer = AttentionLayer(1, 0, 1, query_heads, kv_heads, dim, dim**-0.5, window, scale, scale, soft_cap)
    layer = replace(layer, sinks=cuda(query_heads, dtype=FP32) if sinks else None)
    ctx = backend.plan_device(batch(host, page, tree), host, backend.plan_host(host))
    rope = Rope(cuda(32768, rotary, dtype=FP32)) if rotary else None
    weight = cuda(dim, dtype=FP32 if wide_norm else dtype)
    weights = QKNorm(weight, weight, 1e-5) if norm or wide_norm else None
    qkv = cuda(tokens, (query_heads + 2 * kv_heads) * dim, dtype=dtype)
    backend.write_and_attend(layer, ctx, qkv, rope, weights)


def attention_cases() -> Iterator[tuple[str, Callable[[], None]]]:
    some = {
        "decode": dict(host=DECODE, gluon=False),
        "decode, e4m3": dict(host=DECODE, kv_dtype=E4M3, gluon=False),
        "decode, window, head scales": dict(
            host=SCARCE, kv_dtype=E5M2, window=4096, head_scales=True, page=64, gluon=False
        ),
        "decode, scarce": dict(host=SCARCE, norm=True, gluon=False),
        "single tokens": dict(host=DECODE, norm=True),
        "single tokens, e4m3": dict(host=SCARCE, kv_dtype=E4M3, heads=(16, 1, 128)),
        "single tokens, window, head scales": dict(host=SCARCE, kv_dtype=E5M2, window=4096, head_scales=True, page=64),
        "single tokens, narrow heads": dict(host=SCARCE, heads=(8, 8, 64), rotary=32),
        "single tokens, one kv head, padded": dict(host=SCARCE, kv_dtype=E4M3, heads=(71, 1, 80), rotary=32, norm=True),
        "single tokens, wide heads": dict(host=SCARCE, dtype=FP16, heads=(16, 16, 256), rotary=64),
        "chunks": dict(host=CHUNKS, norm=True, gluon=False),
        "chunks, tensor maps": dict(host=CHUNKS, page=64, gluon=False),
        "long, tensor maps": dict(host=LONG, page=64, gluon=False),
        "prompts, gathered": dict(host=CHUNKS, kv_dtype=E4M3),
        "prompts, long": dict(host=LONG, page=64),
        "prompts, window, head scales": dict(host=LONG, dtype=FP16, page=192, window=4096, head_scales=True),
        "prompts, padded head dim and group": dict(host=LONG, heads=(14, 2, 80), page=64, rotary=32),
        "prompts, gathered, padded": dict(host=CHUNKS, kv_dtype=E4M3, heads=(14, 2, 80), rotary=32),
        "prompts, narrow heads": dict(host=LONG, heads=(8, 8, 64), page=64, rotary=64),
        "mixed, e4m3": dict(host=MIXED, kv_dtype=E4M3),
        "mixed, window, head scales": dict(host=MIXED, kv_dtype=E4M3, window=4096, head_scales=True),
        "keys per warp": dict(host=DECODE, page=64, key_warps=4),
        "keys per warp, e4m3, window, head scales": dict(
            host=SCARCE, kv_dtype=E4M3, window=4096, head_scales=True, key_warps=8
        ),
        "drafts": dict(host=DRAFTS),
        "drafts, one row, e4m3": dict(host=HostBounds((5,), (700,), 1), kv_dtype=E4M3),
        "drafts, a few rows, e4m3": dict(host=HostBounds((5,) * 8, (700,) * 8, 8), kv_dtype=E4M3),
        "drafts, many rows, e4m3": dict(host=HostBounds((5,) * 64, (700,) * 64, 64), kv_dtype=E4M3),
        "tree": dict(host=DRAFTS, tree=True),
        "float32": dict(host=MIXED, dtype=FP32, heads=(8, 8, 64), rotary=64),
        "partly rotated, wide heads": dict(host=MIXED, heads=(16, 16, 256), rotary=64),
        "sinks, capped": dict(
            host=MIXED, heads=(8, 4, 256), page=64, window=1024, soft_cap=50.0, sinks=True, norm=True
        ),
        "decode, sinks, capped": dict(
            host=SCARCE, kv_dtype=E4M3, page=64, window=128, soft_cap=50.0, sinks=True, gluon=False, wide_norm=True
        ),
        "single tokens, capped, float32 norm": dict(
            host=SCARCE, heads=(8, 4, 256), page=64, window=1024, soft_cap=50.0, wide_norm=True
        ),
        "drafts, sinks, capped": dict(host=DRAFTS, soft_cap=50.0, sinks=True, gluon=False),
        "keys per warp, sinks, capped": dict(
            host=SCARCE, kv_dtype=E4M3, key_warps=8, soft_cap=50.0, sinks=True, gluon=False
        ),
        "one kv head, odd dim, no rotary": dict(host=MIXED, dtype=FP16, heads=(71, 1, 80), rotary=0),
    }
    more = {
        *("decode", "decode, scarce", "mixed, window, head scales", "keys per warp", "partly rotated, wide heads"),
        *("single tokens, narrow heads", "chunks, tensor maps", "prompts, narrow heads"),
        *("prompts, gathered", "prompts, long", "prompts, padded head dim and group"),
        *("drafts, sinks, capped", "keys per warp, sinks, capped", "drafts, a few rows, e4m3"),
    }
    for name, case in some.items():
        if name in more and not EVERYTHING:
            continue
        yield f"attention: {name}", partial(attention, **case)
    if EVERYTHING:
        hosts = (DECODE, SCARCE, CHUNKS, LONG, MIXED, DRAFTS)
        for i, (host, kv_dtype, page, window) in enumerate(product(hosts, (BF16, E4M3, E5M2), (16, 64), (0, 4096))):
            for gluon in (False, True):
                case = dict(host=host, kv_dtype=kv_dtype, page=page, window=window, gluon=gluon)
                yield f"attention: {i}: {case}", partial(attention, **case)
        for heads in ((64, 8, 128), (8, 1, 128), (32, 32, 64), (12, 2, 128), (48, 8, 96), (16, 8, 256)):
            for host, kv_dtype in product((DECODE, SCARCE, CHUNKS, LONG, DRAFTS), (BF16, E4M3)):
                case = dict(host=host, kv_dtype=kv_dtype, heads=heads, rotary=heads[2])
                yield f"attention: {case}", partial(attention, **case)
