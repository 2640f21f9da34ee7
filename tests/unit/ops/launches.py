"""Launches of every kernel at the shapes and settings that select its variants. DOVETAIL_KERNELS=all adds shapes."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton.compiler import CompiledKernel

import dovetail
from dovetail.core.interfaces import (
    PLAIN,
    ActFormat,
    KVGroup,
    LogitsContext,
    Plane,
    Sums,
)
from dovetail.core.memory.pools import make_pools
from dovetail.core.ops import samples, siblings, step, trees
from dovetail.core.ops.activations import gelu
from dovetail.core.ops.bitmask import apply_bitmask
from dovetail.core.ops.choices import temporarily
from dovetail.core.ops.decoded_matmul import decoded_matmul
from dovetail.core.ops.features import keep_features
from dovetail.core.ops.formats import encode
from dovetail.core.ops.gated import gelu_and_mul, silu_and_mul
from dovetail.core.ops.kernels.matmul import matmul_triton, rescale_triton
from dovetail.core.ops.kernels.step import simulate_triton
from dovetail.core.ops.layernorm import layer_norm
from dovetail.core.ops.logprobs import best_logprobs, logprobs_of
from dovetail.core.ops.matmul import int8_matmul, matmul, scaled_matmul
from dovetail.core.ops.norm import rms_norm
from dovetail.core.ops.tile_choice import BLOCK
from dovetail.core.ops.tiles import MOST_SHARED_TILES, MatmulTile
from dovetail.core.ops.weight_formats import UINT4
from dovetail.core.ops.wide_norm import wide_qk_norm
from dovetail.core.testing.compiling import resources
from dovetail.core.testing.formats import SCALED_ROWS
from dovetail.plugins.adapter.lora.kernel import lora_triton
from dovetail.plugins.collective.symm_mem.collective import FP8
from dovetail.plugins.logits.kernels import PROGRAMS, add_pairs_triton, penalise_triton
from dovetail.plugins.quant.fp8.format import FP8_TOKEN
from dovetail.plugins.quant.int4.order import with_order
from dovetail.plugins.quant.int8.format import INT8_TOKEN
from dovetail.plugins.spec_decode.corpus import Corpus
from dovetail.plugins.spec_decode.kernels import look_up_triton

from ..nowhere import lone_copies, lone_reducer
from .attention_launches import SCARCE, attention, attention_cases
from .emulated import BF16, E4M3, EVERYTHING, FP16, FP32, INT32, INT64, cuda, has_fp8
from .expert_launches import RULES, choose, experts, multiply_stacked
from .expert_launches import multiply as multiply_experts
from .expert_launches import multiply_packed as multiply_packed_experts
from .latent_launches import latents
from .packed_launches import hopper_operands, packed_products, packed_weight
from .shipped import SHIPPED, TILES

VOCAB = 128256


@triton.jit
def encode_groups(x_GC, scale_in):
    scale_G = tl.max(tl.abs(x_GC), axis=1) + scale_in
    return x_GC / scale_G[:, None], scale_G


def eight_bits() -> ActFormat:
    """Format of quantized activations that the GPU at hand converts."""
    return FP8_TOKEN if has_fp8() else INT8_TOKEN


def encoded(columns: int) -> tuple[tuple[ActFormat, ...], ...]:
    """Formats that producers emit."""
    token = eight_bits()
    groups = ActFormat(
        "groups", dtype=token.dtype, group=128, scale_layout="column", sums=Sums(64), encode=encode_groups
    )
    static = ActFormat(
        "static",
        dtype=token.dtype,
        group="tensor",
        static_scale=cuda(1, dtype=FP32),
        pre_scale=cuda(columns),
        encode=encode_groups,
    )
    some = ((PLAIN,), (token,), (PLAIN, token))
    more = ((SCALED_ROWS,), (INT8_TOKEN,), (groups,), (static,), *((fmt,) for fmt in ordered(columns)))
    return (*some, *more) if EVERYTHING else (*some, (groups,))


def ordered(columns: int) -> tuple[ActFormat, ...]:
    """Formats with an order of columns, as int4 has for act-order."""
    return tuple(with_order(fmt, columns, torch.device("cuda")) for fmt in (PLAIN, eight_bits()))


def norms() -> None:
    for columns, dtype in ((4096, BF16), (72, FP16), (16384, BF16))[: 3 if EVERYTHING else 2]:
        x, weight = cuda(64, columns, dtype=dtype), cuda(columns, dtype=dtype)
        for emit in encoded(columns):
            for residual in (x, None):
                rms_norm(x, residual, weight, 1e-5, emit)
        wide = cuda(columns, dtype=FP32)
        rms_norm(x, x, wide, 1e-5, after=(wide, 1e-5))
        rms_norm(x, x, None, 0.0, (PLAIN, eight_bits()), after=(wide, 1e-5))
        for squares in (None, cuda(64, 2, dtype=FP32)):
            wide_qk_norm(x, wide, (columns // 2, columns // 4), 1e-5, squares)
        layer_norm(x, x, weight, weight, 1e-5, (PLAIN, eight_bits()))
        layer_norm(x, None, weight, weight, 1e-5)
        layer_norm(x, x, weight, weight, 1e-5, plus_TC=x)


def activations() -> None:
    for columns, dtype in ((14336, BF16), (1440, FP16)):
        for emit in encoded(columns):
            silu_and_mul(cuda(64, 2 * columns, dtype=dtype), emit)
        gelu_and_mul(cuda(64, 2 * columns, dtype=dtype))
        for tanh in (False, True):
            gelu(cuda(64, columns, dtype=dtype), tanh, (PLAIN, eight_bits()))


def formats() -> None:
    for emit in (*encoded(4096), (INT8_TOKEN,), ordered(4096)):
        encode(cuda(64, 4096), emit)


def steps() -> None:
    """Bookkeeping of a step with 256 rows, and with a single row, for which Triton specialises on the value 1."""
    for rows, longest in ((256, 1), (1, 512)):
        slots, starts = cuda(rows, dtype=INT64), cuda(rows + 1, dtype=INT32)
        total = rows * longest
        tokens_SL, table = cuda(257, 8192, dtype=INT32), cuda(257, 512, dtype=INT32)
        layout = step.lay_out_tokens(slots, starts, cuda(257, dtype=INT64), tokens_SL, total, longest)
        step.lay_out_pages(slots, layout, table, cuda(257, dtype=INT64), 16)
        keep_features([cuda(total, 4096)] * 3, slots, starts, slots.int(), cuda(258, 5, 3 * 4096)[:-1])
        rates = cuda(4, dtype=FP32)
        simulate_triton(cuda(rows, 5, dtype=INT64), slots, slots, tokens_SL, cuda(257, dtype=INT64), rates, VOCAB)
        look_up_triton(slots, slots, tokens_SL, 4, 2, 4, 4.0)
        look_up_triton(slots, slots, tokens_SL, 8, 1, 64, 1.0)
        ring = cuda(16384, dtype=INT32), cuda(16384, dtype=INT64), cuda(257, dtype=INT64)
        corpus = Corpus(cuda(257, 4161, dtype=INT32), *ring, 64)
        look_up_triton(slots, slots, tokens_SL, 8, 1, 64, 1.0, corpus)
        floats = [cuda(rows, dtype=FP32) for _ in range(3)]
        keys, keys_S, reals_S = cuda(rows, dtype=INT64), cuda(257, dtype=INT64), cuda(257, dtype=FP32)
        step.gather_params(slots, reals_S, keys_S, reals_S, reals_S, keys_S)
        for dtype in (BF16, FP32) if EVERYTHING else (BF16,) if rows > 1 else (FP32,):
            logits = cuda(rows, VOCAB, dtype=dtype)
            # Both have the same kernels, which take the longest to compile.
            if EVERYTHING or rows > 1:
                step.draw_filtered(logits, keys, keys, floats[0], keys, *floats[1:])
            if EVERYTHING or rows == 1:
                step.least_kept(logits, floats[0], keys, *floats[1:])
            least = cuda(rows, dtype=FP32)
            for bound in (least, None):
                step.draw(logits, keys, floats[0], keys, True, bound)
            step.draw(logits, keys, floats[0], keys, False)
            for count in (1, 64):
                best_logprobs(logits, count, keys)
            logprobs_of(logits, keys, floats[0])
            ctx = LogitsContext(keys, keys, tokens_SL, keys_S, 512 * longest)
            penalise_triton(logits, ctx, reals_S, reals_S, reals_S, cuda(PROGRAMS, VOCAB, dtype=INT32))
            pairs = cuda(257, 1024, dtype=INT64), cuda(257, 1024, dtype=FP32)
            add_pairs_triton(logits, ctx, *pairs, cuda(257, dtype=INT32), keys_S)
            apply_bitmask(logits, cuda(rows, -(-VOCAB // 32), dtype=INT32), keys)
        for width in (1, 5):
            lengths = cuda(257, dtype=INT64)
            into = samples.SampleInputs.empty(rows, width, 4096, BF16, torch.device("cuda"))
            samples.gather_samples(cuda(total, 4096), keys, cuda(rows, 3, dtype=INT64), into)
            if width > 1:
                drafts = cuda(rows, width - 1, dtype=INT32)
                step.write_drafts(drafts, starts[1:], slots, keys, keys, tokens_SL, lengths, VOCAB)
                draft_trees(rows, width, layout, (slots, keys, keys), tokens_SL, lengths)
            step.accept(cuda(rows, width, dtype=INT64), slots, keys, keys, tokens_SL, lengths, lengths)


def draft_trees(
    rows: int,
    width: int,
    layout: step.TokenLayout,
    by_row: tuple[torch.Tensor, ...],
    tokens_SL: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    state = trees.TreeState(4, *cuda(2, len(tokens_SL), width - 1, dtype=INT64))
    drafts, parents = cuda(2, rows, width - 1, dtype=INT64)
    trees.write_tree(drafts, parents, by_row[1], *by_row, tokens_SL, lengths, state, VOCAB)
    trees.place_tree(layout, lengths, state, rows)
    drawn = cuda(rows, width, dtype=INT64)
    _, _, path = trees.accept_tree(drawn, *by_row, tokens_SL, lengths, lengths, state)
    logits, temperature = cuda(rows, VOCAB, dtype=BF16), cuda(rows, dtype=FP32)
    for random in (False, True):
        siblings.best_tokens(logits, by_row[1], temperature, by_row[1], random, 4, temperature if random else None)
    for dtype in (BF16, E4M3):
        planes = tuple(Plane(name, (8, 128), dtype) for name in "kv")
        pools = make_pools([KVGroup(0, (0, 1), planes, page_tokens=16)], {0: 9}, torch.device("cuda"))
        trees.keep_path(pools[0], cuda(len(tokens_SL), 512, dtype=INT32), path)


def products() -> None:
    """One tile for each code path of those tuned for this GPU, at a shape for which it was tuned, and the rule's."""
    seen: set[object] = set()
    for (gpu, kind, outputs, inputs), by_rows in TILES.items():
        for rows, tile in by_rows.items() if gpu == torch.cuda.get_device_properties(0).name else ():
            if tile is None:
                continue
            ways = {(kind, tile.tma, tile.swap, tile.split > 1, tile.prefetch > 0)}
            if tile.specialized:
                # test_a_specialized_matmul_fetches_only_the_weight_before_it_waits compiles other numbers of groups.
                ways = {("specialized", kind, tile.split > 1, tile.warp_groups if EVERYTHING else 0)}
            if EVERYTHING or not ways <= seen:
                seen |= ways
                multiply(kind, rows, outputs, inputs)
    for outputs in (1280, 200064) if has_fp8() else ():
        for rows in (1, 64):
            multiply("fp8", rows, outputs, 4096 + 128)
    for rows in (1, 64, 512)[:: 1 if EVERYTHING else 2]:
        x, weight = cuda(rows, 4096, dtype=torch.int8), cuda(1280, 4096, dtype=torch.int8)
        scales = cuda(rows, 1, dtype=FP32), cuda(1280, dtype=FP32)
        int8_matmul(x, weight, *scales, cuda(1280), BF16, cuda(MOST_SHARED_TILES, dtype=INT32))
    rescale_triton(cuda(512, 1280, dtype=INT32), *scales, None, BF16)
    tiles = MatmulTile(16, 64, 128, split=2), MatmulTile(128, 128, 128, warps=8, stages=3, swap=False)
    for tile in tiles if has_fp8() else ():
        multiply_blocks(tile)
    # A table for any GPU may have tiles for 16 bits.
    tile = MatmulTile(16, 64, 64, split=2)
    matmul_triton(cuda(16, 4096), cuda(1280, 4096), tile, cuda(MOST_SHARED_TILES, dtype=INT32))


def multiply_blocks(tile: MatmulTile) -> None:
    scales = cuda(200, 1, dtype=FP32), cuda(10, 32, dtype=FP32)
    x, weight = cuda(200, 4096, dtype=E4M3), cuda(1280, 4096, dtype=E4M3)
    matmul_triton(x, weight, tile, cuda(MOST_SHARED_TILES, dtype=INT32), *scales, None, BF16, BLOCK, (BLOCK, BLOCK))


@temporarily(SHIPPED)
def multiply(kind: str, rows: int, outputs: int, inputs: int) -> None:
    if kind == "bf16":
        counts = cuda(MOST_SHARED_TILES, dtype=INT32)
        matmul(cuda(rows, inputs), cuda(outputs, inputs), cuda(outputs), counts)
        return
    scales = cuda(rows, 1, dtype=FP32), cuda(outputs, dtype=FP32)
    x, weight = cuda(rows, inputs, dtype=E4M3), cuda(outputs, inputs, dtype=E4M3)
    scaled_matmul(x, weight, *scales, None, BF16, cuda(MOST_SHARED_TILES, dtype=INT32))


def decoded_products() -> None:
    """FP8 weights of inputs in the model's dtype: few rows, many rows, and float32."""
    shapes = (1, 1280, BF16), (64, 28672, FP16), (128, 1280, BF16), (512, 1280, BF16), (8, 64, FP32)
    for rows, outputs, dtype in shapes:
        weight, scale = cuda(outputs, 4096, dtype=E4M3), cuda(outputs, dtype=FP32)
        decoded_matmul(cuda(rows, 4096, dtype=dtype), weight, scale, None, cuda(MOST_SHARED_TILES, dtype=INT32))


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


def sums() -> None:
    """Reductions as launched by a rank of eight and of two."""
    for size, columns, dtype in ((8, 7168, BF16), (2, 96, FP32), (8, 8192, FP16))[: 3 if EVERYTHING else 2]:
        reducer = lone_reducer(3, size)
        sizes = (("one_shot", 1), ("one_shot", 132), ("two_shot", 256))
        for algorithm, rows in sizes if EVERYTHING or size == 8 else sizes[1:]:
            x = cuda(rows, columns, dtype=dtype)
            reducer.reduce(x, algorithm)
            for emit in encoded(columns) if EVERYTHING else ((PLAIN, eight_bits()),):
                reducer.boundary(x, x, x[0], 1e-5, emit, algorithm)
        for emit in encoded(columns) if EVERYTHING else ((PLAIN, eight_bits()), encoded(columns)[-1])[: size // 2]:
            assert reducer.serves_sharded(x, emit) == all(fmt.dtype is not torch.int8 for fmt in emit)
            if reducer.serves_sharded(x, emit):
                reducer.sharded_boundary(x, cuda(-(-rows // size), columns, dtype=dtype), x[0], 1e-5, emit)
        reducer.sharded_boundary(x, None, x[0], 1e-5, (FP8 if has_fp8() else PLAIN,))
        reducer.argmax(cuda(64, dtype=FP32), cuda(64, dtype=INT64))
        reducer.boundary(x, None, x[0], 1e-5, (PLAIN,), "one_shot")
        wide = cuda(columns, dtype=FP32)
        reducer.boundary(x, x, wide, 1e-5, (PLAIN,), "two_shot", (wide, 1e-5))


def copies() -> None:
    for rank, (size, columns, dtype) in enumerate(((2, 96, FP32), (2, 8192, BF16), (8, 7168, BF16))):
        ranks = lone_copies(rank, size)
        x = cuda(4 * size, columns, dtype=dtype)
        own = ranks.reduce_rows(x)
        emits = ((PLAIN, FP8_TOKEN), (FP8_TOKEN,), (FP8,)) if has_fp8() else ((PLAIN,),)
        for emit in emits if EVERYTHING or size == 8 else emits[:1]:
            assert ranks.serves(emit)
            ranks.boundary(x, own, x[0], 1e-5, emit)
        ranks.boundary(x, None, x[0], 1e-5, (PLAIN,))


def more_functions() -> None:
    """Variants for Hopper whose functions are inlined into no kernel's first variant of CASES."""
    x, weight = cuda(64, 4096), cuda(4096)
    rms_norm(x, None, weight, 1e-5, (PLAIN, eight_bits()))
    encode(x, (INT8_TOKEN, ordered(4096)[0]))
    encode(x, (replace(eight_bits(), sums=Sums(128)),))
    gelu(cuda(64, 1440, dtype=FP16), True, (PLAIN, eight_bits()))
    for rule in RULES[1:]:
        choose(rule)
    multiply_experts(2, 128, 8, 2048, 768, E4M3, blocks=True)
    multiply_experts(64, 128, 8, 2048, 768, E4M3, blocks=True)
    multiply_experts(512, 8, 2, 4096, 14336, BF16)
    multiply_packed_experts(256, 32, 4, 2880, 2880, PLAIN)
    hopper_operands()
    like = packed_weight(UINT4, 8, 2048, 128, BF16)
    multiply_stacked(64, 128, 8, 2048, 768, like, FP8_TOKEN, ordered=True)
    tile = MatmulTile(128, 256, 128, stages=4, split=2, specialized=True)
    scales = cuda(200, 1, dtype=FP32), cuda(1280, dtype=FP32)
    given = cuda(200, 8192, dtype=E4M3), cuda(1280, 8192, dtype=E4M3)
    matmul_triton(*given, tile, cuda(MOST_SHARED_TILES, dtype=INT32), *scales, None, BF16)
    multiply_blocks(MatmulTile(16, 64, 256, stages=3, prefetch=5))
    multiply_blocks(MatmulTile(128, 128, 256, stages=3, specialized=True))
    multiply_blocks(MatmulTile(128, 256, 128, stages=4, specialized=True))
    given = cuda(200, 8192, dtype=torch.int8), cuda(1280, 8192, dtype=torch.int8)
    matmul_triton(*given, replace(tile, split=1), None, *scales, None, BF16)
    attention(SCARCE, kv_dtype=E4M3, page=64, gluon=False)
    attention(SCARCE, soft_cap=50.0, sinks=True, gluon=False)
    rows = cuda(16, 8192)
    lone_copies(0, 2).boundary(rows, cuda(8, 8192), rows[0], 1e-5, (FP8,))


CASES: dict[str, Callable[[], None]] = {
    "norms": norms,
    "activations": activations,
    "formats": formats,
    "steps": steps,
    "sums": sums,
    "copies": copies,
    "products": products,
    "decoded products": decoded_products,
    "packed products": packed_products,
    "experts": experts,
    "latents": latents,
    "adapters": adapters,
    **dict(attention_cases()),
}


FEW = 16
"""Bytes of stack that a thread of any kernel may use for spilled registers: a value or two from its start."""
SPILLS = {
    # Rows of 8192 values and more: each of 1024 threads has 64 registers, for 16 values.
    "dovetail.core.ops.kernels.activations:_gelu": 64,
    # The words of eight ranks are polled in registers.
    "dovetail.plugins.collective.symm_mem.sharded_kernels:sharded": 128,
    # Scores and sums of a tile of 64 queries and more, most with 71 query heads for one kv head.
    "dovetail.plugins.attention.triton.kernels:attend_items": 1024,
    # Constants of prompts with head dim 256, and with capped scores.
    "dovetail.plugins.attention.triton.hopper.kernel:attend_prompts": 96,
    # Values from the start of an item.
    "dovetail.plugins.attention.triton.hopper.latent:attend_latents_hopper": 64,
    # Sums of 64 rows beside a block of latents, most with trees over latents of 8 bits. Tiles of 16 rows do not spill,
    # and take 1.5 to 4 times as long (benchmarks/NOTES.md, Experts).
    "dovetail.plugins.attention.triton.latent_kernel:attend_latents": 160,
    # Sums of 128 rows for gate and up beside the codes of a span; most in float32.
    "dovetail.core.ops.kernels.packed_experts:_packed_expert_matmul": 512,
    # The ends of products with tiles of 128 rows; blocks are multiplied without spilling.
    "dovetail.core.ops.kernels.specialized_experts:experts_specialized": 256,
    # Sums of gate and up in tiles of 64 and 128 rows, before Hopper, whose tensor cores read an operand from memory.
    "dovetail.core.ops.kernels.stacked_experts:_stacked_expert_matmul": 384,
    # The outputs of 64 rows for adapters of high rank.
    "dovetail.plugins.adapter.lora.kernel:_expand": 512,
}
"""Kernels whose threads may use more."""


def spilling(kernels: Iterable[tuple[str, CompiledKernel]]) -> dict[str, int]:
    """Return the kernels that use more stack than they may, with the bytes of a thread."""
    stacks: dict[str, int] = {}
    for name, kernel in {kernel.hash: (name, kernel) for name, kernel in kernels}.values():
        stacks[name] = max(resources(kernel).stack, stacks.get(name, 0))
    return {name: stack for name, stack in stacks.items() if stack > SPILLS.get(name, FEW)}


def jit_functions(everywhere: bool = False) -> set[str]:
    """Return "module:name" of functions decorated with triton.jit or gluon.jit in the core and built-in plugins. With
    everywhere=True, leave out those in Gluon, which are for Hopper."""
    house = Path(dovetail.__file__).parent
    found = set()
    for part in ("core", "plugins"):
        for path in (house / part).rglob("*.py"):
            if re.search(r"@(triton|gluon)\.jit", path.read_text()) and house / "core/testing" not in path.parents:
                name = ".".join(path.relative_to(house.parent).with_suffix("").parts)
                for key, value in vars(importlib.import_module(name)).items():
                    kernel = isinstance(value, triton.JITFunction) and value.__module__ == name
                    if kernel and not (everywhere and value.is_gluon()):
                        found.add(f"{name}:{key}")
    assert len(found) > 30
    return found
