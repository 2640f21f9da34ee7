"""Products of routed experts as the tuner sees them, without a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="no Triton for this platform")

from dovetail.core.compose import compose
from dovetail.core.interfaces import PLAIN, Routing
from dovetail.core.interfaces.activation import Activation
from dovetail.core.ops.choices import Choices, temporarily
from dovetail.core.ops.compile_server import pack, unpack
from dovetail.core.ops.expert_choice import DOWN, UP, check_experts, choice_of, expert_key, tile_of
from dovetail.core.ops.expert_tiles import (
    ExpertTile,
    expert_tile,
    rows_of_tile,
    specialized_expert_tile,
    specialized_rows,
)
from dovetail.core.ops.experts import ExpertWeights, _without_blocks
from dovetail.core.ops.formats import encode
from dovetail.core.ops.kernels import experts as kernels
from dovetail.core.tuning.cache import CHECKS
from dovetail.core.tuning.experts import ExpertTunable, exact_sum, expert_tunables
from dovetail.core.tuning.gpu import Gpu
from dovetail.core.tuning.search import distinct
from dovetail.core.worker.build import tunables_without_weights
from dovetail.plugins.quant.fp8.format import FP8_TOKEN

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
QWEN, MIXTRAL, V3_RANK = (128, 2048, 768), (8, 4096, 14336), (32, 7168, 2048)
TILE = {"rows": 32, "outputs": 64, "inputs": 128, "warps": 4, "stages": 3}


def weights(experts: int, hidden: int, channels: int, dtype: torch.dtype = E4M3, block: Any = None) -> ExpertWeights:
    up, down = (experts, 2 * channels, hidden), (experts, hidden, channels)
    scales = [None, None]
    if dtype is E4M3:
        shapes = (up[:2], down[:2]) if block is None else [(e, o // 128, i // 128) for e, o, i in (up, down)]
        scales = [torch.empty(shape, device="meta") for shape in shapes]
    values = (torch.empty(shape, dtype=dtype, device="meta") for shape in (up, down))
    return ExpertWeights(*values, *scales, block)


def tunables(shape: tuple[int, int, int], tokens: int, active: int, dtype=E4M3, block=None) -> list[ExpertTunable]:
    fmt = FP8_TOKEN if dtype is E4M3 else PLAIN
    found = expert_tunables(weights(*shape, dtype, block), tokens, active, 0, fmt, BF16)
    for one in found:
        one._gpu = Gpu()
    return found


@pytest.mark.parametrize(("shape", "active"), [(QWEN, 8), (MIXTRAL, 2), (V3_RANK, 8)])
@pytest.mark.parametrize("tokens", [1, 8, 64, 256])
@pytest.mark.parametrize(("dtype", "block"), [(E4M3, None), (BF16, None), (E4M3, (128, 128))])
def test_candidates_can_be_launched_and_the_rule_is_first(shape, active, tokens, dtype, block):
    for tunable in tunables(shape, tokens, active, dtype, block):
        found = list(tunable.candidates())
        assert len(found) == len({tuple(sorted(one.items())) for one in found}) >= 1
        assert found[0] == choice_of(tunable._ruled(found[0]["rows"]))
        for choice in found:
            check_experts(tunable.key, tokens, choice)
            tile = tile_of(choice)
            assert tile.residents or tile.shared_bytes(dtype.itemsize, tunable.op == UP) <= Gpu().shared
            assert tile.rows in (tunable.tile_rows, 16, 32, 64, 128) and (tunable.sorts or tile.rows == 16)
            assert block is None or tile.inputs <= 128


def test_the_second_product_is_tuned_for_each_number_of_rows_of_the_first():
    up, *down = tunables(QWEN, 64, 8)
    rows = {choice["rows"] for choice in up.candidates()}
    assert {choice["rows"] for choice in islice(up.candidates(), 2)} == rows, "few candidates have each of them"
    assert rows == {one.tile_rows for one in down} == {16, 32} and rows_of_tile(512, 128) == 16
    assert [one.op for one in (up, *down)] == [UP, DOWN, DOWN]
    up, *down = tunables(MIXTRAL, 64, 2)
    assert {one.tile_rows for one in down} == {16, 32, 64} and specialized_rows(128, 8, 14336) == 64
    assert next(iter(up.candidates())) == choice_of(specialized_expert_tile(32, 1, Gpu().shared))
    up, *down = tunables(QWEN, 1, 8)
    assert {choice["rows"] for choice in up.candidates()} == {one.tile_rows for one in down} == {16}
    assert not tunables(QWEN, 63, 8), "63 tokens use the choice of 64"


@pytest.fixture
def on_an_h200(monkeypatch):
    """Rows and weights of a GPU, for the functions that choose."""
    facts = "NVIDIA H200", 132, True, 227 << 10
    monkeypatch.setattr(kernels, "device_facts", lambda device: facts)

    class Rows(torch.Tensor):
        device = torch.device("cuda", 0)

    return Activation(FP8_TOKEN, torch.empty(1, 4096, dtype=E4M3, device="meta").as_subclass(Rows))


def test_installed_choices_apply(on_an_h200):
    given, facts = weights(*MIXTRAL), ("fp8", 8, 2, 4096, 14336)
    ruled = before(64, on_an_h200, given)
    assert ruled[0].rows == 64
    up, down = dict(TILE), dict(TILE, stages=4)
    other = dict(TILE, rows=64, outputs=128)
    entries = {
        (UP, "NVIDIA H200", expert_key(*facts)): {64: up},
        (DOWN, "NVIDIA H200", expert_key(*facts, 32)): {64: down},
        (DOWN, "NVIDIA H200", expert_key(*facts, 64)): {64: other, 512: None},
    }
    with temporarily(Choices(entries)):
        order, tiles = kernels.tiles_for(60, 2, on_an_h200, given)
        assert order.rows == 32 and tiles == (tile_of(up), tile_of(down))
        # More tokens than the first product's entry: the rule applies, also in the second product's entry.
        assert kernels.tiles_for(100, 2, on_an_h200, given) == before(100, on_an_h200, given)
        # Rows that the caller gives.
        order, tiles = kernels.tiles_for(60, 2, on_an_h200, given, 64)
        assert order.rows == 64 and tiles == (ruled[1][0], tile_of(other))
        # One token: its pairs are not sorted, and each is a tile of 16 rows.
        assert kernels.tiles_for(1, 2, on_an_h200, given) == before(1, on_an_h200, given)


def before(tokens, x, given):
    with temporarily(Choices()):
        return kernels.tiles_for(tokens, 2, x, given)


def test_hoppers_kernel_is_not_taken_where_the_rule_does_not(on_an_h200):
    """Groups of 64 channels, which no box has."""
    facts, given = ("fp8_block", 8, 2, 4096, 14336), weights(*MIXTRAL, E4M3, (128, 64))
    tile = {"rows": 128, "outputs": 128, "inputs": 128, "warps": 8, "stages": 3, "residents": 1}
    check_experts(expert_key(*facts), 256, tile)
    with temporarily(Choices({(UP, "NVIDIA H200", expert_key(*facts)): {512: tile}})):
        order, (first, _) = kernels.tiles_for(256, 2, on_an_h200, given)
    assert order.rows == 128
    assert first == expert_tile(128, order.tiles, 14336, 4096, 1, True, 132, 227 << 10, 128) and not first.residents


@pytest.mark.parametrize(("tokens", "stages", "taken"), [(64, 0, True), (64, -1, False), (1, 0, False)])
def test_hoppers_kernel_is_not_taken_for_unsorted_pairs_or_with_another_ring(on_an_h200, tokens, stages, taken):
    """An entry for 64 tokens serves one token, too, whose pairs are tiles by themselves; and one of fewer stages could
    wait forever."""
    tile = specialized_expert_tile(16, 1, Gpu().shared)
    entry = choice_of(replace(tile, stages=tile.stages + stages))
    given, facts = weights(*MIXTRAL), ("fp8", 8, 2, 4096, 14336)
    check_experts(expert_key(*facts), 64, entry)
    entries = {(op, "NVIDIA H200", expert_key(*facts, *rows)): {64: entry} for op, rows in ((UP, ()), (DOWN, (16,)))}
    with temporarily(Choices(entries)):
        found = kernels.tiles_for(tokens, 2, on_an_h200, given)
    assert (found[1] == (tile, tile)) is taken
    assert taken or found == before(tokens, on_an_h200, given)


@pytest.mark.parametrize("of_f", [128, 64])
def test_a_block_of_inputs_has_one_scale(on_an_h200, of_f):
    """The second of four ranks begins inside a group of Qwen3-30B's channels, so that 64 of them share a scale. The
    tuner measures what the first rank has."""
    given = weights(128, 2048, 192, E4M3, (128, of_f))
    facts = "fp8_block", 128, 8, 2048, 192
    tile = dict(TILE, stages=2)
    entries = {
        (UP, "NVIDIA H200", expert_key(*facts)): {64: tile},
        (DOWN, "NVIDIA H200", expert_key(*facts, 32)): {64: tile},
    }
    with temporarily(Choices(entries)):
        _, (first, second) = kernels.tiles_for(64, 8, on_an_h200, given)
    assert first == tile_of(tile)
    assert of_f % second.inputs == 0 and (second == tile_of(tile)) is (of_f == 128)
    down = ExpertTunable(given, 64, 8, 0, FP8_TOKEN, BF16, tile_rows=32, gpu=Gpu())
    assert down.admits(tile) is (of_f == 128)


def test_entries_that_take_too_much_memory_are_not_used(on_an_h200):
    facts = "fp8", 8, 2, 4096, 14336
    tile = dict(TILE, outputs=256, inputs=512, stages=8)
    with temporarily(Choices({(UP, "NVIDIA H200", expert_key(*facts)): {64: tile}})):
        found = kernels.tiles_for(64, 2, on_an_h200, weights(*MIXTRAL))
    assert found == before(64, on_an_h200, weights(*MIXTRAL))


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"rows": 32}, "needs inputs, outputs, stages, warps"),
        ({**TILE, "rows": 48}, "rows is 48, not one of 16, 32, 64, 128"),
        ({**TILE, "split": 2}, "has no 'split'"),
        ({**TILE, "stages": True}, "stages is True"),
        ({**TILE, "warps": "4"}, "warps is '4'"),
        ({**TILE, "rows": 16}, "the key has tiles of 32 rows"),
    ],
)
def test_tables_are_checked(choice, message):
    with pytest.raises(ValueError, match=message):
        CHECKS[DOWN](expert_key("fp8", *QWEN[:1], 8, *QWEN[1:], 32), 64, choice)


@pytest.mark.parametrize(
    ("kind", "choice", "message"),
    [
        ("fp8_block", {"inputs": 256}, "inputs is 256; a tile of the kernel for Hopper has 128"),
        ("bf16", {}, "inputs is 128; a tile of the kernel for Hopper has 64"),
        ("fp8", {"outputs": 256}, "outputs is 256; a tile of 128 rows of the kernel for Hopper has 128"),
        ("int8", {"warps": 4}, "warps is 4; a tile of 128 rows of the kernel for Hopper has 8"),
        ("fp8_block", {"rows": 64}, "outputs is 128; a tile of 64 rows of the kernel for Hopper has 64"),
        (
            "fp8",
            {"rows": 16, "outputs": 64, "warps": 4},
            "residents is 1; a tile of 16 rows of the kernel for Hopper has 3",
        ),
    ],
)
def test_tiles_for_hopper_are_checked(kind, choice, message):
    tile = {"rows": 128, "outputs": 128, "inputs": 128, "warps": 8, "stages": 3, "residents": 1}
    check_experts(expert_key("fp8_block", *QWEN[:1], 8, *QWEN[1:]), 512, tile)
    with pytest.raises(ValueError, match=message):
        check_experts(expert_key(kind, *QWEN[:1], 8, *QWEN[1:]), 512, {**tile, **choice})


def test_keys_are_checked():
    with pytest.raises(ValueError, match="the key of a product of experts has active, channels"):
        check_experts((("experts", 8),), 16, TILE)
    with pytest.raises(ValueError, match="weight is 'fp4'; there are bf16, fp8, fp8_block, int8"):
        check_experts(expert_key("fp4", 8, 2, 64, 64), 16, TILE)


def test_another_process_gets_the_same_operation():
    """Tuning compiles in processes. Formats are compared by identity, and experts are larger than what one sends."""
    values = ExpertWeights(torch.empty(8, 256, 512, dtype=BF16), torch.empty(8, 512, 128, dtype=BF16))
    plain = expert_tunables(values, 64, 2, 0, PLAIN, BF16)
    for one in plain:
        one._gpu = Gpu()
    for sent in (*tunables(V3_RANK, 64, 8, block=(128, 128)), *plain):
        packed = pack(sent)
        got = unpack(packed)
        assert got.key == sent.key and list(got.candidates()) == list(sent.candidates())
        assert len(packed) < 1 << 14 and (got.fmt is PLAIN) is (sent.fmt is PLAIN)


@pytest.mark.parametrize("block", [None, (128, 128)])
def test_the_reference_has_the_scales_where_the_weights_are(block):
    given = weights(*QWEN, E4M3, block)
    assert {scale.device.type for scale in _without_blocks(given)} == {"meta"}


@pytest.mark.parametrize(("fmt", "block"), [(PLAIN, None), (FP8_TOKEN, None), (FP8_TOKEN, (128, 128))])
def test_the_exact_result_of_some_experts_at_a_time(fmt, block):
    given = weights(5, 256, 128, BF16 if fmt is PLAIN else E4M3, block)
    tensors = {name: getattr(given, name) for name in ("up", "down", "up_scale", "down_scale")}
    drawn = {name: (torch.rand(x.shape) + 0.1).to(x.dtype) for name, x in tensors.items() if x is not None}
    x = encode(torch.randn(7, 256, dtype=BF16), (fmt,))[fmt]
    routing = Routing(torch.rand(7, 5).argsort(1)[:, :3].int(), torch.rand(7, 3))
    whole, parts = (exact_sum(x, routing, replace(given, **drawn), fmt, most) for most in (1 << 20, 2 << 17))
    assert whole.any() and (whole - parts).norm() < 1e-5 * whole.norm()


def test_choices_are_tiles():
    for tile in (ExpertTile(32, 64, 128, 4, 3), ExpertTile(64, 64, 128, 4, 4, 2)):
        assert tile_of(choice_of(tile)) == tile


def test_a_model_lists_its_experts_with_shared_ones_among_them():
    composition = compose(["model=deepseek_v2_lite", "quant=fp8", "engine.dtype=bfloat16", "engine.max_len=1024"])
    found = distinct(tunables_without_weights(composition, torch.device("cpu"), [64]))
    (up,) = (one for one in found if one.op == UP)
    assert up.key == expert_key("fp8", 66, 8, 2048, 1408) and up.always == 2 and up.rows == 64
    assert {one.tile_rows for one in found if one.op == DOWN} == {16, 32}


@pytest.mark.parametrize("ep", [1, 2])
def test_experts_whose_rows_go_to_other_ranks_are_not_tuned(ep):
    """Their number of rows is not that of the step. A rank with some channels of each expert has all rows."""
    placed = [] if ep == 1 else ["experts=whole", "engine.ep=2"]
    words = ["model=qwen3_30b_a3b", "quant=fp8", "engine.dtype=bfloat16", "engine.max_len=1024", "engine.tp=2", *placed]
    found = distinct(tunables_without_weights(compose(words), torch.device("cpu"), [64]))
    ups = [dict(one.key) for one in found if one.op == UP]
    assert [key["channels"] for key in ups] == ([384] if ep == 1 else [])
