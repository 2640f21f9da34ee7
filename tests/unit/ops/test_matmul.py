"""Choice between matmul kernel and library, and the result of the operation without a GPU."""

from __future__ import annotations

import sys
from itertools import product

import pytest
import torch

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces.weight import PackedWeight
from dovetail.core.ops.choices import Choices, temporarily
from dovetail.core.ops.decoded_matmul import decoded_matmul, decoding_tile
from dovetail.core.ops.matmul import matmul, matmul_reference, scaled_matmul, unscaled_matmul
from dovetail.core.ops.packed_matmul import packed_matmul, packed_rows
from dovetail.core.ops.packed_tiles import packed_tile
from dovetail.core.ops.packing import pack, unpack, words_of_row
from dovetail.core.ops.padding import empty_rows
from dovetail.core.ops.tile_choice import (
    BLOCK,
    FEW_ROWS,
    LIBRARY_ROWS,
    MOST_ROWS,
    OP,
    check_matmul,
    choice_of,
    choose,
    library_rows,
    many_rows_tile,
    matmul_key,
    runs,
)
from dovetail.core.ops.tiles import HOPPER_SHARED, MOST_SHARED_TILES, MatmulTile, specialized_tiles
from dovetail.core.ops.weight_formats import UINT4

from .shipped import SHIPPED, TILES


@pytest.fixture
def shipped():
    """Install the choices of the table that Dovetail ships."""
    with temporarily(SHIPPED):
        yield


@pytest.mark.parametrize("outputs", [64, 4096, 6144, 8192, 28672, 57344])
@pytest.mark.parametrize("processors", [84, 132, 160])
@pytest.mark.parametrize("rows", [1, 16, 17, 33, 64])
def test_rule_of_unmeasured_shapes(rows, outputs, processors):
    tile = choose(rows, outputs, 5120, "fp8", "a GPU", processors)
    t_tiles, tiles, _, programs = tile.launch(rows, outputs, 5120)
    assert t_tiles == 1 and tile.tokens >= rows
    assert tile.split == 1 or (programs <= processors and tiles <= MOST_SHARED_TILES)


def test_other_matmuls_go_to_the_library():
    assert choose(MOST_ROWS + 1, 4096, 4096, "fp8", "a GPU", 132) is None
    assert choose(1, 4096, 4096, "bf16", "a GPU", 132) is None
    # The kernel computes program ranges with 32-bit multiplications.
    assert choose(1, 262144, 16384, "fp8", "a GPU", 132) is None
    assert choose(1, 262144, 8192, "fp8", "a GPU", 132) is not None


SHAPES = ((64, 64), (2112, 7168), (6144, 4096), (28672, 4096), (4096, 14336), (152064, 3584))


@pytest.mark.parametrize("kind", ["fp8_block", "int8"])
@pytest.mark.parametrize("processors", [78, 132])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_rule_of_many_rows(kind, outputs, inputs, processors):
    """Every number of rows has a tile that can be launched and leaves no more SMs idle than it must."""
    for rows in (65, 80, 128, 129, 200, 256, 257, 512, 1000, 4096, 8192):
        tile = choose(rows, outputs, inputs, kind, "a GPU", processors)
        assert tile.specialized and tile.shared_bytes(1) <= HOPPER_SHARED
        _, tiles, blocks, programs = tile.launch(rows, outputs, inputs)
        assert tile.counters(rows, outputs, inputs) <= MOST_SHARED_TILES and programs <= processors
        smallest = ceil_div(rows, 64) * ceil_div(outputs, 64)
        assert programs >= min(processors // 3, smallest, smallest * blocks)
        assert runs(tile, kind)


def test_other_gpus_multiply_many_rows_too():
    for shared in (99 << 10, 163 << 10):
        tile = choose(300, 4096, 4096, "fp8_block", "a GPU", 128, prefetch=False, shared=shared)
        assert not tile.needs_hopper and tile.inputs <= BLOCK and tile.shared_bytes(1) <= shared
    assert choose(300, 4096, 4096, "int8", "a GPU", 128, prefetch=False) is None


@pytest.mark.parametrize("processors", [78, 132])
@pytest.mark.parametrize(("outputs", "inputs"), [*SHAPES, (200, 384)])
def test_rule_of_blocks_and_few_rows(outputs, inputs, processors):
    for rows in (1, 16, 17, 32, 33, 64):
        tile = choose(rows, outputs, inputs, "fp8_block", "a GPU", processors)
        _, tiles, blocks, programs = tile.launch(rows, outputs, inputs)
        assert tile.tokens >= rows and tile.specialized == (rows > FEW_ROWS) and runs(tile, "fp8_block")
        assert tile.shared_bytes(1) <= HOPPER_SHARED and tile.counters(rows, outputs, inputs) <= MOST_SHARED_TILES
        # Without so many tiles that every SM has several, the weight is prefetched, by programs on all SMs.
        few = tiles <= 2 * processors and inputs >= 2 * BLOCK
        assert (tile.prefetch > 0) == (few and rows <= FEW_ROWS)
        if tile.prefetch:
            assert (
                tile.split <= blocks
                and (tile.split > 1) == (3 * tiles <= processors and blocks > 3)
                and programs <= 2 * processors
            )
        other = choose(rows, outputs, inputs, "fp8_block", "a GPU", processors, prefetch=False)
        assert not other.needs_hopper and other.inputs <= BLOCK


def test_entries_of_kinds_without_a_library():
    """An entry that says that the default is fastest leaves the rule's tile. Tiles of other kernels are refused."""
    key = matmul_key("int8", 4096, 4096)
    ruled = choose(100, 4096, 4096, "int8", "a GPU", 132)
    wide = choice_of(MatmulTile(128, 256, 128, stages=4, split=2, specialized=True))
    own = MatmulTile(64, 64, 128, stages=5, specialized=True)
    for entry, expected in ((None, ruled), (choice_of(own), own)):
        with temporarily(Choices({(OP, "a GPU", key): {128: entry}})):
            assert choose(100, 4096, 4096, "int8", "a GPU", 132) == expected
    with pytest.raises(ValueError, match="the kernels for int8 cannot run this tile"):
        check_matmul(key, 128, wide)


def test_the_library_multiplies_more_rows_where_an_entry_says_so():
    """An entry serves all numbers of rows down to the next smaller one, but not those of which it is a multiple."""
    tile = choice_of(MatmulTile(128, 128, 64))
    entries = {64: {LIBRARY_ROWS: 128}, 256: tile, 448: {LIBRARY_ROWS: 512}, 512: None}
    with temporarily(Choices({(OP, "a GPU", matmul_key("bf16", 4096, 4096)): entries})):
        shape = 4096, 4096, "bf16", "a GPU"
        tiles = {rows: choose(rows, *shape, 132) for rows in (48, 64, 256, 257, 448, 512)}
        assert tiles[256] == MatmulTile(128, 128, 64) and not any(t for rows, t in tiles.items() if rows != 256)
        found = {rows: library_rows(rows, *shape) for rows in (1, 63, 64, 65, 256, 257, 448, 449, 512, 600)}
        assert found == {rows: {64: 128, 257: 512, 448: 512}.get(rows, rows) for rows in found}
        assert library_rows(448, 4096, 4096, "fp8", "a GPU") == library_rows(448, 4096, 4096, "bf16", "B") == 448


class OnGpu(torch.Tensor):
    """A tensor on the CPU that operations take to be on a GPU."""

    is_cuda = property(lambda self: True)


@pytest.fixture
def padded_to_96(monkeypatch):
    """Let the library multiply 96 rows for 49 to 80, with weights [32, 64] on a GPU that the CPU emulates."""
    module = sys.modules[matmul.__module__]
    monkeypatch.setattr(module, "device_facts", lambda device: ("a GPU", 132, False, HOPPER_SHARED))
    monkeypatch.setattr(module, "_gpu_name", lambda device: "a GPU")
    with temporarily(
        Choices({(OP, "a GPU", matmul_key(kind, 32, 64)): {80: {LIBRARY_ROWS: 96}} for kind in ("bf16", "fp8")})
    ):
        yield


def rows_on_gpu(rows, columns, dtype, room):
    """Return random rows, with NaN in the memory behind them if there is `room`."""
    x_TC = (empty_rows if room else torch.empty)(rows, columns, dtype=dtype, device=torch.device("cpu"))
    whole = torch.empty(0, dtype=dtype).set_(x_TC.untyped_storage())
    whole.copy_(torch.full((len(whole),), torch.nan))
    x_TC.copy_(torch.rand(rows, columns) + 0.5)
    return x_TC.as_subclass(OnGpu)


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize("rows", [80, 66, 47])
def test_more_rows_change_nothing_in_those_that_there_are(padded_to_96, room, rows):
    """47 rows would be more than doubled, and have fewer in memory."""
    torch.seed()
    counts, wide = torch.zeros(MOST_SHARED_TILES, dtype=torch.int32), 96 if rows > 48 else rows
    bias_O, scale_O = torch.randn(32).bfloat16(), torch.rand(32) + 0.5
    x_TI, weight_OI = rows_on_gpu(rows, 64, torch.bfloat16, room), torch.randn(32, 64).bfloat16()
    x8_TI, weight8_OI = rows_on_gpu(rows, 64, torch.float8_e4m3fn, room), weight_OI.to(torch.float8_e4m3fn)
    x_scale_T1 = rows_on_gpu(rows, 1, torch.float32, room)
    scales = x_scale_T1, scale_O, bias_O
    products = {"plain": (matmul(x_TI, weight_OI, bias_O, counts), (x_TI, weight_OI, None, None, bias_O))}
    for dtype in (torch.bfloat16, torch.float16):
        products[f"scaled, {dtype}"] = (
            scaled_matmul(x8_TI, weight8_OI, *scales, dtype, counts),
            (x8_TI, weight8_OI, *scales),
        )
    if (unscaled := unscaled_matmul(x8_TI, weight8_OI, torch.ones(1))) is not None:
        products["unscaled"] = unscaled, (x8_TI, weight8_OI)
    assert len(products) == 4 - (rows <= MOST_ROWS)
    for name, (got_TO, operands) in products.items():
        expected = matmul_reference(*operands, dtype=torch.float32).as_subclass(torch.Tensor)
        error = (got_TO.as_subclass(torch.Tensor).float() - expected).norm() / expected.norm()
        assert got_TO.shape == (rows, 32) and error < 5e-3, name
        held = got_TO.untyped_storage().nbytes() // got_TO.element_size() // 32
        assert held == (rows if "float16" in name and "bfloat16" not in name else wide), f"{name}: rows of the library"


def test_prompts_of_any_length_need_few_choices():
    """Half a millisecond each would delay the launch of every prompt."""
    many_rows_tile.cache_clear()
    tiles = {rows: choose(rows, 6144, 4096, "fp8_block", "a GPU", 132) for rows in range(129, 705)}
    assert many_rows_tile.cache_info().misses == 9
    assert len({(-(-rows // 64), tile) for rows, tile in tiles.items()}) == 9


def test_prefetching_tiles_are_used_only_where_their_kernel_runs(shipped):
    early = [(key, most) for key, rows in TILES.items() for most, tile in rows.items() if tile and tile.prefetch]
    kinds = {key[1] for key, _ in early}
    assert kinds == {"fp8", "bf16"}
    for (device, kind, outputs, inputs), most in early:
        tile = choose(most, outputs, inputs, kind, device, 132, prefetch=False)
        if kind == "bf16" or most > MOST_ROWS:
            assert tile is None
        else:
            assert tile == choose(most, outputs, inputs, kind, "a GPU", 132) and not tile.prefetch


@pytest.mark.parametrize("key", TILES, ids=str)
def test_measured_tiles_can_be_launched(key, shipped):
    device, kind, outputs, inputs = key
    itemsize = {"bf16": 2, "fp8": 1}[kind]
    assert list(TILES[key]) == sorted(TILES[key])
    for most, tile in TILES[key].items():
        assert choose(most, outputs, inputs, kind, device, 132) == tile
        if tile is None:
            continue
        assert tile.counters(most, outputs, inputs) <= MOST_SHARED_TILES
        assert not (tile.tma or tile.needs_hopper) or inputs * itemsize % 16 == 0
        if tile.prefetch:
            rings = (tile.outputs * tile.prefetch + tile.tokens * tile.stages) * tile.inputs * itemsize
            # The kernel of a boundary must fit on the SM as well.
            assert rings <= 208 << 10 and tile.inputs * itemsize in (128, 256, 512)
            assert tile.warps == tile.outputs // 16, "a warp group multiplies 64 rows of the weight"
    beyond = max(TILES[key], default=0) + 1
    assert choose(beyond, outputs, inputs, kind, device, 132) is None


def test_reference_on_the_cpu():
    torch.seed()
    x_TI, weight_OI = (torch.randn(n, 32).to(torch.float8_e4m3fn) for n in (3, 16))
    x_scale_T1, weight_scale_O, bias_O = torch.rand(3, 1) + 0.5, torch.rand(16) + 0.5, torch.randn(16)
    counts = torch.zeros(MOST_SHARED_TILES, dtype=torch.int32)
    got = scaled_matmul(x_TI, weight_OI, x_scale_T1, weight_scale_O, bias_O, torch.float32, counts)
    scaled = (x_TI.double() * x_scale_T1) @ (weight_OI.double() * weight_scale_O[:, None]).t() + bias_O
    torch.testing.assert_close(got, scaled.float())
    plain = matmul(x_TI.float(), weight_OI.float(), bias_O)
    torch.testing.assert_close(plain, (x_TI.double() @ weight_OI.double().t() + bias_O).float())


def test_a_weight_is_decoded_to_memory_for_many_rows():
    assert decoding_tile(128, 4096, 4096, 108, 163 << 10) is not None
    assert decoding_tile(129, 4096, 4096, 108, 163 << 10) is None
    assert decoding_tile(0, 4096, 4096, 108, 163 << 10) is None


def test_an_fp8_weight_and_a_plain_input_on_the_cpu():
    x_TI, weight_OI = torch.randn(3, 40), torch.randn(17, 40).to(torch.float8_e4m3fn)
    scale_O, bias_O = torch.rand(17) + 0.5, torch.randn(17)
    got = decoded_matmul(x_TI, weight_OI, scale_O, bias_O, torch.zeros(MOST_SHARED_TILES, dtype=torch.int32))
    expected = x_TI.double() @ (weight_OI.double() * scale_O[:, None]).t() + bias_O
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("bits", "words"), [(4, 96), (8, 192)])
def test_codes_are_packed_by_strips(bits, words):
    """Code j of word w of a block is input 32 j + w."""
    codes_OI = torch.randint(2**bits, (3, 688), dtype=torch.uint8)
    packed = pack(codes_OI, bits)
    assert packed.shape == (3, words) and words_of_row(688, bits) == words
    assert torch.equal(unpack(packed, bits, 688), codes_OI)
    j, w = 2, 5
    assert torch.equal(packed[:, w] >> j * bits & 2**bits - 1, codes_OI[:, 32 * j + w].int())


def test_a_packed_weight_on_the_cpu():
    x_TI, codes_OI = torch.randn(3, 40), torch.randint(16, (17, 40), dtype=torch.uint8)
    scale_OG, zero_OG = torch.rand(17, 3) + 0.5, torch.randint(16, (17, 3), dtype=torch.uint8)
    row_scale_O, bias_O, x_scale_T1 = torch.rand(17) + 0.5, torch.randn(17), torch.rand(3, 1) + 0.5
    packed = PackedWeight(UINT4, 40, 16, pack(codes_OI, 4), scale_OG, zero_OG, row_scale_O)
    spread = torch.arange(40) // 16
    weight_OI = (codes_OI.double() - zero_OG[:, spread]) * scale_OG[:, spread] * row_scale_O[:, None]
    got = packed_matmul(x_TI, packed, bias_O, torch.float32, x_scale_T1)
    torch.testing.assert_close(got, (x_TI.double() @ weight_OI.t() * x_scale_T1 + bias_O).float(), atol=1e-4, rtol=1e-4)
    ids_T = torch.tensor([5, 0, 5])
    torch.testing.assert_close(packed_rows(packed, ids_T, torch.float32), weight_OI[ids_T].float())


def test_a_packed_weight_is_decoded_to_memory_for_many_rows():
    facts = dict(bits=4, itemsize=2, processors=108, shared=163 << 10)
    assert packed_tile(128, 4096, 4096, **facts) is not None
    assert packed_tile(129, 4096, 4096, **facts) is None and packed_tile(0, 4096, 4096, **facts) is None


def test_specialized_tiles_fit():
    for rows, itemsize, shared in product((1, 64, 65, 190, 256, 512), (1, 2), (HOPPER_SHARED, 163 << 10)):
        tiles = list(specialized_tiles(rows, itemsize, shared))
        assert len(tiles) == len(set(tiles)) >= 4
        for tile in tiles:
            assert tile.shared_bytes(itemsize) <= shared and 2 <= tile.stages <= 8
            assert tile.tokens % 64 == 0 and tile.tokens <= min(192, max(64, rows + 63))
