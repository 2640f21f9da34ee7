"""Experts in any packed format: kernel and torch reference against float64, with fresh input. The kernel runs as in
test_experts.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces import PLAIN, SWIGLU, Activation, ExpertBias, Routing
from dovetail.core.interfaces.weight import PackedWeight, ShiftedDecoder, WeightFormat
from dovetail.core.ops.expert_tiles import stacked_expert_tile, stacked_shared
from dovetail.core.ops.formats import encode
from dovetail.core.ops.packing import dequantize, pack
from dovetail.core.ops.stacked_experts import StackedExperts, stacked_experts_reference, unstacked
from dovetail.core.ops.weight_formats import BITSANDBYTES_FP4, E2M1, E4M3, INT4, INT6, INT8, NF4, UINT4, UINT8
from dovetail.core.testing.numeric import poisoned_memory
from dovetail.plugins.quant.fp8.format import FP8_TOKEN

from .memory_orders import as_kept, by_group
from .test_experts import CLAMPED, DEVICE, INTERPRETED, case, check, exact, kernels

FP16, FP32 = torch.float16, torch.float32
FP8 = torch.float8_e4m3fn


def drawn(
    fmt: WeightFormat,
    shape: tuple[int, int, int],
    group: int,
    scales: torch.dtype,
    zeros: torch.dtype = torch.uint8,
    row_scale: bool = False,
) -> PackedWeight:
    """Return stacked matrices of random codes, scales and zeros. Products with normal inputs are near 1."""
    experts, outputs, inputs = shape
    groups = ceil_div(inputs, group) if group else 1
    codes = torch.randint(2**fmt.bits, (experts * outputs, inputs), dtype=torch.uint8)
    if fmt is E4M3:
        codes[(codes & 127) > 119] = 0  # Values above 256 would exceed float16 in the sums of groups.
    packed = PackedWeight(fmt, inputs, group, pack(codes, fmt.stored_bits), torch.ones(len(codes), groups))
    if fmt.zero:
        zero = torch.rand(len(codes), groups) * (2**fmt.bits - 1)
        packed = replace(packed, zero=zero.to(zeros))
    size = dequantize(packed).square().mean().sqrt() * inputs**0.5
    row = torch.rand(len(codes)) + 0.5 if row_scale else None
    scale = (torch.rand(len(codes), groups) + 0.5) / (1.0 if row_scale else size)
    if row is not None:
        row = row / size
    packed = replace(packed, scale=scale.to(scales), row_scale=row)
    tensors = {
        name: None if (value := getattr(packed, name)) is None else value.unflatten(0, (experts, outputs))
        for name in ("codes", "scale", "zero", "row_scale")
    }
    return replace(packed, **tensors)


def stacked_case(tokens, experts, active, hidden, channels, routed, dtype, up, down):
    """`up`, `down`: further arguments of `drawn`."""
    x_TC, routing, *_, bias = case(tokens, experts, active, hidden, channels, routed, dtype, tokens % 2 == 1)
    weights = StackedExperts(
        drawn(up[0], (experts, 2 * channels, hidden), *up[1:]), drawn(down[0], (experts, hidden, channels), *down[1:])
    )
    matrices = [
        dequantize(unstacked(packed)).double().unflatten(0, (experts, -1)) for packed in (weights.up, weights.down)
    ]
    return x_TC, routing, weights, bias, *matrices


def on_device(weights: StackedExperts, order: Callable[[PackedWeight], PackedWeight] = as_kept) -> StackedExperts:
    """Return what the kernel gets. `order`: puts scales into the order of memory in which they are kept."""

    def placed(packed: PackedWeight) -> PackedWeight:
        names = ("codes", "scale", "zero", "row_scale")
        tensors = {name: value.to(DEVICE) for name in names if (value := getattr(packed, name)) is not None}
        return replace(packed, **tensors)

    return StackedExperts(placed(order(weights.up)), placed(order(weights.down)))


def test_the_reference_is_near_the_exact_sum():
    how = (UINT4, 32, FP16)
    x_TC, routing, weights, bias, up, down = stacked_case(9, 5, 3, 96, 80, "some padding", FP32, how, how)
    got = stacked_experts_reference(Activation(PLAIN, x_TC), routing, weights, CLAMPED, bias, PLAIN, FP32)
    check(got, exact(x_TC, routing, up, down, CLAMPED, bias), 1e-5)


GPTQ = (UINT4, 128, FP16)
NVFP4 = (E2M1, 16, FP8, torch.uint8, True)
CASES = [
    # Tokens, experts, active, hidden, channels, routing, dtype, formats of the two products.
    (1, 6, 2, 256, 64, "random", FP16, GPTQ, (UINT4, 64, FP16)),  # each pair is a tile; one group of two runs
    (9, 3, 2, 288, 96, "some padding", FP32, (INT4, 32, FP16), (INT4, 32, FP16)),  # blocks that rows do not fill
    (5, 2, 2, 320, 72, "one row", FP16, GPTQ, (UINT4, 8, FP16)),  # a rank's share begins inside a group
    (60, 2, 2, 64, 32, "random", FP32, (INT8, 0, FP32), (INT8, 0, FP32)),  # 64 rows: scaled weights
    (40, 2, 2, 256, 32, "random", FP16, GPTQ, GPTQ),
    (150, 2, 2, 64, 32, "all in one", FP16, (UINT8, 32, FP16), (UINT8, 16, FP16)),  # 128 rows
    (7, 3, 2, 64, 32, "some padding", FP16, NVFP4, NVFP4),
    (9, 2, 1, 64, 64, "random", FP16, (NF4, 64, FP32), (NF4, 64, FP32)),
    (9, 2, 1, 64, 64, "random", FP32, (UINT4, 32, FP16, FP16), (UINT8, 32, FP16, FP16)),  # Q4_K and Q5_K of GGUF
    (4, 2, 1, 64, 32, "random", FP16, (INT6, 16, FP16), (BITSANDBYTES_FP4, 32, FP32)),
    (4, 2, 1, 160, 32, "random", FP32, (E4M3, 0, FP32, torch.uint8, True), (E4M3, 32, torch.bfloat16)),
]


@kernels
@pytest.mark.parametrize(("tokens", "experts", "active", "hidden", "channels", "routed", "dtype", "up", "down"), CASES)
def test_the_kernel_is_near_the_exact_sum(tokens, experts, active, hidden, channels, routed, dtype, up, down):
    from dovetail.core.ops.kernels.stacked_experts import stacked_experts_triton

    dimensions = tokens, experts, active, hidden, channels, routed, dtype, up, down
    x_TC, routing, weights, bias, *matrices = stacked_case(*dimensions)
    activation = SWIGLU if bias is None else CLAMPED
    x = x_TC.clone()
    x[(routing.experts_TK < 0).all(1)] = float("nan")
    on = None if bias is None else ExpertBias(bias.up.to(DEVICE), bias.down.to(DEVICE))
    at = Routing(routing.experts_TK.to(DEVICE), routing.weights_TK.to(DEVICE))
    given = Activation(PLAIN, x.to(DEVICE))
    with poisoned_memory():
        got = stacked_experts_triton(given, at, on_device(weights), activation, on, PLAIN, dtype).cpu()
    check(got.float(), exact(x_TC, routing, *matrices, activation, bias), 5e-3 if dtype is FP16 else 2e-5)


@kernels
@pytest.mark.parametrize(("hidden", "channels"), [(80, 48), (88, 52)], ids=["multiples of 16", "others"])
@pytest.mark.parametrize(
    ("tokens", "up", "down"),
    [
        (150, (UINT4, 32, FP16), (INT8, 0, FP32)),
        # Words of four scales: five groups of inputs and three, then ten, and one.
        (3, NVFP4, NVFP4),
        (150, (NF4, 8, FP8), (INT4, 64, FP8)),
        (3, (UINT4, 16, FP8), (UINT4, 32, FP8)),
    ],
)
def test_scales_are_in_any_order_in_memory(tokens, up, down, hidden, channels):
    """Rows of scales are filled up to multiples of 16 outputs where outputs are next to each other."""
    from dovetail.core.ops.kernels.stacked_experts import stacked_experts_triton

    x_TC, routing, weights, *_ = stacked_case(tokens, 3, 2, hidden, channels, "random", FP16, up, down)
    at = Routing(routing.experts_TK.to(DEVICE), routing.weights_TK.to(DEVICE))
    given, results = Activation(PLAIN, x_TC.to(DEVICE)), []
    for order in (lambda weight: weight, by_group, as_kept):
        ordered = on_device(weights, order)
        results.append(stacked_experts_triton(given, at, ordered, SWIGLU, None, PLAIN, FP16))
        for side, plain in ((ordered.up, weights.up), (ordered.down, weights.down)):
            assert torch.equal(dequantize(unstacked(side)).cpu(), dequantize(unstacked(plain)))
    assert results[0].any() and all(torch.equal(results[0], one) for one in results[1:])


@kernels
@pytest.mark.parametrize(
    ("tokens", "up", "down", "rounds"),
    [
        (5, GPTQ, (UINT4, 32, FP16), True),
        (9, (E2M1, 32, torch.bfloat16), (INT4, 0, FP16), True),
        (9, (E4M3, 128, FP32), NVFP4, False),  # the second product is in float16
        (9, (NF4, 64, FP32), (UINT4, 32, FP16, FP16), False),  # neither is exact in E4M3
        (150, GPTQ, GPTQ, False),  # too many rows
    ],
)
def test_the_kernel_multiplies_rows_with_scales(tokens, up, down, rounds):
    """`rounds`: whether inputs of the second product are rounded to E4M3."""
    from dovetail.core.ops.kernels.stacked_experts import stacked_experts_triton

    x_TC, routing, weights, bias, *matrices = stacked_case(tokens, 3, 2, 128, 64, "random", FP16, up, down)
    activation = SWIGLU if bias is None else CLAMPED
    on = None if bias is None else ExpertBias(bias.up.to(DEVICE), bias.down.to(DEVICE))
    at = Routing(routing.experts_TK.to(DEVICE), routing.weights_TK.to(DEVICE))
    given = encode(x_TC.to(DEVICE), (FP8_TOKEN,))[FP8_TOKEN]
    with poisoned_memory():
        got = stacked_experts_triton(given, at, on_device(weights), activation, on, FP8_TOKEN, FP16).cpu()
    given = Activation(FP8_TOKEN, given.values.cpu(), given.scale.cpu())
    want = stacked_experts_reference(given, routing, weights, activation, bias, FP8_TOKEN, FP32)
    # A value near the border of two E4M3 numbers may be rounded to either, and some products do not round.
    check(got.float().reshape(1, -1), want.double().reshape(1, -1), 0.1)
    decoded = (given.values.float() * given.scale).double()
    expected = exact(decoded, routing, *matrices, activation, bias)
    check(got.float().reshape(1, -1), expected.reshape(1, -1), 0.1 if rounds else 1e-2)


@kernels
@pytest.mark.parametrize(("tokens", "fmt"), [(1, PLAIN), (9, PLAIN), (70, PLAIN), (9, FP8_TOKEN)])
def test_each_expert_may_have_its_inputs_in_an_order_of_its_own(tokens, fmt):
    from dovetail.core.ops.kernels.stacked_experts import stacked_experts_triton

    # The only token has experts.
    routed = "some padding" if tokens > 1 else "random"
    dimensions = tokens, 3, 2, 128, 64, routed, FP16, GPTQ, (UINT4, 32, FP16)
    x_TC, routing, weights, bias, up, down = stacked_case(*dimensions)
    orders = [torch.randperm(128) for _ in range(3)]
    weights = replace(weights, order_EC=torch.stack(orders).int())
    up = torch.stack([matrix[:, order.argsort()] for matrix, order in zip(up, orders, strict=True)])
    activation = SWIGLU if bias is None else CLAMPED
    on = None if bias is None else ExpertBias(bias.up.to(DEVICE), bias.down.to(DEVICE))
    at = Routing(routing.experts_TK.to(DEVICE), routing.weights_TK.to(DEVICE))
    x_TC[(routing.experts_TK < 0).all(1)] = 0
    given = encode(x_TC.to(DEVICE), (fmt,))[fmt]
    placed = replace(on_device(weights), order_EC=weights.order_EC.to(DEVICE))
    with poisoned_memory():
        got = stacked_experts_triton(given, at, placed, activation, on, PLAIN, FP16).cpu().float()
    values, scale = given.values.cpu(), None if given.scale is None else given.scale.cpu()
    want = stacked_experts_reference(Activation(fmt, values, scale), routing, weights, activation, bias, PLAIN, FP32)
    expected = exact((values.float() * (1.0 if scale is None else scale)).double(), routing, up, down, activation, bias)
    check(want.float(), expected, 1e-5)
    check(got, expected, 5e-3 if fmt is PLAIN else 1e-2)


@kernels
@pytest.mark.parametrize("tokens", [1, 9])
def test_rows_of_pairs_without_an_expert_are_not_gathered(tokens):
    """There is no order of columns for them: what is in memory before the first one may be any number."""
    from dovetail.core.ops.kernels.expert_pairs import gather_rows, sort_pairs

    experts_TK = torch.tensor([[2, -1, 0]] * tokens, dtype=torch.int32)
    columns_EC = torch.stack([torch.randperm(64) for _ in range(4)]).int()[1:]
    x_TC = torch.randn(tokens, 64, dtype=FP16)
    routing = Routing(experts_TK.to(DEVICE), torch.ones(tokens, 3, device=DEVICE))
    with poisoned_memory():
        pairs = sort_pairs(routing, 3, None)
        got = gather_rows(x_TC.to(DEVICE), pairs, FP16, columns_EC.to(DEVICE)).cpu()[: 3 * tokens]
    order = range(3) if tokens == 1 else experts_TK.flatten().argsort(stable=True).roll(-tokens).tolist()
    want = [x_TC[pair // 3, columns_EC[experts_TK[0, pair % 3]]] for pair in order]
    for pair, row, expected in zip(order, got, want, strict=True):
        assert row.isnan().all() if pair % 3 == 1 else row.equal(expected)


BF16 = torch.bfloat16
PUBLISHED = [
    (INT4, 128, BF16),
    (UINT8, 128, BF16),
    (INT8, 0, BF16),
    NVFP4,
    (NF4, 64, FP32),
    (UINT4, 32, FP16, FP16),
    (INT6, 16, FP16),
]
ON_GPU = [
    *product(PUBLISHED, (7, 300), (PLAIN,)),
    *product([(UINT4, 128, BF16)], (1, 7, 40, 90, 300), (PLAIN,)),
    *product([(UINT4, 128, BF16), (INT4, 128, BF16), (E2M1, 32, BF16), (E4M3, 128, FP32)], (7, 40), (FP8_TOKEN,)),
]


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="the interpreter cannot decode to bfloat16")
@pytest.mark.parametrize(
    ("how", "tokens", "fmt"),
    [pytest.param(*each, id=f"{each[0][0].name}, {each[1]}, {each[2].name}") for each in ON_GPU],
)
def test_published_formats_on_a_gpu(how, tokens, fmt):
    """Rows of several blocks and a part of one, in tiles of 16 to 128 rows, and the same result each time."""
    from dovetail.core.ops.kernels.stacked_experts import stacked_experts_triton

    x_TC, routing, weights, bias, *matrices = stacked_case(tokens, 8, 2, 1024, 352, "random", BF16, how, how)
    biases = None if bias is None else ExpertBias(bias.up.to(DEVICE), bias.down.to(DEVICE))
    at = Routing(routing.experts_TK.to(DEVICE), routing.weights_TK.to(DEVICE))
    given = encode(x_TC.to(DEVICE), (fmt,))[fmt]
    with poisoned_memory():
        got, again = (
            stacked_experts_triton(given, at, on_device(weights), CLAMPED, biases, fmt, BF16) for _ in range(2)
        )
    assert torch.equal(got, again)
    decoded = given.values.cpu().double() * (1.0 if given.scale is None else given.scale.cpu().double())
    expected = exact(decoded, routing, *matrices, CLAMPED, bias)
    check(got.cpu().float().reshape(1, -1), expected.reshape(1, -1), 2e-2 if fmt is PLAIN else 0.1)


@kernels
@pytest.mark.parametrize(
    ("fmt", "group", "tokens", "kind"),
    [(UINT4, 128, 9, FP16), (UINT4, 32, 40, FP16), (UINT4, 128, 9, FP8), (INT4, 32, 9, FP8), (INT4, 32, 9, FP16)],
)
def test_shifted_decoders_give_the_same_sums(monkeypatch, fmt, group, tokens, kind):
    """In Triton's interpreter, by decoders without instructions of a GPU."""
    from dovetail.core.ops.kernels import stacked_experts
    from dovetail.core.ops.kernels.stacked_experts import stacked_experts_triton

    if INTERPRETED:
        from .shifted_decoders import code_less_8, code_over_512, code_plus_128

        offset = 8.0 if fmt is INT4 else 0.0
        shifted = {
            FP16: ShiftedDecoder(code_plus_128, 128.0 + offset),
            FP8: ShiftedDecoder(code_over_512, offset, 2.0**-9),
        }
        fmt = replace(fmt, decode_words=code_plus_128 if offset == 0 else code_less_8, shifted=shifted)
        monkeypatch.setattr(stacked_experts, "reads_words", lambda x: True)
    how = fmt, group, FP16
    x_TC, routing, weights, bias, *matrices = stacked_case(tokens, 3, 2, 128, 64, "some padding", FP16, how, how)
    biases = None if bias is None else ExpertBias(bias.up.to(DEVICE), bias.down.to(DEVICE))
    at = Routing(routing.experts_TK.to(DEVICE), routing.weights_TK.to(DEVICE))
    act = FP8_TOKEN if kind is FP8 else PLAIN
    given = encode(x_TC.to(DEVICE), (act,))[act]
    got = stacked_experts_triton(given, at, on_device(weights), CLAMPED, biases, act, FP16).cpu()
    scale = 1.0 if given.scale is None else given.scale.cpu().double()
    expected = exact(given.values.cpu().double() * scale, routing, *matrices, CLAMPED, bias)
    check(got.float().reshape(1, -1), expected.reshape(1, -1), 0.1 if kind is FP8 else 5e-3)


@kernels
def test_groups_that_strips_do_not_fit_are_refused():
    from dovetail.core.ops.kernels.stacked_experts import stacked_experts_triton

    how = (INT4, 48, FP16)
    x_TC, routing, weights, *_ = stacked_case(2, 2, 1, 96, 96, "random", FP16, how, how)
    with pytest.raises(ValueError, match="a multiple or a divisor of 32 inputs, not 48"):
        stacked_experts_triton(Activation(PLAIN, x_TC), routing, weights, SWIGLU, None, PLAIN, FP16)


def test_tiles_fit_into_shared_memory():
    for gpu_shared, rows, bits in product((99 << 10, 227 << 10), (16, 32, 64, 128), (4, 8)):
        for itemsize, gated in product((1, 2, 4), (False, True)):
            tile = stacked_expert_tile(rows, bits, itemsize, gated, gpu_shared)
            assert tile.stages == 1 or stacked_shared(tile, bits, itemsize, gated) <= gpu_shared
            assert tile.outputs >= 64 and tile.inputs * bits == 1024
