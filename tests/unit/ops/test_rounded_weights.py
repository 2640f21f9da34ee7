"""Weights of 4 bits that are rounded to E4M3 once more for many rows: numbers and formats at the limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dovetail.core.interfaces.weight import PackedWeight, WeightFormat
from dovetail.core.ops.packed_matmul import packed_matmul
from dovetail.core.ops.packed_tiles import MOST_EXACT_ROWS
from dovetail.core.ops.packing import dequantize, pack, rounded, scales_to_round
from dovetail.core.ops.weight_formats import E2M1, INT4, NF4, UINT4

OUTPUTS, INPUTS, GROUP = 8, 128, 32
GROUPS = INPUTS // GROUP
COUNTS = torch.zeros(1)


def codebook(*values: float, bits: int = 4) -> WeightFormat:
    """Return a format with these values, the first of them also for all other codes."""
    table = torch.tensor(values + (values[0],) * ((1 << bits) - len(values)))
    return WeightFormat("codebook", bits, 4, lambda codes: table[codes.long()])


THREE_BITS = codebook(-2.0, -1.25, -0.75, -0.25, 0.25, 0.75, 1.25, 2.0, bits=3)
NEGATIVE = codebook(*(-1.0 - n for n in range(16)))
UNLIKE = codebook(1e6, 1.0, -1e-6, 3e5)
ZEROS = codebook(0.0)
UNUSED = codebook(1.0, -2.0, 4.0, float("nan"), float("inf"))


def made(
    fmt: WeightFormat,
    scale_OG: torch.Tensor | float = 1.0,
    zero_OG: torch.Tensor | None = None,
    row_scale: float | None = None,
    most: int | None = None,
) -> PackedWeight:
    """`most`: number of codes that occur; None = all."""
    codes_OI = torch.randint(most or 1 << fmt.bits, (OUTPUTS, INPUTS), dtype=torch.uint8)
    scale_OG = torch.as_tensor(scale_OG).expand(OUTPUTS, GROUPS).contiguous()
    row_scale_O = None if row_scale is None else torch.full((OUTPUTS,), row_scale)
    weight = PackedWeight(fmt, INPUTS, GROUP, pack(codes_OI, 4), scale_OG, zero_OG, row_scale_O)
    return replace(weight, rounded_scale=scales_to_round(weight))


def whole(zero: int) -> torch.Tensor:
    return torch.full((OUTPUTS, GROUPS), zero, dtype=torch.uint8)


def minimum_far_away() -> PackedWeight:
    """A group whose numbers hardly differ has a large zero and a small scale, as in GGUF."""
    scale_OG, zero_OG = torch.ones(OUTPUTS, GROUPS), torch.full((OUTPUTS, GROUPS), 7.3)
    scale_OG[:, 1], zero_OG[:, 1] = 1e-5, 1e6
    return made(UINT4, scale_OG, zero_OG)


EXTREMES = {
    "3 bits": lambda: made(THREE_BITS),
    "negative": lambda: made(NEGATIVE, 0.3),
    "values of unlike sizes": lambda: made(UNLIKE),
    "zeros": lambda: made(ZEROS),
    "codes that are not numbers": lambda: made(UNUSED, most=3),
    "scale 0": lambda: made(INT4, 0.0),
    "scale 1e-30": lambda: made(INT4, 1e-30),
    "scale 1e-44": lambda: made(NF4, 1e-44),
    "scale 1e36": lambda: made(E2M1, 1e36),
    "scale of float16": lambda: made(UINT4, torch.tensor(65504.0).half(), whole(0)),
    "negative scale": lambda: made(NF4, -0.1),
    "scales of a row": lambda: made(INT4, torch.logspace(-20, 20, GROUPS)),
    "0 beside 1": lambda: made(E2M1, torch.tensor([0.0, 1.0, 0.0, 1.0])),
    "scale of rows 0": lambda: made(E2M1, 1.0, row_scale=0.0),
    "scale of rows 1e-30": lambda: made(E2M1, 0.0, row_scale=1e-30),
    "scale of rows 1e30": lambda: made(E2M1, 0.0, row_scale=1e30),
    "scales that balance": lambda: made(E2M1, 1e-38, row_scale=1e37),
    "negative scale of rows": lambda: made(E2M1, 2.0, row_scale=-0.5),
    "zeros above the codes": lambda: made(UINT4, 1.0, whole(255)),
    "zeros of GPTQ": lambda: made(UINT4, 0.1, whole(16)),
    "float zeros": lambda: made(UINT4, 0.1, torch.full((OUTPUTS, GROUPS), -1000.25)),
    "a minimum far away": minimum_far_away,
}


@pytest.mark.parametrize("name", EXTREMES)
def test_finite_weights_stay_finite_and_near(name: str) -> None:
    weight = EXTREMES[name]()
    exact_OI, rounded_OI = dequantize(weight), rounded(weight).float()
    assert exact_OI.isfinite().all() and rounded_OI.isfinite().all()
    got_OI, scale_O = rounded_OI * weight.rounded_scale[:, None], weight.rounded_scale
    # Half a unit in the last of four bits, half a subnormal number, and what TINY lets vanish.
    allowed_OI = exact_OI.abs() * (2**-4 + 1e-4) + scale_O[:, None].where(exact_OI.abs() > 1e-27, 0.0) * 2**-10 + 1e-27
    assert ((got_OI - exact_OI).abs() <= allowed_OI).all()
    x_TI = torch.randn(MOST_EXACT_ROWS + 1, INPUTS).to(torch.float8_e4m3fn)
    y_TO = packed_matmul(x_TI, weight, None, torch.float32, torch.full((len(x_TI), 1), 0.01), COUNTS)
    assert y_TO.isfinite().all()


def test_a_minimum_far_away_costs_other_groups_no_bits() -> None:
    weight = minimum_far_away()
    exact_OI, got_OI = dequantize(weight), rounded(weight).float() * weight.rounded_scale[:, None]
    others = torch.ones(INPUTS, dtype=torch.bool)
    others[GROUP : 2 * GROUP] = False
    error = (got_OI - exact_OI)[:, others].norm() / exact_OI[:, others].norm()
    assert error < 0.04, f"relative error {error:.3f}"


@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_a_scale_that_is_not_finite_spoils_its_output_alone(wrong: float) -> None:
    scale_OG = torch.ones(OUTPUTS, GROUPS)
    scale_OG[3, 1] = wrong
    weight = made(INT4, scale_OG)
    x_TI = torch.randn(MOST_EXACT_ROWS + 1, INPUTS).to(torch.float8_e4m3fn)
    for rows in (1, len(x_TI)):
        y_TO = packed_matmul(x_TI[:rows], weight, None, torch.float32, torch.ones(rows, 1), COUNTS)
        assert y_TO.isfinite().all(0).tolist() == [output != 3 for output in range(OUTPUTS)]


def test_without_counters_nothing_is_rounded() -> None:
    weight, x_TI = made(NF4), torch.randn(MOST_EXACT_ROWS + 1, INPUTS).to(torch.float8_e4m3fn)
    given = None, torch.float32, torch.ones(len(x_TI), 1)
    exact = packed_matmul(x_TI, replace(weight, rounded_scale=None), *given, COUNTS)
    assert torch.equal(packed_matmul(x_TI, weight, *given, None), exact)
    assert not torch.equal(packed_matmul(x_TI, weight, *given, COUNTS), exact)


@pytest.mark.parametrize("whole_power", [2.0**-30, 3.5, 7.0, 448.0, 2.0**60])
def test_the_unit_is_the_largest_power_of_two_that_fits(whole_power):
    """Also next to where it changes: the logarithm of the number before a power of two is rounded to a whole one."""
    exact = torch.tensor(whole_power)
    for largest in (exact, torch.nextafter(exact, exact * 2), torch.nextafter(exact, exact / 2)):
        unit = 1 / made(codebook(largest.item())).rounded_scale.double()
        assert (unit * largest <= 448).all() and (2 * unit * largest > 448).all()
