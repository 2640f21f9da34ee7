"""Compile every kernel for Hopper, without a GPU, through the functions that launch it.

A new kernel needs a launch in CASES; test_every_kernel_compiles lists those without one. DOVETAIL_KERNELS=all adds
shapes.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton's compiler", allow_module_level=True)

import torch
import triton
import triton.language as tl
from triton.runtime.errors import PTXASError

import dovetail
from dovetail.core.interfaces import (
    PLAIN,
    ActFormat,
    Activation,
    AttentionLayer,
    BatchMeta,
    HostBounds,
    KVGroup,
    LinearShape,
    Plane,
    QKNorm,
    Rope,
)
from dovetail.core.layers import PlainLinear
from dovetail.core.memory.pools import make_pools
from dovetail.core.ops import step
from dovetail.core.ops.activations import gelu
from dovetail.core.ops.bitmask import apply_bitmask
from dovetail.core.ops.formats import encode
from dovetail.core.ops.gated import silu_and_mul
from dovetail.core.ops.kernels import prefetch_matmul
from dovetail.core.ops.kernels.formats import warps
from dovetail.core.ops.kernels.launch import dependent, wait
from dovetail.core.ops.kernels.matmul import matmul_triton
from dovetail.core.ops.layernorm import layer_norm
from dovetail.core.ops.matmul import _device, _has_prefetch_kernel, matmul, scaled_matmul, unscaled_matmul
from dovetail.core.ops.norm import rms_norm
from dovetail.core.ops.tiles import MOST_SHARED_TILES, MatmulTile
from dovetail.core.ops.tuned_tiles import MEASURED
from dovetail.core.testing.compiling import SHARED_BYTES, compiled_for_hopper
from dovetail.core.testing.formats import SCALED_ROWS
from dovetail.plugins.adapter.lora.kernel import lora_triton
from dovetail.plugins.attention.config import TritonConfig
from dovetail.plugins.attention.triton.backend import Triton, _has_hopper
from dovetail.plugins.attention.triton.tiles import Shape, Tile, Tiles, fit
from dovetail.plugins.collective.symm_mem.collective import FP8
from dovetail.plugins.quant.fp8.format import FP8_TOKEN
from dovetail.plugins.quant.int8.format import INT8_TOKEN

from ..nowhere import lone_copies, lone_reducer
from .early_access import touched_before_waiting

EVERYTHING = os.environ.get("DOVETAIL_KERNELS") == "all"
BF16, FP16, FP32, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2
INT32, INT64 = torch.int32, torch.int64
VOCAB = 128256


def cuda(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


@triton.jit
def encode_groups(x_GC, scale_in):
    scale_G = tl.max(tl.abs(x_GC), axis=1) + scale_in
    return (x_GC / scale_G[:, None]).to(tl.float8e4nv), scale_G


def encoded(columns: int) -> tuple[tuple[ActFormat, ...], ...]:
    """Formats that producers emit."""
    groups = ActFormat("groups", dtype=E4M3, group=128, scale_layout="column", encode=encode_groups)
    static = ActFormat(
        "static",
        dtype=E4M3,
        group="tensor",
        static_scale=cuda(1, dtype=FP32),
        pre_scale=cuda(columns),
        encode=encode_groups,
    )
    some = ((PLAIN,), (FP8_TOKEN,), (PLAIN, FP8_TOKEN))
    return (*some, (SCALED_ROWS,), (INT8_TOKEN,), (groups,), (static,)) if EVERYTHING else (*some, (groups,))


def norms() -> None:
    for columns, dtype in ((4096, BF16), (72, FP16), (16384, BF16))[: 3 if EVERYTHING else 2]:
        x, weight = cuda(64, columns, dtype=dtype), cuda(columns, dtype=dtype)
        for emit in encoded(columns):
            for residual in (x, None):
                rms_norm(x, residual, weight, 1e-5, emit)
        layer_norm(x, x, weight, weight, 1e-5, (PLAIN, FP8_TOKEN))
        layer_norm(x, None, weight, weight, 1e-5)


def activations() -> None:
    for columns, dtype in ((14336, BF16), (1440, FP16)):
        for emit in encoded(columns):
            silu_and_mul(cuda(64, 2 * columns, dtype=dtype), emit)
        for tanh in (False, True):
            gelu(cuda(64, columns, dtype=dtype), tanh, (PLAIN, FP8_TOKEN))


def formats() -> None:
    for emit in (*encoded(4096), (INT8_TOKEN,)):
        encode(cuda(64, 4096), emit)


def steps() -> None:
    """Bookkeeping of a step with 256 rows, and with a single row, for which Triton specialises on the value 1."""
    for rows, longest in ((256, 1), (1, 512)):
        slots, starts = cuda(rows, dtype=INT64), cuda(rows + 1, dtype=INT32)
        total = rows * longest
        tokens_SL, table = cuda(257, 8192, dtype=INT32), cuda(257, 512, dtype=INT32)
        layout = step.lay_out_tokens(slots, starts, cuda(257, dtype=INT64), tokens_SL, total, longest)
        step.lay_out_pages(slots, layout, table, 16)
        floats = [cuda(rows, dtype=FP32) for _ in range(3)]
        keys = cuda(rows, dtype=INT64)
        for dtype in (BF16, FP32):
            logits = cuda(rows, VOCAB, dtype=dtype)
            least = step.least_kept(logits, floats[0], keys, *floats[1:])
            for bound in (least, None):
                step.draw(logits, keys, floats[0], keys, True, bound)
            step.draw(logits, keys, floats[0], keys, False)
            apply_bitmask(logits, cuda(rows, -(-VOCAB // 32), dtype=INT32), keys)
        for width in (1, 5):
            lengths = cuda(257, dtype=INT64)
            into = step.SampleInputs.empty(rows, width, 4096, BF16, torch.device("cuda"))
            step.gather_samples(cuda(total, 4096), keys, cuda(rows, 3, dtype=INT64), into)
            step.accept(cuda(rows, width, dtype=INT64), slots, keys, keys, tokens_SL, lengths, lengths)


def products() -> None:
    """One tuned tile for each code path, at a shape for which it was tuned, and tiles that the rule picks."""
    seen: set[object] = set()
    for (_, kind, outputs, inputs), by_rows in MEASURED.items():
        for rows, tile in by_rows.items():
            if tile is None:
                continue
            early = tile.prefetch > 0
            ways = {
                (kind, early, tile.tokens),
                (kind, tile.tma, tile.swap),
                (kind, early, tile.outputs, tile.split > 1),
            }
            if EVERYTHING or not ways <= seen:
                seen |= ways
                multiply(kind, rows, outputs, inputs)
    for outputs in (1280, 200064):
        for rows in (1, 64):
            multiply("fp8", rows, outputs, 4096 + 128)


def multiply(kind: str, rows: int, outputs: int, inputs: int) -> None:
    if kind == "bf16":
        counts = cuda(MOST_SHARED_TILES, dtype=INT32)
        matmul(cuda(rows, inputs), cuda(outputs, inputs), cuda(outputs), counts)
        return
    scales = cuda(rows, 1, dtype=FP32), cuda(outputs, dtype=FP32)
    x, weight = cuda(rows, inputs, dtype=E4M3), cuda(outputs, inputs, dtype=E4M3)
    scaled_matmul(x, weight, *scales, None, BF16, cuda(MOST_SHARED_TILES, dtype=INT32))


def adapters() -> None:
    """LoRA with few and many rows; last tiles hold rows of one slot or of all slots."""
    some = [
        (1, 4096, (4096, 1024, 1024), 16, BF16),
        (64, 4096, (14336, 14336), 64, BF16),
        (2048, 14336, (4096,), 32, FP16),
        (20, 40, (72,), 16, FP32),
    ]
    for tokens, inputs, parts, rank, dtype in some if EVERYTHING else some[:2]:
        a = cuda(4, len(parts), rank, inputs, dtype=dtype)
        shapes = (tokens, inputs), (tokens, sum(parts)), (4, sum(parts), rank)
        x, y, b = (cuda(*shape, dtype=dtype) for shape in shapes)
        lora_triton(x, y, a, b, cuda(tokens, dtype=INT32), cuda(9, 3, dtype=INT32))


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
) -> None:
    query_heads, kv_heads, dim = heads
    rows, tokens = len(host.counts), sum(host.counts)
    planes = tuple(Plane(name, (kv_heads, dim), kv_dtype or dtype) for name in "kv")
    meta = BatchMeta(
        row_start_B1=cuda(rows + 1, dtype=INT32),
        kv_len_B=cuda(rows, dtype=INT32),
        slots_B=cuda(rows, dtype=INT64),
        positions_T=cuda(tokens, dtype=INT64),
        rows_T=cuda(tokens, dtype=INT64),
        page_table_BP=cuda(rows, -(-max(host.bounds) // page), dtype=INT32),
        write_T=cuda(tokens, dtype=INT64),
        page_tokens=page,
        tree_mask_TW=cuda(tokens, 8, dtype=torch.bool) if tree else None,
    )
    backend = Triton(TritonConfig(gluon=gluon))
    if key_warps:
        backend.tiles = WarpTiles(key_warps)
    backend.bind(make_pools([KVGroup(0, (0, 1), planes, page_tokens=page)], {0: 9}, torch.device("cuda")))
    scale = cuda(kv_heads, dtype=FP32) if head_scales else 0.5
    layer = AttentionLayer(1, 0, 1, query_heads, kv_heads, dim, dim**-0.5, window, scale, scale)
    ctx = backend.plan_device(meta, host, backend.plan_host(host))
    rope = Rope(cuda(32768, rotary, dtype=FP32)) if rotary else None
    weights = QKNorm(cuda(dim, dtype=dtype), cuda(dim, dtype=dtype), 1e-5) if norm else None
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
        "chunks": dict(host=CHUNKS, norm=True, gluon=False),
        "chunks, tensor maps": dict(host=CHUNKS, page=64, gluon=False),
        "long, tensor maps": dict(host=LONG, page=64, gluon=False),
        "prompts, gathered": dict(host=CHUNKS, kv_dtype=E4M3),
        "prompts, long": dict(host=LONG, page=64),
        "prompts, window, head scales": dict(host=LONG, dtype=FP16, page=192, window=4096, head_scales=True),
        "prompts, narrow heads": dict(host=LONG, heads=(8, 8, 64), page=64, rotary=64),
        "mixed, e4m3": dict(host=MIXED, kv_dtype=E4M3),
        "mixed, window, head scales": dict(host=MIXED, kv_dtype=E4M3, window=4096, head_scales=True),
        "keys per warp": dict(host=DECODE, page=64, key_warps=4),
        "keys per warp, e4m3, window, head scales": dict(
            host=SCARCE, kv_dtype=E4M3, window=4096, head_scales=True, key_warps=8
        ),
        "drafts": dict(host=DRAFTS),
        "tree": dict(host=DRAFTS, tree=True),
        "float32": dict(host=MIXED, dtype=FP32, heads=(8, 8, 64), rotary=64),
        "partly rotated, wide heads": dict(host=MIXED, heads=(16, 16, 256), rotary=64),
        "one kv head, odd dim, no rotary": dict(host=MIXED, dtype=FP16, heads=(71, 1, 80), rotary=0),
    }
    more = {"decode", "mixed, window, head scales", "keys per warp", "partly rotated, wide heads"}
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


def sums() -> None:
    """Reductions as launched by a rank of eight and of two."""
    for size, columns, dtype in ((8, 7168, BF16), (2, 96, FP32), (8, 8192, FP16))[: 3 if EVERYTHING else 2]:
        reducer = lone_reducer(3, size)
        for algorithm, rows in (("one_shot", 1), ("one_shot", 132), ("two_shot", 256)):
            x = cuda(rows, columns, dtype=dtype)
            reducer.reduce(x, algorithm)
            for emit in encoded(columns) if EVERYTHING else ((PLAIN, FP8_TOKEN),):
                reducer.boundary(x, x, x[0], 1e-5, emit, algorithm)
        for emit in encoded(columns) if EVERYTHING else ((PLAIN, FP8_TOKEN), encoded(columns)[-1]):
            assert reducer.serves_sharded(x, emit) == all(fmt is not INT8_TOKEN for fmt in emit)
            reducer.sharded_boundary(x, cuda(-(-rows // size), columns, dtype=dtype), x[0], 1e-5, emit)
        reducer.sharded_boundary(x, None, x[0], 1e-5, (FP8,))
        reducer.argmax(cuda(64, dtype=FP32), cuda(64, dtype=INT64))
        reducer.boundary(x, None, x[0], 1e-5, (PLAIN,), "one_shot")


def copies() -> None:
    for rank, (size, columns, dtype) in enumerate(((2, 96, FP32), (2, 8192, BF16), (8, 7168, BF16))):
        ranks = lone_copies(rank, size)
        x = cuda(4 * size, columns, dtype=dtype)
        own = ranks.reduce_rows(x)
        for emit in ((PLAIN, FP8_TOKEN), (FP8_TOKEN,), (FP8,)):
            assert ranks.serves(emit)
            ranks.boundary(x, own, x[0], 1e-5, emit)
        ranks.boundary(x, None, x[0], 1e-5, (PLAIN,))


CASES: dict[str, Callable[[], None]] = {
    "norms": norms,
    "activations": activations,
    "formats": formats,
    "steps": steps,
    "sums": sums,
    "copies": copies,
    "products": products,
    "adapters": adapters,
    **dict(attention_cases()),
}


@pytest.mark.timeout(3600 if EVERYTHING else 300)
def test_every_kernel_compiles(tmp_path, monkeypatch):
    # Use an empty cache: functions inlined into cached kernels would not be recorded.
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    failed = []
    with compiled_for_hopper() as compiled:
        for name, case in CASES.items():
            try:
                case()
            except Exception as error:
                failed.append(f"{name}: {type(error).__name__}: {error}")
    assert not failed, "\n\n".join(failed)
    missing = sorted(jit_functions() - compiled.functions)
    assert not missing, f"no launch in this file compiles {', '.join(missing)}: add one to CASES"
    for name, kernel in compiled.kernels:
        too_early = touched_before_waiting(kernel)
        assert too_early <= CONSTANTS.get(name, set()), f"{name} accesses {too_early} before the preceding kernel ends"


CONSTANTS = {
    "dovetail.core.ops.kernels.norm:_rms_norm": {"weight_ptr"},
    "dovetail.core.ops.kernels.matmul:_matmul": {"weight_ptr"},
    "dovetail.core.ops.kernels.prefetch_matmul:matmul_prefetching": {"weight_source", "weight_ptr"},
    # Addresses of mailboxes.
    "dovetail.plugins.collective.symm_mem.kernels:one_shot": {"weight_ptr", "peers_ptr"},
    "dovetail.plugins.collective.symm_mem.kernels:two_shot": {"weight_ptr", "peers_ptr"},
    "dovetail.plugins.collective.symm_mem.kernels:argmax_over_ranks": {"peers_ptr"},
    # Mapping of outputs to parts.
    "dovetail.plugins.adapter.lora.kernel:_expand": {"blocks_ptr"},
    # The plan and keys of earlier steps, both older than the preceding kernel.
    "dovetail.plugins.attention.triton.hopper.decode:attend_decode": {
        *("items_ptr", "first_pages_ptr", "table_ptr", "k_ptr", "v_ptr", "k_scale", "v_scale"),
        *("rope_ptr", "q_weight_ptr", "k_weight_ptr"),
    },
}
"""Parameters that kernels may read before the preceding kernel has ended, since no running kernel writes them."""


@triton.jit
def never_waits(x_ptr, PDL: tl.constexpr):
    tl.store(x_ptr, 1.0)


@triton.jit
def waits_late(x_ptr, PDL: tl.constexpr):
    tl.store(x_ptr, 1.0)
    wait(PDL)


def test_a_kernel_that_writes_before_it_waits_is_detected():
    with compiled_for_hopper() as compiled:
        for kernel in (never_waits, waits_late):
            x = cuda(1, dtype=FP32)
            kernel[(1,)](x, **dependent(x))
    (_, never), (_, late) = compiled.kernels
    with pytest.raises(AssertionError, match="waits 0 times"):
        touched_before_waiting(never)
    assert touched_before_waiting(late) == {"x_ptr, written"}


def test_a_prefetching_matmul_fetches_only_the_weight_before_it_waits(tmp_path):
    """It fetches as many weight blocks as its ring holds; the preceding kernel writes its input."""
    tiles = (
        MatmulTile(16, 64, 512, stages=2, split=6, prefetch=5, prefetch_l2=2),
        MatmulTile(64, 128, 256, 8, 3, prefetch=4),
    )
    with compiled_for_hopper() as compiled:
        for tile in tiles:
            scales = cuda(64, 1, dtype=FP32), cuda(1280, dtype=FP32)
            x, weight = cuda(64, 8192, dtype=E4M3), cuda(1280, 8192, dtype=E4M3)
            matmul_triton(x, weight, tile, cuda(MOST_SHARED_TILES, dtype=INT32), *scales, None, BF16)
    assert len(compiled.kernels) == len(tiles)
    for tile, (_, kernel) in zip(tiles, compiled.kernels, strict=True):
        before, after = (
            re.findall(r"cp\.async\.bulk\.tensor.*?\], \[(%rd\d+),", part)
            for part in kernel.asm["ptx"].split("griddepcontrol.wait")
        )
        boxes = tile.inputs // 128
        (weight_map,) = set(before)
        assert len(before) == boxes * tile.prefetch
        # After the wait it fills the input's ring, then fetches one block of each per iteration.
        assert after.count(weight_map) == boxes and len(after) == boxes * (tile.stages + 2)
        # The matmuls of all boxes of a block are issued before the first one's sums are added.
        assert re.search(rf"wgmma\.wait_group\.sync\.aligned\s+{boxes - 1};", kernel.asm["ptx"])
        assert spilled(kernel, tmp_path) == 0


def test_sums_of_eight_ranks_fit_into_registers(tmp_path):
    """Words of all ranks are polled in registers. If they spilled, each polling iteration would access memory."""
    with compiled_for_hopper() as compiled:
        for rows, columns in ((64, 8192), (1, 16384)):
            x = cuda(rows, columns)
            lone_reducer(3, 8).reduce(x, "one_shot")
            lone_reducer(3, 8).boundary(x, x, x[0], 1e-5, (PLAIN, FP8_TOKEN), "one_shot")
            lone_reducer(3, 8).boundary(x, x, x[0], 1e-5, (PLAIN, FP8_TOKEN), "two_shot")
            if lone_reducer(3, 8).serves_sharded(x, (PLAIN, FP8_TOKEN)):
                lone_reducer(3, 8).sharded_boundary(x, x, x[0], 1e-5, (PLAIN, FP8_TOKEN))
    for name, kernel in compiled.kernels:
        assert spilled(kernel, tmp_path) == 0, name


def test_parts_of_a_row_are_loaded_together():
    """Sequential loads would cost one memory round trip each, and so would the loads of the mailbox addresses."""
    with compiled_for_hopper() as compiled:
        x = cuda(64, 8192)
        lone_reducer(3, 8).boundary(x, x, x[0], 1e-5, (FP8_TOKEN,), "two_shot")
    ((_, kernel),) = compiled.kernels
    before, after = kernel.asm["ptx"].split("griddepcontrol.wait")
    addresses, sent = re.findall(r"ld\.global\.b64", before), after[: after.index("st.global")]
    assert len(addresses) == 8
    assert len(re.findall(r"ld\.global", sent)) == 1 + 8, "the turn, and a part for each rank"
    # Both polls load the host's word and the rank's own first, not only after the mail has arrived.
    looks = ["m" if wide else "w" for wide in re.findall(r"ld\.volatile\.global\.(v?)", after)]
    assert re.fullmatch(r"wwm{8}wwm+", "".join(looks))


def test_prompts_keep_scores_and_sums_in_registers(tmp_path):
    """One or two values from the start of a program may be spilled, but no loop-carried values."""
    with compiled_for_hopper() as compiled:
        for host in (CHUNKS, LONG):
            attention(host, page=64)
            attention(host, page=64, window=1024)
    prompts = [kernel for name, kernel in compiled.kernels if name.endswith(":attend_prompts")]
    assert len(prompts) == 4
    for kernel in prompts:
        assert spilled(kernel, tmp_path) <= 16
        assert "wgmma" in kernel.asm["ptx"] and "cp.async.bulk.tensor" in kernel.asm["ptx"]


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
def test_single_tokens_keep_their_sums_in_registers_and_fetch_keys_before_they_rotate_queries(kv_dtype, tmp_path):
    with compiled_for_hopper() as compiled:
        attention(SCARCE, kv_dtype=kv_dtype, page=32)
    (kernel,) = (kernel for name, kernel in compiled.kernels if name.endswith(":attend_decode"))
    assert spilled(kernel, tmp_path) <= 16
    # Keys are fetched before the preceding kernel, which writes queries, has ended.
    assert {"k_ptr", "v_ptr"} < touched_before_waiting(kernel)
    after = kernel.asm["ptx"].split("griddepcontrol.wait")[1]
    first_float = re.search(r"\b(?:mul|add|fma|sub)\.(?:rn\.)?f32", after)
    assert "ld.global" in after[: first_float.start()]
    assert re.search(r"ldmatrix\S*\.trans", after), "values are transposed on the way to the tensor cores"
    assert after.count(", 2147483647,") >= 2, "outputs and logarithms equal to EMPTY are sent as another NaN"
    # A thread issues all its loads of four ranges before it checks any.
    (look,) = re.findall(r"more:(.*?)setp", after, re.DOTALL)
    assert look.count("ld.relaxed.gpu.global.v4") == 4 * (2 + 1), "two columns, and the logarithms of both"


def test_single_tokens_in_mixed_steps_wait_for_the_keys_that_another_kernel_writes():
    with compiled_for_hopper() as compiled:
        attention(MIXED, kv_dtype=E4M3, page=32)
    (kernel,) = (kernel for name, kernel in compiled.kernels if name.endswith(":attend_decode"))
    assert touched_before_waiting(kernel) == {"items_ptr", "first_pages_ptr"}


def test_tree_masks_and_gluon_false_use_the_kernel_for_all_gpus():
    tree = HostBounds((4,) * 16 + (448,), (4096,) * 17, 16)
    with compiled_for_hopper(machine_code=False) as compiled:
        attention(tree, page=64)
        assert any(name.endswith(":attend_prompts") for name in compiled.functions), "without a tree it is served"
        compiled.functions.clear()
        attention(tree, page=64, tree=True)
        attention(tree, page=64, gluon=False)
    assert not any(name.endswith((":attend_prompts", ":attend_decode")) for name in compiled.functions)


def test_an_unsupported_gluon_is_logged(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "dovetail.plugins.attention.triton.hopper.launch", None)
    monkeypatch.delattr("dovetail.plugins.attention.triton.hopper.launch", raising=False)
    with compiled_for_hopper():
        assert not _has_hopper.__wrapped__(torch.device("cuda"))
    assert "prompts and single tokens use the kernel for all GPUs" in caplog.text


def test_matmuls_use_the_kernel_for_all_gpus_if_gluon_is_unsupported(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "dovetail.core.ops.kernels.prefetch_matmul", None)
    monkeypatch.delattr("dovetail.core.ops.kernels.prefetch_matmul", raising=False)
    assert not _has_prefetch_kernel(9, 0)
    assert "matmuls with few rows use the library" in caplog.text
    monkeypatch.undo()
    assert _has_prefetch_kernel(9, 0) and not _has_prefetch_kernel(8, 9) and not _has_prefetch_kernel(10, 0)


@pytest.mark.parametrize(("early", "counted"), [(True, True), (True, False), (False, True)])
def test_split_16_bit_matmuls_use_the_kernel_if_it_runs_and_has_counters(monkeypatch, early, counted):
    """Otherwise the library runs."""
    monkeypatch.setattr(sys.modules[_device.__module__], "_has_prefetch_kernel", lambda *capability: early)
    _device.cache_clear()
    with compiled_for_hopper(machine_code=False) as compiled:
        x, weight = cuda(1, 8192), cuda(1280, 8192)
        matmul(x, weight, None, cuda(MOST_SHARED_TILES, dtype=INT32) if counted else None)
        assert matmul(x[:0], weight, None, cuda(MOST_SHARED_TILES, dtype=INT32)).shape == (0, 1280)
    _device.cache_clear()
    assert compiled.launches == (early and counted)


def test_plain_layers_have_the_counters_that_split_matmuls_need():
    with compiled_for_hopper(machine_code=False) as compiled:
        layer, shape = PlainLinear(), LinearShape(8192, 1280, (1280,), dtype=BF16)
        layer.apply(layer.create(shape, torch.device("cuda")), Activation(PLAIN, cuda(1, 8192)))
    assert [name for name, _ in compiled.variants] == ["dovetail.core.ops.kernels.prefetch_matmul:matmul_prefetching"]


def test_kernel_arguments_are_in_order(monkeypatch):
    """The compiler cannot check the order of integer arguments."""
    passed = {}

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: passed.update(zip(names, args, strict=False), grid=grid, **options)

    names = prefetch_matmul.matmul_prefetching.arg_names
    monkeypatch.setattr(prefetch_matmul, "matmul_prefetching", Kernel())
    tile = MatmulTile(16, 64, 512, stages=3, split=6, prefetch=5, prefetch_l2=4, prefetch_cycles=1000)
    with compiled_for_hopper(machine_code=False):
        scales = cuda(1, 1, dtype=FP32), cuda(1280, dtype=FP32)
        x, weight = cuda(17, 8192, dtype=E4M3), cuda(1280, 8192, dtype=E4M3)
        matmul_triton(x, weight, tile, cuda(MOST_SHARED_TILES, dtype=INT32), *scales, None, BF16)
    wanted = dict(tokens=17, outputs=1280, inputs=8192, x_scale_st=0, weight_scale_so=1, t_tiles=2, blocks=16)
    wanted |= dict(
        split=6, prefetch_l2=4, prefetch_cycles=1000, BLOCK_T=16, BLOCK_O=64, BOXES=4, X_PLACES=3, PLACES=5, grid=(240,)
    )
    assert {name: passed[name] for name in wanted} == wanted
    assert (
        passed["weight_ptr"] is weight
        and passed["x_scale_ptr"] is scales[0]
        and passed["weight_scale_ptr"] is scales[1]
    )


@pytest.mark.parametrize(("rows", "left"), [(64, False), (65, True), (256, True), (257, False)])
def test_scales_are_deferred_for_the_row_counts_that_gain(rows, left):
    with compiled_for_hopper():
        x, weight, one = cuda(rows, 256, dtype=E4M3), cuda(512, 256, dtype=E4M3), cuda(1, dtype=FP32)
        assert (unscaled_matmul(x, weight, one) is not None) is left


@pytest.mark.parametrize(("columns", "late"), [(3584, False), (14336, True)])
def test_a_wide_row_is_loaded_before_the_next_launch_is_allowed(columns, late):
    with compiled_for_hopper() as compiled:
        silu_and_mul(cuda(1, 2 * columns), (FP8_TOKEN,))
    ((_, kernel),) = compiled.kernels
    before, after = kernel.asm["ptx"].split("griddepcontrol.launch_dependents")
    assert ("ld.global" in before) is late and ("ld.global" in after) is not late
    assert ("griddepcontrol.wait" in before) is late


def test_scales_are_not_deferred_if_the_kernel_has_a_tile():
    """Such tiles were tuned against the library without scales."""
    few = range(65, 257)
    (outputs, inputs), rows = next(
        (key[2:], rows) for key, tiles in MEASURED.items() for rows in few if key[1] == "fp8" and tiles.get(rows)
    )
    with compiled_for_hopper():
        x, weight, one = cuda(rows, inputs, dtype=E4M3), cuda(outputs, inputs, dtype=E4M3), cuda(1, dtype=FP32)
        assert unscaled_matmul(x, weight, one) is None


def test_programs_have_more_threads_with_few_rows():
    assert [warps(4096, rows) for rows in (1, 16, 17, 256, 257, None)] == [16, 16, 32, 32, 8, 8]


def spilled(kernel: Any, folder: Path) -> int:
    """Stack size of a thread in bytes."""
    cubin = folder / "cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    command = [Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump", "--dump-resource-usage", cubin]
    used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    stack = re.search(r"STACK:(\d+)", used)
    assert stack is not None, used
    return int(stack[1])


def jit_functions() -> set[str]:
    """Return "module:name" of functions decorated with triton.jit or gluon.jit in the core and built-in plugins."""
    house = Path(dovetail.__file__).parent
    found = set()
    for part in ("core", "plugins"):
        for path in (house / part).rglob("*.py"):
            if re.search(r"@(triton|gluon)\.jit", path.read_text()) and house / "core/testing" not in path.parents:
                name = ".".join(path.relative_to(house.parent).with_suffix("").parts)
                module = importlib.import_module(name)
                found |= {f"{name}:{key}" for key in vars(module) if is_kernel_of(module, key)}
    assert len(found) > 30
    return found


def is_kernel_of(module, key: str) -> bool:
    value = getattr(module, key)
    return isinstance(value, triton.JITFunction) and value.__module__ == module.__name__


@triton.jit
def changes_type(out_ptr, flag):
    if flag > 0:
        x = tl.zeros((16,), tl.float32)
    else:
        x = tl.zeros((16,), tl.int32)
    tl.store(out_ptr + tl.arange(0, 16), x)


@triton.jit
def large_blocks(x_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    acc = tl.zeros((SIZE, SIZE), tl.float32)
    for i in range(4):
        x = tl.load(x_ptr + i * SIZE * SIZE + at)
        acc = tl.dot(x, x, acc)
    tl.store(out_ptr + at, acc)


@triton.jit
def no_such_instruction(x_ptr):
    at = x_ptr + tl.arange(0, 32)
    tl.store(at, tl.inline_asm_elementwise("no.such $0, $1;", "=r,r", [tl.load(at)], tl.int32, True, 1))


def test_compiler_errors_are_detected():
    with compiled_for_hopper():
        with pytest.raises(triton.CompilationError):
            changes_type[(1,)](cuda(16, dtype=FP32), 5)
        with pytest.raises(ValueError, match=f"{SHARED_BYTES}.*fewer stages"):
            large_blocks[(1,)](cuda(128, 128), cuda(128, 128), 128, num_stages=8)
        with pytest.raises(PTXASError, match="ptxas"):
            no_such_instruction[(1,)](cuda(32, dtype=INT32))
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AssertionError)):
            cuda(1)


def test_boundaries_of_any_number_of_rows_use_the_kernels_compiled_at_start_up():
    """Otherwise a request would wait for compilation, half a second per kernel."""
    many = (128, 130, 131, 250, 256, 1000, 1024, 2049, 4096, 6000)
    with compiled_for_hopper(machine_code=False) as compiled:
        reducer, ranks = lone_reducer(3, 8), lone_copies(3, 8)

        def edges(tokens: int) -> None:
            x = cuda(tokens, 8192)
            own = cuda(-(-tokens // 8), 8192)
            for emit in ((FP8_TOKEN,), (PLAIN,)):
                reducer.sharded_boundary(x, own, x[0], 1e-5, emit)
                reducer.boundary(x, x, x[0], 1e-5, emit, "two_shot")
            whole = cuda(8 * len(own), 8192)
            ranks.boundary(whole, own, x[0], 1e-5, (FP8_TOKEN,))
            ranks.reduce_rows(whole)
            reducer.argmax(cuda(tokens % 200 + 1, dtype=FP32), cuda(tokens % 200 + 1, dtype=INT64))

        edges(2048)
        met = set(compiled.variants)
        for tokens in many:
            edges(tokens)
        assert set(compiled.variants) == met
