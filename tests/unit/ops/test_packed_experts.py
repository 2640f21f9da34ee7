"""Experts in MXFP4: packing, and kernels and torch references against float64, with fresh input. The kernels run as in
test_experts.py."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from dovetail.core.interfaces import PLAIN, SWIGLU, Activation, ExpertBias, ExpertShape, Routing
from dovetail.core.interfaces.expert import PARTS
from dovetail.core.ops.expert_tiles import (
    SM_SHARED,
    SPECIALIZED,
    packed_expert_tile,
    packed_shared,
    specialized_expert_tile,
    specialized_shared,
)
from dovetail.core.ops.formats import encode
from dovetail.core.ops.packed_experts import (
    PackedExperts,
    pack_exponents,
    pack_row_spans,
    packed_experts_reference,
    unpack_exponents,
    unpack_row_spans,
    unpacked,
)
from dovetail.core.ops.tiles import HOPPER_SHARED
from dovetail.core.ops.weight_formats import E2M1, INT4
from dovetail.core.testing.numeric import poisoned_memory
from dovetail.plugins.quant.fp4.experts import MXFP4Experts
from dovetail.plugins.quant.fp8.format import FP8_TOKEN

from .test_experts import CLAMPED, DEVICE, DTYPE, INTERPRETED, case, check, exact, kernels

INPUTS = (32, 64, 96, 224, 256, 480)
"""Rows of a single span and of several."""


def value(code: int) -> float:
    """E2M1 by its fields: a sign, 2 bits of exponent with a bias of 1, and 1 bit of mantissa."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -magnitude if sign else magnitude


def drawn(experts: int, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (packed words, packed exponents, float64 matrices) of random codes. Products are near 1."""
    codes = torch.randint(16, (experts, outputs, inputs), dtype=torch.uint8)
    exponents = torch.randint(-3, 4, (experts, outputs, inputs // 32)) + 126 - inputs.bit_length() // 2
    words = pack_row_spans(codes.flatten(0, 1)).unflatten(0, (experts, outputs))
    packed = torch.stack([pack_exponents(each) for each in exponents.to(torch.uint8)])
    exact_values = torch.tensor([value(code) for code in range(16)], dtype=torch.float64)[codes.long()]
    return words, packed, exact_values * (2.0 ** (exponents.double() - 127)).repeat_interleave(32, 2)


@pytest.mark.parametrize("inputs", INPUTS)
def test_no_word_is_filled_up_and_codes_return(inputs):
    codes_OI = torch.randint(16, (5, inputs), dtype=torch.uint8)
    words_OW = pack_row_spans(codes_OI)
    assert words_OW.shape == (5, inputs // 8)
    assert torch.equal(unpack_row_spans(words_OW), codes_OI)
    exponents_OG = torch.randint(255, (5, inputs // 32), dtype=torch.uint8)
    assert torch.equal(unpack_exponents(pack_exponents(exponents_OG), inputs), exponents_OG)


def test_decoded_matrices_are_exact():
    codes = torch.randint(16, (6, 96), dtype=torch.uint8)
    exponents = torch.tensor([[1, 60, 127], [150, 200, 252]], dtype=torch.uint8).repeat(3, 1)
    got = unpacked(E2M1, pack_row_spans(codes)[None], pack_exponents(exponents)[None])
    for output, row in enumerate(codes.tolist()):
        scales = [2.0 ** (exponents[output, at // 32].item() - 127) for at in range(96)]
        assert got[0, output].tolist() == [value(code) * scale for code, scale in zip(row, scales, strict=True)]


def packed_case(tokens, experts, active, hidden, channels, routed, dtype):
    x_TC, routing, *_, bias = case(tokens, experts, active, hidden, channels, routed, dtype, tokens % 2 == 1)
    up_words, up_exponents, up = drawn(experts, 2 * channels, hidden)
    down_words, down_exponents, down = drawn(experts, hidden, channels)
    weights = PackedExperts(E2M1, up_words, down_words, up_exponents, down_exponents)
    return x_TC, routing, weights, bias, up, down


def test_the_reference_is_near_the_exact_sum():
    x_TC, routing, weights, bias, up, down = packed_case(9, 5, 3, 96, 64, "some padding", torch.float32)
    got = packed_experts_reference(Activation(PLAIN, x_TC), routing, weights, CLAMPED, bias, PLAIN, torch.float32)
    check(got, exact(x_TC, routing, up, down, CLAMPED, bias), 1e-5)


@kernels
@pytest.mark.parametrize(
    ("tokens", "experts", "active", "hidden", "channels", "routed", "kind"),
    [
        (1, 6, 1, 288, 32, "random", "fp16"),  # each pair is a tile
        (5, 2, 2, 32, 224, "some padding", "fp16"),
        (9, 3, 2, 64, 256, "one row", "fp32"),
        (60, 2, 2, 64, 32, "random", "bf16"),
        (150, 2, 2, 64, 32, "all in one", "bf16"),  # tiles of 128 rows
        (6, 2, 2, 288, 64, "some padding", "fp8"),
        (40, 1, 1, 64, 32, "random", "fp8"),  # too many rows for sums
    ],
)
def test_the_kernels_are_near_the_exact_sum(tokens, experts, active, hidden, channels, routed, kind):
    from dovetail.core.ops.kernels.packed_experts import packed_experts_triton

    # Triton's interpreter cannot decode to bfloat16.
    kind = "fp32" if kind == "bf16" and INTERPRETED else kind
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.float16}[kind]
    fmt = FP8_TOKEN if kind == "fp8" else PLAIN
    x_TC, routing, weights, bias, up, down = packed_case(tokens, experts, active, hidden, channels, routed, dtype)
    activation = SWIGLU if bias is None else CLAMPED
    x = x_TC.clone()
    x[(routing.experts_TK < 0).all(1)] = float("nan")
    placed = PackedExperts(
        E2M1,
        *(tensor.to(DEVICE) for tensor in (weights.up, weights.down, weights.up_exponents, weights.down_exponents)),
    )
    on = None if bias is None else ExpertBias(bias.up.to(DEVICE), bias.down.to(DEVICE))
    at = Routing(routing.experts_TK.to(DEVICE), routing.weights_TK.to(DEVICE))
    given = encode(x.to(DEVICE), (fmt,))[fmt]
    with poisoned_memory():
        got = packed_experts_triton(given, at, placed, activation, on, fmt, dtype).cpu()
    if kind == "fp8":
        given = Activation(fmt, given.values.cpu(), given.scale.cpu())
        want = packed_experts_reference(given, routing, weights, activation, bias, fmt, torch.float32)
        # A value of h near the border of two E4M3 numbers may be rounded to either. Many rows are not rounded between.
        check(got.float(), want.double(), 0.1 if tokens < 32 else 0.2)
        # All rows together: of a single one, few inputs may count, and terms may cancel out.
        check(want.reshape(1, -1), exact(x_TC, routing, up, down, activation, bias).reshape(1, -1), 0.2)
        return
    tolerance = {"fp32": 1e-5, "fp16": 5e-3, "bf16": 2e-2}[kind]
    check(got.float(), exact(x_TC, routing, up, down, activation, bias), tolerance)


@pytest.mark.parametrize(
    ("hidden", "channels", "stored"),
    [
        (2880, 1440, 1472),
        (2880, 720, 768),
        (2880, 360, 384),
        (96, 720, 736),
        (2880, 2880, 2880),
        (2880, 32, 32),
        (96, 1440, 1440),
    ],
)
def test_few_channels_are_added_for_the_kernel_of_hopper(hidden, channels, stored):
    """Those of a rank of gpt-oss on two, four and eight ranks."""
    method = MXFP4Experts(PLAIN)
    shape = ExpertShape(2, hidden, channels, torch.bfloat16)
    params = method.create(shape, torch.device("meta"))
    assert method.channels(shape) == stored
    assert params["up"].shape == (2, 2 * stored, hidden // 8) and params["down"].shape == (2, hidden, stored // 8)


@kernels
@pytest.mark.parametrize("fmt", [PLAIN, FP8_TOKEN], ids=["fp16", "fp8"])
def test_added_channels_change_no_result(monkeypatch, fmt):
    """A fourth block of channels is added to three, as to the 45 that each of two ranks of gpt-oss has."""
    from dovetail.core.ops.kernels.packed_experts import packed_experts_triton
    from dovetail.plugins.quant.fp4 import experts as fp4

    draw = torch.Generator().manual_seed(4)
    parts = [torch.randn(*size, generator=draw) for size in ((96, 64), (96, 64), (64, 96))]
    bias_up, bias_down = torch.randn(2, 2, 96, generator=draw), torch.randn(2, 64, generator=draw)
    shape = ExpertShape(2, 64, 96, torch.float16)
    x_TC = torch.randn(5, 64, generator=draw).half().to(DEVICE)
    routing = Routing(torch.tensor([[0, 1], [1, 0], [1, -1], [-1, -1], [0, 1]], dtype=torch.int32), torch.rand(5, 2))
    on = Routing(routing.experts_TK.to(DEVICE), routing.weights_TK.to(DEVICE))
    found = []
    for most_added, channels in ((3, 128), (4, 96)):
        monkeypatch.setattr(fp4, "MOST_ADDED", most_added)
        method = fp4.MXFP4Experts(fmt)
        assert method.channels(shape) == channels
        with poisoned_memory():
            params = method.create(shape, DEVICE)
        for expert, (part, weight) in product(range(2), zip(PARTS, parts, strict=True)):
            method.load(params, expert, part, {"weight": weight * (1 + expert)})
        up = torch.nn.functional.pad(bias_up, (0, channels - 96)).flatten(1)
        bias = ExpertBias(up.half().to(DEVICE), bias_down.half().to(DEVICE))
        given = encode(x_TC, (fmt,))[fmt]
        weights = PackedExperts(E2M1, *(params[name] for name in ("up", "down", "up_exponents", "down_exponents")))
        found.append(packed_experts_triton(given, on, weights, CLAMPED, bias, fmt, torch.float16).float().cpu())
    assert found[0].abs().max() > 1
    torch.testing.assert_close(found[0], found[1], rtol=2e-3, atol=2e-3 * float(found[1].abs().max()))


@pytest.mark.gpu
@pytest.mark.skipif(
    INTERPRETED or not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="Hopper's kernel is in Gluon, which has no interpreter",
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "experts", "active", "hidden", "channels", "routed"),
    [
        (9, 8, 2, 320, 2880, "random"),  # tiles of 16 rows, spans of 64 inputs at the end
        (40, 4, 2, 448, 704, "some padding"),  # 32 rows; 192 inputs
        (90, 4, 2, 384, 256, "random"),  # 64 rows; 128 inputs
        (150, 2, 2, 512, 64, "all in one"),  # 128 rows, several tiles of an expert
        (9, 3, 2, 64, 192, "one row"),
        (1, 6, 1, 256, 128, "random"),
    ],
)
def test_the_kernel_for_hopper_is_near_the_exact_sum(tokens, experts, active, hidden, channels, routed, dtype):
    from dovetail.core.ops.kernels.packed_experts import packed_experts_triton

    x_TC, routing, weights, bias, up, down = packed_case(tokens, experts, active, hidden, channels, routed, dtype)
    x_TC[(routing.experts_TK < 0).all(1)] = float("nan")
    on = [each.to("cuda") for each in (weights.up, weights.down, weights.up_exponents, weights.down_exponents)]
    biases = None if bias is None else ExpertBias(bias.up.to("cuda"), bias.down.to("cuda"))
    at = Routing(routing.experts_TK.to("cuda"), routing.weights_TK.to("cuda"))
    x = Activation(PLAIN, x_TC.to("cuda"))
    with poisoned_memory():
        got = packed_experts_triton(x, at, PackedExperts(E2M1, *on), CLAMPED, biases, PLAIN, dtype)
        again = packed_experts_triton(x, at, PackedExperts(E2M1, *on), CLAMPED, biases, PLAIN, dtype)
    x_TC[(routing.experts_TK < 0).all(1)] = 0.0
    tolerance = 5e-3 if dtype is torch.float16 else 2e-2
    check(got.cpu().float(), exact(x_TC, routing, up, down, CLAMPED, bias), tolerance)
    assert torch.equal(got, again)
    nowhere = replace(at, experts_TK=torch.full_like(at.experts_TK, -1))
    assert not packed_experts_triton(x, nowhere, PackedExperts(E2M1, *on), CLAMPED, biases, PLAIN, dtype).any()


@pytest.mark.parametrize(
    ("hopper", "rows", "itemsize", "fmt", "channels", "runs"),
    [
        (True, 16, 2, E2M1, 2880, True),
        (True, 128, 2, E2M1, 2880, True),
        (False, 64, 2, E2M1, 2880, False),
        (True, 64, 2, E2M1, 1440, False),  # the last span has 32 inputs
        (True, 16, 1, E2M1, 2880, False),  # few rows in E4M3
        (True, 64, 4, E2M1, 2880, False),
        (True, 64, 2, INT4, 2880, False),
    ],
)
def test_hopper_has_a_kernel_of_its_own(monkeypatch, hopper, rows, itemsize, fmt, channels, runs):
    pytest.importorskip("triton", reason="no Triton for this platform")
    from dovetail.core.ops.kernels import packed_experts

    monkeypatch.setattr(packed_experts, "device_facts", lambda device: ("GPU", 132, hopper, HOPPER_SHARED))
    tile = packed_experts._tile(rows, itemsize, fmt, (2880, channels), torch.device("cuda"))
    assert bool(tile.residents) == runs and tile.rows == rows


def test_tiles_of_hopper_fit_into_shared_memory():
    for rows, itemsize in product(SPECIALIZED, (0.5, 1, 2)):
        tile = specialized_expert_tile(rows, itemsize, HOPPER_SHARED)
        assert tile.stages > 1 and tile.residents * (specialized_shared(tile, itemsize) + 1024) <= SM_SHARED
        assert tile.outputs == 16 * tile.warps


def test_tiles_of_packed_experts_fit_into_shared_memory():
    for gpu_shared in (99 << 10, 227 << 10):
        for rows in (16, 32, 64, 128):
            for itemsize in (1, 2):
                tile = packed_expert_tile(rows, itemsize, gpu_shared)
                assert packed_shared(tile, itemsize) <= gpu_shared and tile.outputs >= 64


@kernels
@pytest.mark.parametrize("tokens", [5, 40])
def test_rows_are_gathered_in_sorted_order(tokens):
    """Pairs without an expert have no place, and rows are converted. They need not be next to each other."""
    from dovetail.core.ops.kernels.expert_pairs import gather_rows, sort_pairs

    experts_TK = torch.randint(-1, 6, (tokens, 3), dtype=torch.int32, device=DEVICE)
    routing = Routing(experts_TK, torch.rand(tokens, 3, device=DEVICE))
    x_TC = torch.randn(tokens, 80, device=DEVICE)[:, :72]
    pairs = sort_pairs(routing, 6, 16)
    with poisoned_memory():
        got_PC = gather_rows(x_TC, pairs, DTYPE)
    wanted = [pair for expert in range(6) for pair in (experts_TK.flatten() == expert).nonzero().flatten().tolist()]
    assert wanted and len(got_PC) == 3 * tokens + 16
    assert torch.equal(got_PC[: len(wanted)], x_TC[torch.tensor(wanted, device=DEVICE) // 3].to(DTYPE))
