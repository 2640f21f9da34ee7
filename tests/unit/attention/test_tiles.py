"""Choice of kernels and tiles by attention=triton."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from dovetail.core.interfaces import MLA, AttentionLayer
from dovetail.core.ops.rehearsal import StepLimits, rehearsal
from dovetail.core.worker.warmup import warmup_steps
from dovetail.plugins.attention.triton import absorbed
from dovetail.plugins.attention.triton.draft_rehearsal import drafted_steps, request_steps
from dovetail.plugins.attention.triton.tiles import DecodeTile, PromptTile, Shape, Tiles, packed_heads

E4M3 = torch.float8_e4m3fn


def test_which_steps_gather_pages():
    """Pages are gathered for long prompts whose pages are slow to read, if the copy is small enough."""
    tiles, shape = Tiles(), Shape(4, 128, torch.bfloat16, E4M3, 16)
    assert tiles.gather(shape, 8192, (512,) * 16, 8)
    assert not tiles.gather(shape, 8192, (128,) * 64, 8), "short prompts"
    assert tiles.gather(shape, 8192, (65536,), 8) and not tiles.gather(shape, 8192, (65537,), 8), "more than the room"
    assert not tiles.gather(shape, 2560, (65536 // 9,) * 9, 8), "with what each row's last page leaves free"
    assert not tiles.gather(replace(shape, dtype=torch.float32), 8192, (8192,), 8)
    same = replace(shape, kv_dtype=torch.bfloat16)
    assert tiles.gather(same, 8192, (1024,) * 8, 8)
    assert not tiles.gather(same, 8192, (512,) * 16, 8), "prompts of middle length"
    assert tiles.gather(replace(same, hopper=True), 8192, (512,) * 16, 8)
    assert not tiles.gather(replace(same, hopper=True, head_dim=512), 8192, (512,) * 16, 8), "not its kernel's"
    assert not tiles.gather(replace(same, page_tokens=64), 8192, (8192,), 8), "tensor maps read these pages"
    assert not tiles.gather(replace(same, head_dim=80), 8192, (8192,), 8), "tensor maps read none of these"


def test_which_prompts_go_to_the_kernel_for_hopper():
    shape = Shape(4, 128, torch.bfloat16, torch.bfloat16, 64, hopper=True)
    tiles = [Tiles().prefill(shape, 8192, rows) for rows in (1, 4, 16)]
    assert all(isinstance(tile, PromptTile) for tile in tiles)
    assert [(tile.block_n, tile.persistent) for tile in tiles] == [(128, True), (128, False), (64, True)]
    others = (
        dict(hopper=False), dict(page_tokens=32), dict(page_tokens=96), dict(head_dim=100), dict(head_dim=512),
        dict(kv_dtype=E4M3), dict(dtype=torch.float32, kv_dtype=torch.float32),
    )  # fmt: skip
    for other in others:
        assert not isinstance(Tiles().prefill(replace(shape, **other), 8192, 1), PromptTile), other


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("group", [1, 3, 7, 8, 71, 128])
def test_the_kernels_for_hopper_serve_every_head_layout(group, head_dim):
    """Tiles contain every query head of a kv head, and few rows without one."""
    for kv_dtype in (torch.bfloat16, E4M3):
        tile = Tiles().decode(Shape(group, head_dim, torch.bfloat16, kv_dtype, 32, hopper=True), 1, 0.5)
        assert isinstance(tile, DecodeTile) and tile.queries(group) == 1
        assert 0 <= tile.head_tiles(group) * tile.block_m - group < tile.block_m
    tile = Tiles().prefill(Shape(group, head_dim, torch.bfloat16, torch.bfloat16, 64, hopper=True), 8192, 1)
    assert isinstance(tile, PromptTile)
    pack = packed_heads(group)
    assert tile.queries(group) * pack == tile.block_m, "a tile is whole tokens"
    assert 0 <= tile.head_tiles(group) * pack - group <= group / 15


@pytest.mark.parametrize(("rows", "kernel"), [(1, "small"), (8, "general"), (16, "hopper"), (64, "many")])
def test_rows_of_several_tokens(rows, kernel):
    """The programs of an SM decide: warps share a range, all queries of a row are a tile, or programs are many."""
    shape = Shape(4, 128, torch.bfloat16, E4M3, 32, hopper=True)
    tile = Tiles().decode(shape, 5, rows * 8 / 132)
    if kernel == "general":
        assert not isinstance(tile, DecodeTile) and tile.block_m == 32 >= 5 * shape.group
        return
    assert isinstance(tile, DecodeTile)
    assert (tile.block_m, tile.tokens) == ((8, 2) if kernel == "small" else (16, 4))
    assert tile.warps == (2 if kernel == "many" else 4)
    # Eight query heads fill the small tile, which would have one token.
    wide = Tiles().decode(replace(shape, group=8), 4, rows * 4 / 132)
    assert not isinstance(wide, DecodeTile) or (wide.block_m, wide.tokens) == (16, 2)


def test_many_programs_run_in_small_blocks():
    """With more programs than an SM holds, several head tiles, padded blocks and short keys suit the other kernel."""
    shape = Shape(4, 128, torch.bfloat16, torch.bfloat16, 32, hopper=True)
    for other in (dict(group=71), dict(head_dim=80), dict(head_dim=64, group=1), dict(head_dim=64, kv_dtype=E4M3)):
        few, many = (Tiles().decode(replace(shape, **other), 1, programs) for programs in (0.5, 20))
        assert isinstance(few, DecodeTile) and not isinstance(many, DecodeTile), other
    for other in (dict(head_dim=256), dict(group=1)):
        few, many = (Tiles().decode(replace(shape, **other), 1, programs) for programs in (0.5, 20))
        blocks = [tile.stages * tile.span for tile in (few, many)]
        assert all(isinstance(tile, DecodeTile) for tile in (few, many)) and blocks[0] > blocks[1], other


def test_which_rows_go_to_the_kernel_for_single_tokens():
    shape = Shape(4, 128, torch.bfloat16, E4M3, 32, hopper=True)
    for programs in (0.01, 0.5, 1.5, 20):
        tile = Tiles().decode(shape, 1, programs)
        assert isinstance(tile, DecodeTile) and tile.queries(4) == 1, "a token of a row is a tile"
    tiles = [Tiles().decode(replace(shape, **other), 1, 1) for other in (dict(group=16), dict(kv_dtype=torch.bfloat16))]
    assert all(isinstance(tile, DecodeTile) for tile in tiles)
    others = (
        dict(hopper=False), dict(head_dim=72), dict(head_dim=512), dict(kv_dtype=torch.float16),
        dict(dtype=torch.float32, kv_dtype=torch.float32),
    )  # fmt: skip
    for other in others:
        assert not isinstance(Tiles().decode(replace(shape, **other), 1, 1), DecodeTile), other


@pytest.mark.parametrize(("group", "tokens", "each"), [
    (4, 5, 4), (4, 3, 3), (8, 5, 2), (7, 2, 2), (5, 9, 3), (1, 9, 9), (1, 33, 16),
])  # fmt: skip
def test_rows_with_drafts(group, tokens, each):
    """A tile has as many tokens as fit; a few rows, large groups and 16-bit keys go to the kernel for all GPUs."""
    shape = Shape(group, 128, torch.bfloat16, E4M3, 32, hopper=True)
    tile = Tiles().decode(shape, tokens, 4)
    assert isinstance(tile, DecodeTile) and tile.queries(group) == each
    assert tile.head_tiles(group) == 1
    others = replace(shape, hopper=False), replace(shape, group=9), replace(shape, kv_dtype=torch.bfloat16)
    for other, count, programs in ((shape, tokens, 0.5), (shape, 8 // group, 4), *((one, tokens, 4) for one in others)):
        if count > 1:
            assert not isinstance(Tiles().decode(other, count, programs), DecodeTile)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("narrow", [False, True])
def test_tiles_of_latents_are_large_for_many_rows_and_fit_each_gpu(narrow, dtype, monkeypatch):
    """Counts of rows at which benchmarks/latents.py has either tile ahead."""
    monkeypatch.setattr(absorbed, "processors", lambda device: 132)
    sizes, device = MLA(1536, 512, 64, 128, 128), torch.device("cpu")

    def tile(heads: int, tokens: int, rows: int, shared: int = 227 << 10) -> absorbed.LatentTile:
        monkeypatch.setattr(absorbed, "shared_bytes_of", lambda device: shared)
        layer = AttentionLayer(0, 0, 0, heads, heads, 192, 0.1, mla=sizes)
        kv_dtype = E4M3 if narrow else dtype
        return absorbed.tile_of(layer, tokens, rows, rows * tokens, dtype, kv_dtype, device)

    most = 64 if dtype.itemsize == 2 else 16
    assert [tile(128, 1, rows).block_m for rows in (1, 2, 8, 64, 256)] == [16, 16, most, most, most]
    assert [tile(heads, tokens, 64).block_m for heads, tokens in ((16, 1), (16, 4), (32, 1))] == [16, most, most]
    for shared in (99 << 10, 163 << 10, 227 << 10):
        for heads, tokens, rows in ((16, 1, 1), (16, 4, 64), (128, 1, 64)):
            assert absorbed.shared_bytes(sizes, tile(heads, tokens, rows, shared), dtype.itemsize) <= shared


def test_which_latents_go_to_the_kernels_for_hopper(monkeypatch):
    monkeypatch.setattr(absorbed, "processors", lambda device: 132)
    sizes, bf16, fp16 = MLA(1536, 512, 64, 128, 128), torch.bfloat16, torch.float16

    def tile(tokens=1, rows=64, dtype=bf16, kv_dtype=E4M3, mla=sizes, heads=16, **options) -> absorbed.LatentTile:
        layer = AttentionLayer(0, 0, 0, heads, heads, 192, 0.1, mla=mla)
        device = torch.device("cpu")
        return absorbed.tile_of(layer, tokens, rows, rows * tokens, dtype, kv_dtype, device, **options)

    def hopper(**options) -> bool:
        return tile(**options).hopper

    assert hopper(hopper=True) and hopper(kv_dtype=bf16, hopper=True) and hopper(dtype=fp16, kv_dtype=fp16, hopper=True)
    others = (
        dict(hopper=False), dict(tree=True), dict(heads=8), dict(rows=1, tokens=4), dict(dtype=fp16),
        dict(kv_dtype=fp16), dict(dtype=torch.float32, kv_dtype=torch.float32), dict(mla=MLA(0, 256, 64, 128, 128)),
        dict(mla=MLA(0, 512, 32, 128, 128)),
    )  # fmt: skip
    for other in others:
        assert not hopper(**{"hopper": True, **other}), other
    # One token of 16 heads has a small tile, whose ranges are joined by the value projection in steps of few rows.
    small = {rows: tile(rows=rows, hopper=True) for rows in (1, 8, 9, 41, 500)}
    assert {one.block_m for one in small.values()} == {16}
    assert {rows: one.joins for rows, one in small.items()} == {1: False, 8: False, 9: True, 41: True, 500: True}
    assert 0 < small[1].root < small[8].root
    assert [(small[rows].least, small[rows].programs) for rows in (9, 41, 500)] == [(256, 1), (512, 2), (512, 2)]
    assert {tile(hopper=True, **more).block_m for more in (dict(tokens=2), dict(heads=32))} == {64}


@pytest.mark.parametrize(("group", "kv_heads"), [(4, 8), (4, 1), (8, 8), (2, 8), (1, 2)])
@pytest.mark.parametrize("tokens", [2, 3, 5, 12])
def test_warm_up_steps_launch_every_kernel_of_rows_with_drafts(group, kv_heads, tokens):
    shape, tiles = Shape(group, 128, torch.bfloat16, E4M3, 32, hopper=True), Tiles()

    def kernel(rows):
        return replace(tiles.decode(shape, tokens, rows * kv_heads / 132), programs=0, least=0, root=0)

    limits = StepLimits(tokens=2048, rows=256, longest=1023, drafts=tokens - 1)
    steps = list(drafted_steps(tiles, shape, tokens, kv_heads / 132, limits))
    most = min(256, 2048 // tokens)
    assert {kernel(rows) for rows in range(1, most + 1)} == {kernel(step.rows) for step in steps}
    assert len(steps) <= 4 and steps[-1] in warmup_steps(2048, 256, 1023, tokens - 1), "the largest step runs once"
    for step in steps:
        assert step.tokens == step.rows * tokens <= 2048 and step.drafts == tokens - 1
    assert not list(drafted_steps(tiles, shape, tokens, 1.0, replace(limits, longest=tokens - 1)))


def test_rows_with_drafts_request_steps_in_a_rehearsal():
    shape, limits = Shape(4, 128, torch.bfloat16, E4M3, 32, hopper=True), StepLimits(2048, 256, 1023, drafts=4)
    request_steps(Tiles(), shape, 5, 8 / 132)
    with rehearsal(limits) as found:
        request_steps(Tiles(), shape, 1, 8 / 132)
        assert not found.steps
        request_steps(Tiles(), shape, 5, 8 / 132)
        assert [step.rows for step in found.missing()] == [2, 12, 16, 256]


def test_passes_of_drafters_with_more_tokens_than_rows_verify_are_run_by_steps_with_all_drafts():
    """A pass with mask tokens feeds 8 tokens of a row for 4 drafts."""
    shape, limits = Shape(4, 128, torch.bfloat16, E4M3, 32, hopper=True), StepLimits(2048, 256, 1023, drafts=4)
    steps = list(drafted_steps(Tiles(), shape, 8, 8 / 132, limits))
    assert len(steps) > 1
    for step in steps:
        assert step.drafts == 4 and step.tokens == 5 * step.rows
    assert not list(drafted_steps(Tiles(), shape, 8, 8 / 132, replace(limits, drafts=0)))
