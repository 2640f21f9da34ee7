"""The matmul with a packed weight as the tuner sees it, without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dovetail.core.interfaces.weight import PackedWeight, WeightFormat
from dovetail.core.ops.choices import Choices, temporarily
from dovetail.core.ops.compile_server import pack, unpack
from dovetail.core.ops.packed_matmul import key_of, specializes
from dovetail.core.ops.packed_tiles import (
    MOST_DECODED_ROWS,
    MOST_EXACT_ROWS,
    OP,
    ROUNDED_TOKENS,
    check_packed,
    choose_packed,
    packed_key,
    packed_shared,
    packed_tile,
    rounded_base,
    rounded_tile,
    ruled_tile,
    specialized_tile,
)
from dovetail.core.ops.packing import by_group, empty_by_group, maps_groups, pack_scales, scales_of, words_of_row
from dovetail.core.ops.tile_choice import choice_of, tile_of
from dovetail.core.ops.weight_formats import BITSANDBYTES_FP4, E2M1, INT4, UINT4, UINT8
from dovetail.core.tuning.cache import CACHED, CHECKS
from dovetail.core.tuning.gpu import Gpu
from dovetail.core.tuning.packages import builtin_table
from dovetail.core.tuning.packed_matmul import PackedMatmulTunable, packed_tunables
from dovetail.core.tuning.startup import choices_of, predicted_table
from dovetail.core.tuning.table import Subject, TuningTable, merged
from dovetail.core.tuning.timing import GraphTimer


def weight(fmt: WeightFormat, group: int = 128, outputs: int = 4096, inputs: int = 4096) -> PackedWeight:
    codes = torch.empty(outputs, words_of_row(inputs, fmt.stored_bits), dtype=torch.int32, device="meta")
    groups = -(-inputs // group) if group else 1
    scale_OG = empty_by_group(outputs, groups, dtype=torch.bfloat16, device=torch.device("meta"))
    return PackedWeight(fmt, inputs, group, codes, scale_OG)


def by_output(packed: PackedWeight) -> PackedWeight:
    return replace(packed, scale=packed.scale.contiguous())


@pytest.mark.parametrize("fmt", [INT4, UINT8], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize(("rows", "e4m3"), [(1, False), (24, True), (100, False), (256, False)])
def test_candidates_can_be_launched(fmt, rows, e4m3):
    gpu = Gpu()
    tunable = PackedMatmulTunable(weight(fmt), rows, torch.bfloat16, e4m3=e4m3, gpu=gpu)
    found = list(tunable.candidates())
    assert len(found) >= 10 and all(tunable.admits(choice) for choice in found)
    for choice in found:
        check_packed(tunable.key, rows, choice)
        assert packed_shared(tile_of(choice), fmt.stored_bits, tunable.itemsize) <= gpu.shared
    facts = rows, 4096, 4096, fmt.stored_bits, tunable.itemsize, gpu.processors, gpu.shared
    assert found[0] == choice_of(specialized_tile(*facts)) == tunable.unlisted()
    # Three programs of an SM, which the rule does not pick; tiles of more tokens need their registers.
    assert (3 in {tile_of(choice).residents for choice in found}) is (rows <= 32)


@pytest.mark.parametrize("rows", [129, 256, 700])
def test_candidates_for_a_weight_that_many_rows_round(rows):
    """The kernel that rounds as it decodes, where it can; a library otherwise."""
    rounds = replace(weight(INT4, outputs=28672), rounded_scale=torch.empty(28672, device="meta"))
    for e4m3, gpu in ((True, Gpu()), (True, replace(Gpu(), hopper=False)), (False, Gpu())):
        tunable = PackedMatmulTunable(rounds, rows, torch.bfloat16, e4m3=e4m3, gpu=gpu)
        found = [tile_of(choice) for choice in tunable.candidates()]
        assert all(tunable.admits(choice_of(tile)) for tile in found)
        of_kernel = {tile.tokens == ROUNDED_TOKENS for tile in found}
        assert of_kernel == ({True} if e4m3 and gpu.hopper else set() if e4m3 else {False})
        if of_kernel == {True}:
            assert found[0] == rounded_tile(rows, 28672, 4096, gpu.processors) == tile_of(tunable.unlisted())


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(6144, 4096), (4096, 14336), (57344, 8192), (1024, 688), (200064, 4096)]
)
def test_hopper_has_a_tile_for_every_number_of_rows(outputs, inputs):
    gpu = Gpu()
    for rows, itemsize in [(1, 2), (3, 1), (33, 2), (65, 1), (256, 2), (100_000, 1)]:
        tile = specialized_tile(rows, outputs, inputs, 4, itemsize, gpu.processors, gpu.shared)
        key = packed_key("int4", 4, 128, outputs, inputs, itemsize)
        check_packed(key, rows, choice_of(tile))
        assert tile.residents * (packed_shared(tile, 4, itemsize) + 1024) <= 228 << 10


@pytest.mark.parametrize(
    ("itemsize", "rounds", "most"),
    # This one rounds in no kernel.
    [(2, False, MOST_DECODED_ROWS), (1, True, MOST_EXACT_ROWS), (1, False, None)],
    ids=["16 bits", "rounded E4M3", "exact E4M3"],
)
def test_many_rows_decode_the_whole_weight_for_the_library(itemsize, rounds, most):
    gpu = Gpu()
    how = 4096, 4096, 4, itemsize, gpu.processors, gpu.shared, 128, True, rounds
    if most is None:
        assert ruled_tile(100_000, *how) is not None
    else:
        assert ruled_tile(most, *how) is not None and ruled_tile(most + 1, *how) is None
    key = packed_key("int4", 4, 128, 4096, 4096, itemsize)
    facts = "A GPU", gpu.processors, gpu.shared, True, rounds
    with temporarily(Choices({(OP, "A GPU", key): {16: None}})):
        library = choose_packed(16, key, *facts) is None
        assert library == (most is not None), "an exact weight is not multiplied by the library in E4M3"


def test_installed_choices_apply():
    key = key_of(weight(INT4), 2)
    tile = {"tokens": 16, "outputs": 128, "inputs": 512, "split": 2}
    facts = ("a GPU", 132, 227 << 10)
    with temporarily(Choices({(OP, "a GPU", key): {16: tile, 64: None}})):
        assert choice_of(choose_packed(3, key, *facts)) == tile
        assert choose_packed(17, key, *facts) is None
        # Beyond the entries the rule applies.
        assert choose_packed(65, key, *facts) == packed_tile(65, 4096, 4096, 4, 2, *facts[1:])
        other = key_of(weight(INT4, group=64), 2)
        assert choose_packed(3, other, *facts) == packed_tile(3, 4096, 4096, 4, 2, *facts[1:])
        assert choose_packed(3, other, *facts, True) == specialized_tile(3, 4096, 4096, 4, 2, *facts[1:])
    hopper = {"tokens": 16, "outputs": 64, "inputs": 256, "tma": True, "residents": 2}
    with temporarily(Choices({(OP, "a GPU", key): {16: hopper}})):
        assert choice_of(choose_packed(3, key, *facts, True)) == hopper
        assert choose_packed(3, key, *facts) == packed_tile(3, 4096, 4096, 4, 2, *facts[1:])


def test_the_rule_for_many_rows_picks_the_quickest_way():
    """A tile of 256 tokens for some hundreds of rows, unless the matrix is small, and the library for thousands."""

    def ruled(rows, outputs, inputs):
        return ruled_tile(rows, outputs, inputs, 4, 1, 132, 227 << 10, 128, True, True, True)

    assert ruled(256, 57344, 8192) == rounded_tile(256, 57344, 8192, 132)
    assert ruled(256, 4096, 4096) == specialized_tile(256, 4096, 4096, 4, 1, 132, 227 << 10, 128)
    assert ruled(8192, 57344, 8192) is None


def test_entries_apply_to_a_weight_that_is_rounded_or_to_one_that_is_not():
    """Both have the same key."""
    key, shape = packed_key("uint4", 4, 128, 8192, 8192, 1), (8192, 8192)
    exact = specialized_tile(256, *shape, 4, 1, 132, 227 << 10, 128)
    rounded = replace(rounded_base(), split=2)
    assert rounded != rounded_tile(512, *shape, 132)
    for rows, entry, chosen in ((512, rounded, {True: rounded}), (512, exact, {False: exact}), (64, rounded, {})):
        with temporarily(Choices({(OP, "a GPU", key): {rows: choice_of(entry)}})):
            for rounds in (True, False):
                ruled = ruled_tile(rows, *shape, 4, 1, 132, 227 << 10, 128, True, rounds, rounds)
                got = choose_packed(rows, key, "a GPU", 132, 227 << 10, True, rounds, rounds)
                assert got == chosen.get(rounds, ruled)
    with temporarily(Choices({(OP, "a GPU", key): {512: choice_of(rounded)}})):
        # This one is rounded by the library alone.
        assert choose_packed(512, key, "a GPU", 132, 227 << 10, True, True, False) is None
    with pytest.raises(ValueError, match="a tile of 256 tokens is of rounded_packed"):
        check_packed(key, 256, choice_of(replace(rounded, outputs=64, warps=4)))


def test_a_search_times_the_default_as_a_table_would_choose_it():
    """Without an entry the rule picks a tile, where an entry without a choice means the library."""
    timer, key, facts = GraphTimer("a GPU", 1), key_of(weight(INT4), 2), ("a GPU", 132, 227 << 10, True)
    timer._tunable = PackedMatmulTunable(weight(INT4), 16, torch.bfloat16, gpu=Gpu())
    assert choose_packed(16, key, *facts) is not None
    with timer._choosing(None):
        assert choose_packed(16, key, *facts) is None
    tile = choice_of(specialized_tile(16, 4096, 4096, 4, 2, 132, 227 << 10)) | {"stages": 2}
    with timer._choosing(tile):
        assert choice_of(choose_packed(16, key, *facts)) == tile


def test_no_shipped_table_decodes_whole_weights_for_few_rows():
    """That moves five times the bytes of the codes."""
    entries = {at: choice for at, choice in builtin_table(CHECKS).flat().items() if at[0].op == OP}
    assert len(entries) > 200
    assert {(subject, rows) for (subject, rows), choice in entries.items() if choice is None and rows <= 64} == set()


def test_a_format_without_entries_takes_those_of_one_that_is_alike():
    facts, mine, other = ("a GPU", 132, 227 << 10), key_of(weight(INT4), 2), key_of(weight(UINT4), 2)
    tile, ours = ({"tokens": 16, "outputs": 128, "inputs": 512, "split": split} for split in (2, 4))
    ruled = packed_tile(17, 4096, 4096, 4, 2, *facts[1:])
    with temporarily(Choices({(OP, "a GPU", other): {16: tile}})):
        assert choice_of(choose_packed(3, mine, *facts)) == tile and choose_packed(17, mine, *facts) == ruled
    with temporarily(Choices({(OP, "a GPU", other): {64: tile}})):
        # A tile for so many rows would be slow with one.
        assert choose_packed(1, mine, *facts) == packed_tile(1, 4096, 4096, 4, 2, *facts[1:])
        assert choice_of(choose_packed(33, mine, *facts)) == tile
    with temporarily(Choices({(OP, "a GPU", other): {64: tile}, (OP, "a GPU", mine): {16: ours}})):
        assert choice_of(choose_packed(3, mine, *facts)) == ours and choose_packed(17, mine, *facts) == ruled
    with temporarily(Choices({(OP, "a GPU", mine): {16: ours}})):
        assert choose_packed(3, other, *facts) == packed_tile(3, 4096, 4096, 4, 2, *facts[1:])


@pytest.mark.parametrize("origin", [CACHED, "acme"])
def test_far_fewer_rows_than_the_least_entry_has_follow_the_rule(origin):
    """An entry of nothing would decode the whole weight for one row."""
    gpu, sizes = Gpu(), (1, 8, 32, 64)
    tunables = [PackedMatmulTunable(weight(INT4), rows, torch.bfloat16, gpu=gpu) for rows in sizes]
    tile = choice_of(specialized_tile(64, 4096, 4096, 4, 2, gpu.processors, gpu.shared)) | {"split": 1}
    known = TuningTable.of({(Subject(OP, gpu.name, tunables[0].key), 64): tile}, origin)
    # Those of an earlier engine in this process do not count.
    with temporarily(choices_of(TuningTable.of({(Subject(OP, gpu.name, tunables[0].key), 32): None}, origin))):
        predicted = predicted_table(tunables, known, gpu.name)
    facts = gpu.name, gpu.processors, gpu.shared, True
    with temporarily(choices_of(merged([known, predicted]))):
        found = [choose_packed(rows, tunables[0].key, *facts) for rows in (*sizes[:3], 33, 64)]
    ruled = [specialized_tile(rows, 4096, 4096, 4, 2, gpu.processors, gpu.shared) for rows in sizes[:3]]
    assert found == [*ruled, tile_of(tile), tile_of(tile)]


def test_a_search_compares_with_the_entry_of_a_format_that_is_alike():
    """That is what runs without entries of this format."""
    gpu = Gpu()
    mine, other = (PackedMatmulTunable(weight(fmt), 16, torch.bfloat16, gpu=gpu) for fmt in (INT4, UINT4))
    tile = {**(mine.unlisted() or {}), "stages": 2}
    with temporarily(Choices({(OP, gpu.name, other.key): {16: tile}})):
        assert mine.unlisted() == tile
    with temporarily(Choices({(OP, gpu.name, other.key): {16: None}})):
        assert mine.unlisted() is None


def test_weights_that_hoppers_kernel_cannot_read_go_to_the_kernel_for_all_gpus():
    assert specializes(weight(INT4), torch.bfloat16) and specializes(weight(INT4, group=0), torch.float8_e4m3fn)
    assert specializes(weight(UINT8), torch.bfloat16) and specializes(weight(INT4, group=16), torch.bfloat16)
    assert not specializes(weight(INT4), torch.float32) and not specializes(weight(BITSANDBYTES_FP4), torch.bfloat16)
    assert not specializes(weight(INT4, group=16), torch.float8_e4m3fn)
    assert not specializes(weight(INT4, group=8), torch.bfloat16)
    k_quant = replace(weight(UINT4, group=32), zero=weight(UINT4, group=32).scale.half())
    assert specializes(k_quant, torch.bfloat16) and not specializes(k_quant, torch.float8_e4m3fn)
    assert not specializes(weight(INT4, inputs=4100), torch.float16)
    # Tensor maps read scales whose outputs are next to each other.
    assert specializes(weight(INT4, outputs=40), torch.bfloat16) and specializes(weight(INT4, group=0), torch.bfloat16)
    assert not specializes(by_output(weight(INT4)), torch.bfloat16)
    # Each group has some of its own.
    shared = replace(weight(INT4), scale=torch.ones(4096, 1, dtype=torch.bfloat16, device="meta").expand(-1, 32))
    assert not specializes(shared, torch.bfloat16)
    # They begin at multiples of 16 bytes.
    grouped = by_group(torch.ones(64, 32, dtype=torch.bfloat16))
    for first in (0, 4, 8):
        part = replace(weight(INT4), scale=grouped[first:])
        assert specializes(part, torch.bfloat16) == (first != 4)


def test_trials_have_scales_in_the_order_of_the_weight():
    """With as many spare elements between rows: 40 outputs are no multiple of 16."""
    given = weight(UINT4, outputs=40, inputs=320, group=32)
    zero_OG = torch.empty(40, 10, dtype=torch.uint8, device="meta")
    grouped = replace(given, zero=by_group(zero_OG))
    words = replace(given, format=E2M1, scale=pack_scales(given.scale.to(torch.float8_e4m3fn)))
    choice = {"tokens": 16, "outputs": 64, "inputs": 256}
    kernels = set()
    for packed in (replace(by_output(given), zero=zero_OG), grouped, words):
        tunable = PackedMatmulTunable(packed, 1, torch.bfloat16, gpu=Gpu())
        found = tunable._random_weight(torch.device("cpu"))
        assert (found.scale.dtype, found.scale.shape, found.steps) == (
            packed.scale.dtype,
            packed.scale.shape,
            packed.steps,
        )
        assert maps_groups(found) == maps_groups(packed)
        scale_OG = scales_of(found).float()
        assert scale_OG.shape == (40, 10) and scale_OG.min() >= 0.5 and scale_OG.max() <= 1.5
        kernels.add(tunable.kernel(choice))
    assert len(kernels) == 3


def test_values_of_a_weight_are_not_sent_to_other_processes():
    scale, zero = by_group(torch.ones(40, 10)), by_group(torch.zeros(40, 10, dtype=torch.uint8))
    codes = torch.zeros(40, words_of_row(320, 4), dtype=torch.int32)
    given = PackedWeight(UINT4, 320, 32, codes, scale, zero)
    (sent,) = packed_tunables(given, 1, torch.bfloat16)
    got = unpack(pack(sent))
    assert got.packed.codes.is_meta and got.packed.scale.is_meta and got.packed.steps == given.steps
    assert maps_groups(got.packed) and got.packed.zero is not None and got.packed.zero.stride() == zero.stride()
    assert got.key == sent.key and got.nbytes == codes.nbytes + scale.nbytes


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"tokens": 16, "outputs": 64, "inputs": 128}, "128, not a multiple of the 256 codes"),
        ({"tokens": 16, "outputs": 64, "inputs": 256, "swap": False}, "has no 'swap'"),
        ({"tokens": 16, "outputs": 64, "inputs": 256, "warps": 8, "tma": True}, "warps=8 are not whole warp groups"),
        ({"tokens": 16, "outputs": 64, "inputs": 256, "warps": 3}, "warps=3"),
        ({"tokens": 16, "outputs": 512, "inputs": 256, "warps": 16, "tma": True}, "copies the scales of 256 at most"),
        ({"tokens": 16, "outputs": 16, "inputs": 256, "split": 2, "height": 1}, "has no 'height'"),
    ],
)
def test_tables_are_checked(choice, message):
    with pytest.raises(ValueError, match=message):
        CHECKS[OP](key_of(weight(INT4), 2), 16, choice)


def test_kept_weights_are_tuned_as_those_of_fp8_with_many_rows():
    scale_O, rounded_OI = (
        torch.empty(4096, device="meta"),
        torch.empty(4096, 4096, dtype=torch.float8_e4m3fn, device="meta"),
    )
    kept = replace(weight(INT4), rounded_scale=scale_O, rounded=rounded_OI)
    few, many = (packed_tunables(kept, rows, torch.bfloat16, e4m3=True)[0] for rows in (128, 129))
    assert (few.op, many.op) == ("packed_matmul", "matmul")
    assert few.packed.rounded is None, "values would be sent to the processes that compile"
    assert dict(many.key) == {"weight": "fp8", "outputs": 4096, "inputs": 4096}


def test_keys_are_checked_and_float32_is_not_tuned():
    with pytest.raises(ValueError, match="has format, bits"):
        check_packed((("outputs", 4096),), 16, {"tokens": 16, "outputs": 64, "inputs": 256})
    assert packed_tunables(weight(INT4), 1, torch.float32) == []
    assert len(packed_tunables(weight(INT4), 1, torch.bfloat16)) == 1


def test_another_process_gets_the_same_operation():
    """Tuning compiles in processes, which import decoders by name."""
    sent = PackedMatmulTunable(weight(INT4), 3, torch.bfloat16, gpu=Gpu())
    got = unpack(pack(sent))
    assert got.key == sent.key and list(got.candidates()) == list(sent.candidates())
    assert got.packed.format.decode is INT4.decode and got.packed.format.decode_words is INT4.decode_words
