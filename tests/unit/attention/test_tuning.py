"""Choices of attention=triton for decode rows in tuning tables: what is tried, what is refused, and what is used."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("triton")

from dovetail.core.ops.choices import Choices, temporarily
from dovetail.plugins.attention.triton.tiles import DecodeTile, Geometry, Shape, Tile, Tiles
from dovetail.plugins.attention.triton.tuning import (
    MOST_BYTES,
    OP,
    DecodeTunable,
    TunedTiles,
    choice_of,
    key_of,
    tile_of,
)

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
LLAMA = Geometry(32, 8, 128, 0, BF16, E4M3, 32)
GEOMETRIES = {
    "GQA, 8 bits": LLAMA,
    "MHA, 16 bits": Geometry(40, 40, 128, 0, torch.float16, torch.float16, 16),
    "MQA": Geometry(71, 1, 64, 0, BF16, BF16, 64),
    "wide heads": Geometry(16, 16, 256, 4096, torch.float16, E4M3, 32),
    "heads that are no power of two": Geometry(32, 8, 80, 0, BF16, BF16, 32),
}


def shape_of(geometry, hopper=True):
    return Shape(
        geometry.group, geometry.head_dim, geometry.dtype, geometry.kv_dtype, geometry.page_tokens, hopper=hopper
    )


def tunable(geometry, rows, hopper=True, max_len=8192):
    return DecodeTunable(lambda: None, geometry, rows, max_len, shape_of(geometry, hopper), 132)


@pytest.mark.parametrize("hopper", [True, False], ids=["hopper", "others"])
@pytest.mark.parametrize("rows", [1, 64, 512])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_candidates_can_be_launched(name, rows, hopper):
    one = tunable(GEOMETRIES[name], rows, hopper)
    found = [choice for choice in one.candidates() if one.admits(choice)]
    assert len(found) >= 8 and len({json.dumps(choice, sort_keys=True) for choice in found}) == len(found)
    for choice in json.loads(json.dumps(found)):
        tile = tile_of(choice, shape_of(GEOMETRIES[name], hopper))
        assert isinstance(tile, DecodeTile) is (choice["kernel"] == "hopper") and (hopper or type(tile) is Tile)
    assert len({one.kernel(choice) for choice in found}) <= len(found)


def test_the_default_is_among_the_candidates_of_its_kernel():
    for rows in (1, 24, 256):
        tile = Tiles().decode(shape_of(LLAMA), 1, rows * 8 / 132)
        assert tile_of(choice_of(tile), shape_of(LLAMA)) == tile
    other = Tiles().decode(shape_of(LLAMA, hopper=False), 1, 2.0)
    assert tile_of(choice_of(other), shape_of(LLAMA, hopper=False)) == other


def test_trials_have_rows_of_different_lengths_that_fit_in_memory():
    assert tunable(LLAMA, 4).loads == ([128, 512, 2048, 128], [640] * 4)
    assert tunable(LLAMA, 3, max_len=300).loads == ([128, 300, 300], [300] * 3)
    assert tunable(LLAMA, 1).loads == ([2048], [640])
    many = tunable(GEOMETRIES["MHA, 16 bits"], 512)
    assert many.nbytes <= MOST_BYTES and 1 < min(many.loads[0]) < 128 and 1 < many.loads[1][0] < 128


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kernel": "cuda"}, "kernel is 'cuda', not hopper or general"),
        ({"swizzle": 3}, "has no 'swizzle'; it has"),
        ({"warps": 3}, "warps is 3, which no tile has"),
        ({"stages": 0}, "stages is 0"),
        ({"stages": True}, "stages is True"),
        ({"least": 1 << 30}, "least is 1073741824"),
        ({"slabs": 8, "stages": 8, "warps": 8}, "the kernel for Hopper has no"),
        ({"kernel": "general"}, "has no 'slabs'"),
    ],
)
def test_other_choices_are_refused(change, reason):
    choice = {**choice_of(DecodeTile(8, 16, 4, 3, 2, slabs=2)), **change}
    with pytest.raises(ValueError, match=reason):
        tile_of(choice, shape_of(LLAMA))
    assert not tunable(LLAMA, 1).admits(choice)


def test_tiles_of_the_general_kernel_are_checked():
    for tile in (Tile(8, 32, 4, 3, 2), Tile(16, 32, 4, 3, 2, key_warps=2)):
        with pytest.raises(ValueError, match="block_m is 8|the kernel for all GPUs has no"):
            tile_of(choice_of(tile), shape_of(LLAMA))
    with pytest.raises(ValueError, match="not complete"):
        tile_of({"kernel": "general", "block_m": 16}, shape_of(LLAMA))


def test_measured_tiles_replace_the_table_for_rows_of_one_token(caplog):
    tile = DecodeTile(8, 16, 2, 4, 3, slabs=1, root=16)
    default = Tiles().decode(shape_of(LLAMA), 1, 4.0)
    with temporarily(Choices({(OP, "NVIDIA H200", key_of(LLAMA)): {64: choice_of(tile)}})):
        tiles = TunedTiles(LLAMA, 60, "NVIDIA H200")
        assert tiles.decode(shape_of(LLAMA), 1, 4.0) == tile != default
        assert tiles.decode(shape_of(LLAMA), 3, 4.0) == Tiles().decode(shape_of(LLAMA), 3, 4.0)
        without = shape_of(LLAMA, hopper=False)
        assert tiles.decode(without, 1, 4.0) == Tiles().decode(without, 1, 4.0)
        for geometry, rows, gpu in (
            (GEOMETRIES["MQA"], 60, "NVIDIA H200"),
            (LLAMA, 65, "NVIDIA H200"),
            (LLAMA, 60, "X1"),
        ):
            assert TunedTiles(geometry, rows, gpu).decode(shape_of(LLAMA), 1, 4.0) == default
    with temporarily(Choices({(OP, "NVIDIA H200", key_of(LLAMA)): {64: {"kernel": "hopper", "lanes": 3}}})):
        for _ in range(2):
            assert TunedTiles(LLAMA, 60, "NVIDIA H200").decode(shape_of(LLAMA), 1, 4.0) == default
    (line,) = caplog.messages
    assert line.startswith(f"a tuning table's choice of {OP} for 60 rows is not used: ") and "no 'lanes'" in line
