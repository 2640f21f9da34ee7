"""Compressed attention of attention=triton compiled: the sizes of DeepSeek V3, and the engine with CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.core.interfaces import MLA
from dovetail.core.testing.attention_latent import LatentArena
from dovetail.core.testing.numeric import TOLERANCE
from dovetail.plugins.attention.config import TritonConfig

from .checkpoints import random_tokens, save_random

pytest.importorskip("triton")
from dovetail.plugins.attention.triton import expanded
from dovetail.plugins.attention.triton.backend import Triton
from dovetail.plugins.attention.triton.tiles import Shape, Tile, Tiles

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def arena_of_v3(heads: int, dtype: torch.dtype, kv_dtype: torch.dtype, page: int) -> LatentArena:
    return arena_of(MLA(1536, 512, 64, 128, 128), heads, dtype, kv_dtype, page)


def arena_of(mla: MLA, heads: int, dtype: torch.dtype, kv_dtype: torch.dtype, page: int) -> LatentArena:
    arena = LatentArena(
        Triton(TritonConfig()),
        mla=mla,
        heads=heads,
        device=torch.device("cuda"),
        dtype=dtype,
        kv_dtype=kv_dtype,
        tolerance=TOLERANCE[dtype],
        page_tokens=(page,),
        pages=1200,
    )
    # Weights of a trained model's scale, so that no score is so large that bfloat16 cannot tell keys apart.
    arena.up_HOL = arena.up_HOL * mla.kv_rank**-0.5
    arena.rope.table.div_(4)
    return arena


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("page", [16, 64])
def test_sizes_of_deepseek_v3(heads, kv_dtype, page):
    """Rows that are split, drafts, and expanded rows with and without earlier keys."""
    arena = arena_of_v3(heads, BF16, kv_dtype, page)
    arena.run(arena.plan([("a", 300), ("b", 61), ("c", 5)]))
    arena.run(arena.plan([("c", 1), ("b", 4), ("a", 1)], num_decode=3, slack=9))
    arena.run(arena.plan([("c", 1), ("b", 200), ("a", 7)], num_decode=1))


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="the kernel is for Hopper"
)
@pytest.mark.parametrize(
    ("heads", "dtype", "kv_dtype", "page"),
    [
        *((heads, BF16, kv_dtype, page) for heads in (16, 64, 128) for kv_dtype in (BF16, E4M3) for page in (16, 64)),
        *((heads, BF16, E4M3, 256) for heads in (5, 24, 80)),
        (16, torch.float16, torch.float16, 48),
    ],
)
def test_large_tiles_on_hopper(heads, dtype, kv_dtype, page):
    """Tiles of one and of several tokens and heads, partly filled; rows of one block, of whole blocks and of one key
    more, and split into ranges; tokens of no row. Slots that were not written hold NaN."""
    arena = arena_of_v3(heads, dtype, kv_dtype, page)
    lengths = (1, 500, 59, 63, 64, 65, 129, 20, 2, 3, 7, 9, 4, 30, 5)
    names = [f"row {i}" for i in range(len(lengths))]
    arena.run(arena.plan(list(zip(names, lengths, strict=True))))
    drafts = [(name, 1 + 3 * i % 5) for i, name in enumerate(names)]
    for rows in (drafts, [(name, 5) for name in names], drafts[::-1]):
        step = arena.plan(rows, num_decode=len(rows), slack=500, padding=3)
        arena.run(step)
        (runs,) = (ctx.state for ctx in step.ctxs.values())
        ((run,),) = runs.values()
        assert run.plan.lists[0].tile.hopper and run.plan.part_rows > 0


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="the kernel is for Hopper"
)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "page"),
    [*((BF16, kv_dtype, page) for kv_dtype in (BF16, E4M3) for page in (16, 64)), (torch.float16, torch.float16, 48)],
)
def test_small_tiles_on_hopper(dtype, kv_dtype, page):
    """Whole rows, and rows whose ranges the last one and another kernel join; rows of one block and of one key more;
    tokens of no row. Slots that were not written hold NaN."""
    arena = arena_of_v3(16, dtype, kv_dtype, page)
    lengths = (1, 500, 59, 63, 64, 65, 129, 20, 2, 400, 257)
    names = [f"row {i}" for i in range(len(lengths))]
    arena.run(arena.plan(list(zip(names, lengths, strict=True))))
    for count in (1, 2, 8, len(names)):
        step = arena.plan([(name, 1) for name in names[:count]], num_decode=count, slack=100, padding=3)
        arena.run(step)
        (runs,) = (ctx.state for ctx in step.ctxs.values())
        ((run,),) = runs.values()
        tile = run.plan.lists[0].tile
        assert tile.hopper and tile.block_m == 16 and tile.joins is (count > 8) and run.plan.part_rows > 0


@pytest.mark.parametrize("variant", ["deepseek_v2_lite", "deepseek_v3"])
def test_tokens_of_the_engine(variant, tmp_path):
    """In float32, tokens with CUDA graphs, drafts and chunks equal those of the CPU."""
    save_random(tmp_path, variant)
    prompts = [random_tokens(n, seed=n) for n in (5, 130, 61)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)

    def run(*overrides: str) -> list[list[int]]:
        with LLM(str(tmp_path), overrides=["engine.dtype=float32", *overrides]) as llm:
            return [list(result.token_ids) for result in llm.generate(prompts, params)]

    expected = run("engine.device=cpu")
    gpu = ["engine.device=cuda", "attention=triton", "engine.kv_pages=200"]
    assert run(*gpu) == expected
    assert run(*gpu, "engine.token_budget=48", "engine.depth=2", "spec_decode=ngram") == expected


class ShortRanges(Tiles):
    def prefill(self, shape: Shape, tokens: int, rows: int) -> Tile:
        tile = super().prefill(shape, tokens, rows)
        return replace(tile, least=128, programs=4)


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
@pytest.mark.parametrize(
    ("heads", "mla"),
    [
        (16, MLA(0, 512, 64, 128, 128)),
        (6, MLA(0, 256, 32, 64, 64)),
        (4, MLA(0, 256, 64, 128, 72)),
    ],
    ids=["V3", "narrow", "values of 72 columns"],
)
def test_prompts_on_hopper(heads, mla, kv_dtype, monkeypatch):
    """Rows that end in a block's first, last and middle key, that continue a sequence and that share a step with decode
    rows; all heads at once, and some at a time with rows that are split. Slots that were not written hold NaN."""
    arena = arena_of(mla, heads, BF16, kv_dtype, 32)
    names = ("a", "b", "c", "d", "e")
    arena.run(arena.plan([("a", 200), ("b", 128), ("c", 1)]))
    arena.run(arena.plan([("c", 1), ("a", 190), ("d", 200), ("b", 257)], num_decode=1, slack=300))
    monkeypatch.setattr(expanded, "ROOM_BYTES", 64 * 14 * (mla.nope_dim + mla.v_dim) * 2 * heads)
    arena.backend.tiles = ShortRanges()
    step = arena.plan([(name, 60 + 64 * i) for i, name in enumerate(names)], padding=5)
    arena.run(step)
    if torch.cuda.get_device_capability() == (9, 0):
        (state,) = (ctx.state for ctx in step.ctxs.values())
        (runs,) = state.values()
        (run,) = (run for run in runs if isinstance(run, expanded.Expanded))
        assert run.heads == heads // 2 and run.plan.part_rows > 0
