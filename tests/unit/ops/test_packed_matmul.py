"""The kernels for packed weights against float64, with random codes, scales and inputs.

They run compiled on a GPU, or in Triton's interpreter (tests/test_in_interpreter.py)."""

from __future__ import annotations

import dataclasses
import os
from itertools import product

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("kernels need a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from dovetail.core.interfaces.weight import PackedWeight, WeightFormat  # noqa: E402
from dovetail.core.ops.formats import sums_of  # noqa: E402
from dovetail.core.ops.kernels.packed_matmul import packed_matmul_triton  # noqa: E402
from dovetail.core.ops.kernels.packed_rows import packed_rows_triton  # noqa: E402
from dovetail.core.ops.packed_matmul import multiplies_e4m3, packed_matmul, round_weight, sums_for  # noqa: E402
from dovetail.core.ops.packed_tiles import MOST_EXACT_ROWS, rounded_tiles, specialized_tiles  # noqa: E402
from dovetail.core.ops.packing import dequantize, pack, pack_scales, rounded, scales_to_round, unpack  # noqa: E402
from dovetail.core.ops.tiles import HOPPER_SHARED, MOST_SHARED_TILES, MatmulTile  # noqa: E402
from dovetail.core.ops.weight_formats import BITSANDBYTES_FP4, E2M1, E4M3, INT4, INT6, INT8, NF4, UINT4, UINT8  # noqa: E402
from dovetail.core.testing.interpreter import mend_interpreter  # noqa: E402

from .memory_orders import as_kept, by_group  # noqa: E402

if INTERPRETED:
    mend_interpreter()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
FORMATS = (UINT4, INT4, INT6, UINT8, INT8, E2M1, NF4, E4M3, BITSANDBYTES_FP4)
FP8, FP16, FP32 = torch.float8_e4m3fn, torch.float16, torch.float32
# The interpreter truncates float32 to bfloat16 instead of rounding, so float16 replaces it there.
WIDE = FP16 if INTERPRETED else torch.bfloat16
TILES = (MatmulTile(16, 64, 256), MatmulTile(32, 32, 512, split=2), MatmulTile(64, 32, 256, programs=5))
EVERYTHING = os.environ.get("DOVETAIL_KERNELS") == "all"


@pytest.fixture(autouse=True)
def fresh_random_and_poison():
    """Use torch's deterministic mode, which fills new tensors with NaN, to expose missing writes."""
    torch.seed()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def packed(
    fmt: WeightFormat, outputs: int, inputs: int, group: int, scale: torch.dtype = FP16, rows: bool = False
) -> PackedWeight:
    """Random codes, with scales and zeros as PackedLinear keeps them."""
    return as_kept(drawn(fmt, outputs, inputs, group, scale, rows))


def drawn(
    fmt: WeightFormat, outputs: int, inputs: int, group: int, scale: torch.dtype, rows: bool = False
) -> PackedWeight:
    """The same, with the scales of an output next to each other in memory."""
    codes_OI = torch.randint(2**fmt.bits, (outputs, inputs), dtype=torch.uint8, device=DEVICE)
    if fmt is E4M3:
        codes_OI[codes_OI & 0x7F == 0x7F] = 0x7E  # no NaN
    groups = -(-inputs // group) if group else 1
    return PackedWeight(
        fmt,
        inputs,
        group,
        pack(codes_OI, fmt.stored_bits),
        (torch.rand(outputs, groups, device=DEVICE) + 0.5).to(scale),
        torch.randint(2**fmt.bits, (outputs, groups), dtype=torch.uint8, device=DEVICE) if fmt.zero else None,
        torch.rand(outputs, device=DEVICE) + 0.5 if rows else None,
    )


def exact(x_TI, weight: PackedWeight, bias_O, x_scale_T1) -> torch.Tensor:
    y_TO = x_TI.double() @ dequantize(weight).double().t()
    y_TO = y_TO if x_scale_T1 is None else y_TO * x_scale_T1
    return y_TO if bias_O is None else y_TO + bias_O


def assert_multiplies(weight: PackedWeight, rows: int, tile: MatmulTile, dtype: torch.dtype) -> None:
    """In E4M3 with sums of x in memory, too. Zeros and shifts are subtracted from sums far from zero. With a codebook
    these would add up the errors of its rounded values."""
    away = rows % 2 if weight.format.shifted or weight.format.zero else 0
    x_TI = (torch.randn(rows, weight.inputs, device=DEVICE) + away).to(dtype)
    bias_O = torch.randn(len(weight.codes), device=DEVICE).to(WIDE) if rows % 2 else None
    x_scale_T1 = torch.rand(rows, 1, device=DEVICE) + 0.5 if dtype is FP8 else None
    counts = torch.zeros(256, dtype=torch.int32, device=DEVICE)
    expected = exact(x_TI, weight, bias_O, x_scale_T1)
    sums = sums_for(weight) if dtype is FP8 and tile.tma else None
    for sums_TS in (None, sums_of(x_TI, sums.columns)) if sums else (None,):
        got = packed_matmul_triton(x_TI, weight, tile, counts, bias_O, x_scale_T1, FP32, sums_TS)
        # Products of 16 bits with scales, and codebooks, round weights to x's dtype.
        error = (got.double() - expected).norm() / expected.norm()
        assert error < (1e-3 if WIDE is FP16 else 5e-3), f"relative error {error:.2e}"  # NaN fails too
        assert not counts.any()


if not INTERPRETED and torch.cuda.get_device_capability() == (9, 0):
    # Hopper's kernel is in Gluon, which has no interpreter.
    SPECIALIZED = {
        (t.tokens, t.warps, t.residents, t.inputs, bool(t.programs), t.split > 1, itemsize, bits): t
        for rows in (8, 16, 32, 64, 128)
        for itemsize, bits in product((1, 2), (4, 8))
        for t in specialized_tiles(rows, 4096, 4096, bits, itemsize, 7, HOPPER_SHARED)
    }

    @pytest.mark.parametrize("case", SPECIALIZED, ids=lambda case: "-".join(map(str, case)))
    def test_specialized_tiles(case):
        """Sizes that tiles do not divide, fewer blocks than places, more rows than a tile has, tiles in parts."""
        tile, (*_, itemsize, bits) = SPECIALIZED[case], case
        start = list(SPECIALIZED).index(case)
        formats = (INT4, UINT4, E2M1, NF4) if bits == 4 else (E4M3, UINT8, INT8, INT6)
        for n, (fmt, group, inputs) in enumerate(product(formats, (16, 32, 128, 0), (688, 4096))):
            narrow = itemsize == 1 and not (fmt.e4m3 and group != 16)
            if narrow or ((n - start) % 8 and not EVERYTHING):
                continue
            scale = (FP32, FP16, torch.bfloat16, FP8)[n % 4]
            weight = packed(fmt, (200, 72, 1280)[n % 3], inputs, group, scale, rows=n % 2 == 0)
            rows = (1, tile.tokens - 1, 2 * tile.tokens + 3)[(n + tile.tokens) % 3]
            assert_multiplies(weight, rows, tile, FP8 if itemsize == 1 else WIDE)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, FP16])
    @pytest.mark.parametrize(("fmt", "group"), [(UINT4, 32), (UINT8, 32), (UINT4, 16), (UINT4, 128), (UINT4, 0)])
    @pytest.mark.parametrize("rows", [1, 11, 40, 131])
    def test_zeros_that_are_no_integers(rows, fmt, group, dtype):
        """Minimums of GGUF's blocks, far from zero, too."""
        sizes = min(rows, 128), 200, 1344, fmt.stored_bits
        for n, tile in enumerate(specialized_tiles(*sizes, 2, 7, HOPPER_SHARED, group)):
            if n % 15 == rows % 15 or EVERYTHING:
                weight = drawn(fmt, 200, 1344, group, (FP16, FP32)[n % 2])
                zero = (torch.rand(weight.scale.shape, device=DEVICE) * (40, 12)[n % 2]).half()
                assert_multiplies(as_kept(dataclasses.replace(weight, zero=zero)), rows, tile, dtype)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, FP16])
    @pytest.mark.parametrize(("rows", "inputs"), [(1, 4096), (9, 704), (40, 680), (70, 2048), (200, 1088)])
    def test_scales_of_nvfp4(rows, inputs, dtype):
        """All positive scales, subnormal ones and 0 among them, four of which are decoded together if they are in
        words. 680 inputs have 43 groups."""
        weight = drawn(E2M1, 200, inputs, 16, FP8, rows=True)
        scale = torch.randint(0x7F, weight.scale.shape, dtype=torch.uint8, device=DEVICE).view(FP8)
        weight = dataclasses.replace(weight, scale=scale)
        for tile in specialized_tiles(rows, 200, inputs, 4, 2, 7, HOPPER_SHARED, 16):
            assert_multiplies(as_kept(weight), rows, tile, dtype)
            assert_multiplies(by_group(weight), rows, tile, dtype)

    @pytest.mark.parametrize(("group", "inputs"), [(96, 1088), (384, 1344), (512, 1536), (160, 4096), (0, 704)])
    @pytest.mark.parametrize("scale", [torch.bfloat16, FP8])
    def test_groups_that_blocks_cut(group, inputs, scale):
        """Groups, and words of four of them, that end within blocks, or last for several."""
        for fmt, (itemsize, rows) in product((INT4, UINT4), ((1, 24), (1, 70), (2, 24))):
            for n, tile in enumerate(specialized_tiles(rows, 200, inputs, 4, itemsize, 7, HOPPER_SHARED, group)):
                if n % 5 == 0 or EVERYTHING:
                    weight = packed(fmt, 200, inputs, group, scale)
                    assert_multiplies(weight, rows, tile, FP8 if itemsize == 1 else WIDE)

    @pytest.mark.parametrize("rows", [1, 129, 256, 700])
    @pytest.mark.parametrize(("group", "inputs"), [(32, 4096), (128, 688), (96, 1344), (0, 1536), (384, 8192)])
    def test_weights_rounded_by_the_kernel(rows, group, inputs):
        """Sizes that tiles do not divide, groups that end within blocks, tiles in parts, a row of zeros, and rows whose
        scales are extreme. Bits are equal from run to run."""
        for n, fmt in enumerate((UINT4, INT4, E2M1, NF4)):
            if (n + rows + group // 32) % 2 and not EVERYTHING:
                continue
            outputs = (200, 72, 1280)[n % 3]
            weight = drawn(fmt, outputs, inputs, group, (FP32, FP16, torch.bfloat16, FP8)[n % 4], rows=n % 2 == 0)
            scale = (weight.scale.float() * 30 ** torch.rand_like(weight.scale.float())).to(weight.scale.dtype)
            scale[3] = 0.0
            if weight.row_scale is not None:
                weight.row_scale[3:6] = torch.tensor([1e30, 1e-30, 1e20])
            weight = dataclasses.replace(weight, scale=scale)
            weight = dataclasses.replace(weight, rounded_scale=scales_to_round(weight))
            weight_OI = as_rounded(weight).double()
            assert (weight_OI - rounded(weight).double()).norm() < 2e-2 * weight_OI.norm()
            weight, counts = as_kept(weight), torch.zeros(MOST_SHARED_TILES, dtype=torch.int32, device=DEVICE)
            x_TI, x_scale_T1 = (
                torch.randn(rows, inputs, device=DEVICE).to(FP8),
                torch.rand(rows, 1, device=DEVICE) + 0.5,
            )
            expected = (x_TI.double() @ weight_OI.t()) * x_scale_T1 * weight.rounded_scale
            size_O = (x_TI.double() * x_scale_T1).norm() * weight_OI.norm(dim=1) * weight.rounded_scale / inputs**0.5
            bias_O = torch.randn(outputs, device=DEVICE) if n // 2 else None
            for tile in rounded_tiles(rows, outputs, inputs, 7):
                how = x_TI, weight, tile, counts, bias_O, x_scale_T1, FP32
                got = packed_matmul_triton(*how)
                assert not counts.any() and torch.equal(got, packed_matmul_triton(*how))
                got = got if bias_O is None else got - bias_O
                # Tensor cores add up products in E4M3 with 14 bits.
                error = (got - expected).norm(dim=0) / size_O.clamp(min=1e-38)
                assert error.max() < (5e-3 if rows > 1 else 3e-2), f"relative error {error.max():.2e}"  # NaN fails too
                assert not got[:, 3].any()

    def as_rounded(weight: PackedWeight) -> torch.Tensor:
        """Return the matrix in E4M3 as rounded_packed decodes it, by way of float16."""
        values_OI = weight.format.reference(unpack(weight.codes, weight.format.stored_bits, weight.inputs))
        scale_OG = weight.scale.float() * (1.0 if weight.row_scale is None else weight.row_scale[:, None])
        ratio_OG = (scale_OG * (1 / weight.rounded_scale)[:, None]).half()
        group = weight.group or weight.inputs
        ratio_OI, zero_OI = ratio_OG.repeat_interleave(group, 1), 0.0
        if weight.zero is not None:
            zero_OI = weight.zero.float().repeat_interleave(group, 1)[:, : weight.inputs]
        return ((values_OI - zero_OI).half() * ratio_OI[:, : weight.inputs]).to(FP8)

    def test_hoppers_kernel_refuses_scales_in_another_order():
        weight = drawn(INT4, 200, 4096, 128, FP16)
        tile = next(specialized_tiles(8, 200, 4096, 4, 2, 7, HOPPER_SHARED, 128))
        with pytest.raises(ValueError, match="strides \\(32, 1\\): the kernel for Hopper reads"):
            packed_matmul_triton(torch.randn(8, 4096, device=DEVICE, dtype=WIDE), weight, tile, None)


SHAPES = ((16, 3, 300), (32, 1, 300), (64, 17, 688), (128, 64, 256), (0, 130, 260), (8, 5, 260))
"""Groups, rows and inputs. Two of them for each format; all of them if DOVETAIL_KERNELS=all."""
CASES = [
    (fmt, *shape, TILES[(n + m) % len(TILES)])
    for (n, fmt), (m, shape) in product(enumerate(FORMATS), enumerate(SHAPES))
    if (m - n) % len(SHAPES) < 2 or EVERYTHING
]


@pytest.mark.parametrize(
    ("fmt", "group", "rows", "inputs", "tile"), CASES, ids=lambda case: getattr(case, "name", None)
)
def test_16_bit_inputs(fmt, group, rows, inputs, tile):
    scale = (FP32, FP16, FP8)[rows % 3]
    assert_multiplies(packed(fmt, 40, inputs, group, scale, rows=rows % 2 == 0), rows, tile, WIDE)


@pytest.mark.parametrize(
    ("fmt", "group", "scale"),
    [
        *((UINT4, 32, FP16), (INT6, 16, FP32), (INT4, 0, FP16)),
        # Words of four scales, with 38 groups, with four groups in a strip, and with one group.
        *((E2M1, 16, FP8), (NF4, 8, FP8), (INT8, 0, FP8)),
        (UINT4, 64, FP8),
    ],
)
def test_scales_are_in_any_order_in_memory(fmt, group, scale):
    weight = drawn(fmt, 20, 600, group, scale)
    grouped, kept = by_group(weight), as_kept(weight)
    assert kept.steps[0] == 1 and (kept.scale.dtype is torch.int32) == (scale is FP8 and not fmt.zero)
    x_TI, counts = torch.randn(3, 600, device=DEVICE, dtype=WIDE), torch.zeros(256, dtype=torch.int32, device=DEVICE)
    ids_T = torch.tensor([19, 0, 7], device=DEVICE)

    def results(one: PackedWeight) -> list[torch.Tensor]:
        product = packed_matmul_triton(x_TI, one, TILES[1], counts, dtype=FP32)
        rows = packed_rows_triton(one, ids_T, x_TI.new_empty(3, 600))
        return [product, rows, dequantize(one), dequantize(one, ids_T), scales_to_round(one)]

    for got, *alike in zip(*map(results, (weight, grouped, kept)), strict=True):
        assert all(torch.equal(got, one) for one in alike)


@pytest.mark.parametrize("scale", [FP16, FP8])
def test_zeros_are_in_the_order_of_scales(scale):
    weight = drawn(UINT4, 40, 600, 32, scale)
    words = pack_scales(weight.scale.to(FP8))
    for other, message in ((by_group(weight).scale, "both in the same order"), (words, "words have no zeros")):
        with pytest.raises(ValueError, match=message):
            packed_matmul_triton(
                torch.randn(3, 600, device=DEVICE, dtype=WIDE), dataclasses.replace(weight, scale=other), TILES[0], None
            )


@pytest.mark.parametrize(("fmt", "group", "rows"), [(INT4, 32, 3), (UINT4, 128, 17), (E2M1, 0, 40), (E4M3, 64, 5)])
def test_e4m3_inputs(fmt, group, rows):
    assert_multiplies(packed(fmt, 40, 300, group), rows, TILES[rows % 3], FP8)


def test_sums_of_another_x_are_refused():
    x_TI, weight = torch.zeros(3, 300, device=DEVICE).to(FP8), packed(INT4, 40, 300, 128)
    given = x_TI, weight, TILES[0], None, None, torch.ones(3, 1, device=DEVICE), FP32
    assert not packed_matmul_triton(*given, sums_of(x_TI, 128)).any()
    for other in (sums_of(x_TI, 64), sums_of(x_TI[:2], 128)):
        with pytest.raises(ValueError, match="have the shape \\(3, 24\\), not"):
            packed_matmul_triton(*given, other)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_formats_that_are_exact_in_e4m3(fmt):
    codes = torch.arange(2**fmt.bits, dtype=torch.uint8)
    values = fmt.reference(codes) - (codes[:, None] if fmt.zero else 0)
    assert fmt.e4m3 == bool(((values.to(FP8).float() == values) | values.isnan()).all())


def test_groups_that_do_not_divide_into_strips_are_not_multiplied_in_e4m3():
    assert multiplies_e4m3(packed(INT4, 1, 256, 64)) and multiplies_e4m3(packed(INT4, 1, 256, 0))
    assert not multiplies_e4m3(packed(INT4, 1, 256, 16))
    with pytest.raises(ValueError, match="multiple of 32 inputs, not 16"):
        x_TI = torch.zeros(1, 256, device=DEVICE).to(FP8)
        packed_matmul_triton(x_TI, packed(INT4, 1, 256, 16), TILES[0], None)
    with pytest.raises(ValueError, match="a multiple or a divisor of 32 inputs, not 48"):
        packed_matmul_triton(x_TI, packed(INT4, 1, 256, 48), TILES[0], None)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_rows(fmt):
    """Every code occurs."""
    group = (0, 16, 128)[FORMATS.index(fmt) % 3]
    weight = packed(fmt, 40, 300, group, rows=group == 16)
    ids_T = torch.randint(40, (19,), device=DEVICE)
    out_TI, out_OI = (torch.empty(n, 300, dtype=FP32, device=DEVICE) for n in (19, 40))
    torch.testing.assert_close(packed_rows_triton(weight, ids_T, out_TI), dequantize(weight, ids_T))
    torch.testing.assert_close(packed_rows_triton(weight, None, out_OI), dequantize(weight))


@pytest.mark.parametrize("fmt", [one for one in FORMATS if one.stored_bits == 4], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("group", [0, 16, 128])
def test_weights_rounded_to_e4m3_for_many_rows(fmt, group):
    """With scales that differ by a factor of 100 in a row, zeros of any dtype, and a row of zeros."""
    weight = packed(fmt, 48, 304, group, FP32, rows=group == 16)
    scale = weight.scale * 100 ** torch.rand_like(weight.scale)
    scale[3] = 0.0
    zero = weight.zero if weight.zero is None or group else weight.zero.to(FP16)
    weight = dataclasses.replace(weight, scale=scale, zero=zero)
    weight = dataclasses.replace(weight, rounded_scale=scales_to_round(weight))
    expected_OI, rounded_OI = dequantize(weight), rounded(weight)
    got_OI = rounded_OI.float() * weight.rounded_scale[:, None]
    if group or fmt is NF4 or fmt is BITSANDBYTES_FP4:
        # Half a unit in the last of four bits, and half a subnormal number.
        allowed_OI = expected_OI.abs() * (2**-4 + 1e-4) + weight.rounded_scale.abs()[:, None] * 2**-10
        assert ((got_OI - expected_OI).abs() <= allowed_OI).all()
    else:
        torch.testing.assert_close(got_OI, expected_OI)
    out_OI = torch.empty(48, 304, dtype=FP8, device=DEVICE)
    packed_rows_triton(weight, None, out_OI)
    # The GPU divides with an error of two units in the last place, which may decide a tie.
    off = out_OI.float() != rounded_OI.float()
    assert off.float().mean() < 0.01
    torch.testing.assert_close(out_OI.float(), rounded_OI.float(), rtol=2**-3, atol=0)


@pytest.mark.parametrize(("scale", "row_scale"), [(0.0, 1e30), (0.0, 1e-30), (1e-38, 1e37), (1.0, 0.0)])
def test_the_kernel_rounds_extremes_as_the_reference_does(scale, row_scale):
    weight = packed(E2M1, 16, 256, 32, FP32)
    row_scale_O = torch.full((16,), row_scale, device=DEVICE)
    weight = dataclasses.replace(weight, scale=torch.full_like(weight.scale, scale), row_scale=row_scale_O)
    weight = dataclasses.replace(weight, rounded_scale=scales_to_round(weight))
    got_OI = packed_rows_triton(weight, None, torch.empty(16, 256, dtype=FP8, device=DEVICE)).float()
    assert got_OI.isfinite().all() and torch.equal(got_OI, rounded(weight).float())


@pytest.mark.parametrize("rows", [MOST_EXACT_ROWS, MOST_EXACT_ROWS + 1])
@pytest.mark.parametrize(("may_round", "kept"), [(False, False), (True, False), (True, True)])
def test_many_rows_multiply_the_rounded_weight(rows, may_round, kept):
    weight = packed(UINT4, 64, 256, 32)
    if may_round:
        weight = dataclasses.replace(weight, rounded_scale=scales_to_round(weight))
    if kept:
        weight = dataclasses.replace(weight, rounded=torch.zeros(64, 256, device=DEVICE).to(FP8))
        round_weight(weight, weight.rounded)
    x_TI = torch.randn(rows, 256, device=DEVICE).to(FP8)
    x_scale_T1, bias_O = torch.rand(rows, 1, device=DEVICE) + 0.5, torch.randn(64, device=DEVICE).to(WIDE)
    counts = torch.zeros(MOST_SHARED_TILES, dtype=torch.int32, device=DEVICE)
    used = [dequantize(weight)]
    if may_round and rows > MOST_EXACT_ROWS:
        used.append(rounded(weight).float() * weight.rounded_scale[:, None])
        assert (used[0] != used[1]).any()
    got = packed_matmul(x_TI, weight, bias_O, WIDE, x_scale_T1, counts)
    errors = []
    for used_OI in used:
        expected = x_TI.float() @ used_OI.t() * x_scale_T1 + bias_O.float()
        errors.append(((got.float() - expected).norm() / expected.norm()).item())
    # The kernel that is quicker for this shape may multiply the weight as it is.
    assert min(errors) < 7e-3, errors
