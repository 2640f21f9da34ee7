"""Routing and products of experts: kernels and torch references against float64, with fresh input.

Kernels run compiled on a GPU, or in Triton's interpreter if TRITON_INTERPRET=1 is set before Triton is imported.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from dovetail.core.interfaces import (
    PLAIN,
    SWIGLU,
    ActFormat,
    Activation,
    ExpertBias,
    GatedActivation,
    Routing,
    RoutingRule,
)
from dovetail.core.ops.expert_copies import count_experts_reference, locate_copies_reference
from dovetail.core.ops.expert_tiles import (
    specialized_expert_tile,
)
from dovetail.core.ops.experts import ExpertWeights, gated_experts, gated_experts_reference
from dovetail.core.ops.formats import encode
from dovetail.core.ops.routing import LOGITS_TILE, route_reference, router_logits
from dovetail.core.ops.tiles import HOPPER_SHARED
from dovetail.core.testing.numeric import poisoned_memory, row_error
from dovetail.plugins.quant.fp8.format import FP8_TOKEN, quantize_rows
from dovetail.plugins.quant.int8.format import INT8_TOKEN
from dovetail.plugins.quant.int8.format import quantize_rows as quantize_to_int8

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNELS = INTERPRETED or torch.cuda.is_available()
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")


def kernels(test):
    """Mark a test of kernels."""
    test = pytest.mark.skipif(not KERNELS, reason="kernels need a GPU or TRITON_INTERPRET=1")(test)
    return test if INTERPRETED else pytest.mark.gpu(test)


if INTERPRETED:
    from dovetail.core.testing.interpreter import mend_interpreter

    mend_interpreter()

DTYPE = torch.float16  # The interpreter truncates float32 to bfloat16.
RULES = {
    "softmax": RoutingRule(8, 2),
    "softmax over the best": RoutingRule(8, 3, normalize=True),
    "sigmoid, scaled": RoutingRule(16, 4, "sigmoid", normalize=True, scale=2.5),
    "groups": RoutingRule(16, 4, "sigmoid", normalize=True, groups=4, kept_groups=2),
    "groups of one": RoutingRule(4, 2, "sigmoid", groups=4, kept_groups=3),
    "odd": RoutingRule(11, 5),
    "groups by their best": RoutingRule(16, 4, groups=4, kept_groups=2, group_best=1),
    "odd groups": RoutingRule(21, 5, "sigmoid", groups=3, kept_groups=2),
    "all": RoutingRule(4, 4),
    "one": RoutingRule(1, 1),
    "uniform": RoutingRule(32, 4, uniform=True),
    "shared": RoutingRule(11, 3, "sigmoid", normalize=True, scale=1.5, always=2),
    "one shared": RoutingRule(8, 4, always=1),
}


def drawn(rule: RoutingRule, tokens: int) -> torch.Tensor:
    """Logits whose scores differ by more than rounding."""
    order_TE = torch.rand(tokens, rule.experts).argsort(1)
    return ((order_TE - rule.experts / 2) / 3 + 0.1 * torch.rand(tokens, rule.experts)).to(DEVICE)


def by_hand(logits_E: list[float], rule: RoutingRule, bias_E: list[float]) -> dict[int, float]:
    """Experts of a token and their weights, in float64."""
    logits = torch.tensor(logits_E, dtype=torch.float64)
    scores = (logits.softmax(0) if rule.scores == "softmax" else logits.sigmoid()).tolist()
    choice = {expert: score + bias for expert, (score, bias) in enumerate(zip(scores, bias_E, strict=True))}
    size = rule.experts // rule.groups
    sums = {
        group: sum(sorted((choice[group * size + i] for i in range(size)), reverse=True)[: rule.group_best])
        for group in range(rule.groups)
    }
    kept = sorted(sums, key=lambda group: -sums[group])[: rule.kept_groups]
    best = sorted((e for e in choice if e // size in kept), key=lambda e: -choice[e])[: rule.active]
    total = sum(scores[e] for e in best) if rule.normalize else 1.0
    every = {rule.experts + i: 1.0 for i in range(rule.always)}
    return {expert: scores[expert] / total * rule.scale for expert in best} | every


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", [name for name in RULES if name != "uniform"])
def test_the_reference_routes_as_by_hand(name, biased):
    rule, tokens = RULES[name], 9
    logits_TE = drawn(rule, tokens)
    bias_E = torch.rand(rule.experts) if biased else torch.zeros(rule.experts)
    found = route_reference(logits_TE.cpu(), rule, bias_E if biased else None)
    for token in range(tokens):
        expected = by_hand(logits_TE[token].tolist(), rule, bias_E.tolist())
        got = dict(zip(found.experts_TK[token].tolist(), found.weights_TK[token].tolist(), strict=True))
        assert got == pytest.approx(expected, rel=1e-5), token


@kernels
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("options", ["plain", "biased, padded"])
def test_the_kernel_routes_as_the_reference(name, options):
    from dovetail.core.ops.kernels.routing import route_triton

    rule, tokens = RULES[name], 7
    logits_TE = drawn(rule, tokens)
    bias_E, live_T = None, None
    if options != "plain":
        bias_E, live_T = torch.rand(rule.experts, device=DEVICE), torch.rand(tokens, device=DEVICE) < 0.5
        logits_TE[~live_T] = float("nan")
    with poisoned_memory():
        got = route_triton(logits_TE, rule, bias_E, live_T)
    want = route_reference(logits_TE.cpu(), rule, *(None if x is None else x.cpu() for x in (bias_E, live_T)))
    assert torch.equal(got.experts_TK.cpu(), want.experts_TK)
    torch.testing.assert_close(got.weights_TK.cpu(), want.weights_TK)
    if live_T is not None:
        assert (got.experts_TK[~live_T] == -1).all() and not got.weights_TK[~live_T].any()


@kernels
@pytest.mark.parametrize("grouped", [{}, {"groups": 4, "kept_groups": 2}], ids=["whole", "groups"])
def test_no_expert_is_chosen_twice_beside_nan(grouped):
    """Too few experts have a score: the others come last, and their weights are NaN."""
    from dovetail.core.ops.kernels.routing import route_triton

    rule = RoutingRule(12, 4, scores="sigmoid", normalize=True, **grouped)
    logits_TE = torch.randn(3, 12, device=DEVICE)
    logits_TE[0, 2:11] = torch.nan
    logits_TE[1] = torch.nan
    got = route_triton(logits_TE, rule)
    assert [len(set(experts)) for experts in got.experts_TK.tolist()] == [4, 4, 4]
    assert got.weights_TK[:2].isnan().all() and got.weights_TK[2].isfinite().all()


@kernels
@pytest.mark.parametrize("tokens", [1, 90])
def test_tokens_take_copies_in_turn(tokens):
    """Kernel and reference, against a loop; counts are added to those that there are."""
    from dovetail.core.ops.kernels.expert_copies import count_experts_triton, locate_copies_triton

    experts, most, first = 7, 3, 5
    experts_TK = torch.randint(-1, experts, (tokens, 4), dtype=torch.int32)
    rank_EM, slot_EM = (torch.randint(0, 100, (experts, most), dtype=torch.int32) for _ in range(2))
    copies_E = torch.randint(1, most + 1, (experts,), dtype=torch.int32)
    wanted, counts = ([[-1] * 4 for _ in range(tokens)] for _ in range(2)), [9] * experts
    ranks, slots = wanted
    for token, chosen in enumerate(experts_TK.tolist()):
        for place, expert in enumerate(chosen):
            if expert >= 0:
                copy = (first + token) % int(copies_E[expert])
                ranks[token][place], slots[token][place] = int(rank_EM[expert, copy]), int(slot_EM[expert, copy])
                counts[expert] += 1
    given = [tensor.to(DEVICE) for tensor in (experts_TK, rank_EM, slot_EM, copies_E)]
    for locate, count in (
        (locate_copies_triton, count_experts_triton),
        (locate_copies_reference, count_experts_reference),
    ):
        with poisoned_memory():
            got = locate(*given, first)
        loads_E = torch.full((experts,), 9, device=DEVICE)
        count(given[0], loads_E)
        assert [tensor.tolist() for tensor in got] == [ranks, slots] and loads_E.tolist() == counts
        assert got[0].dtype == got[1].dtype == torch.int32


def test_uniform_routing_selects_every_expert_equally_often():
    """Also where the logits hardly differ, as with random weights."""
    rule = RoutingRule(64, 8, uniform=True)
    torch.manual_seed(0)
    found = route_reference(1 + 1e-3 * torch.randn(4000, 64), rule).experts_TK
    counts_E = found.flatten().long().bincount(minlength=64)
    assert 400 < counts_E.min() and counts_E.max() < 600  # 500 expected, standard deviation 21


@pytest.mark.parametrize(
    "wrong",
    [
        dict(experts=4, active=5),
        dict(experts=4, active=0),
        dict(experts=10, active=2, groups=4),
        dict(experts=8, active=2, groups=4, kept_groups=5),
        dict(experts=8, active=5, groups=4, kept_groups=2),
    ],
)
def test_rules_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match="experts"):
        RoutingRule(**wrong)


def test_logits_are_summed_in_float32():
    x_TC, weight_EC = torch.randn(5, 96).bfloat16(), torch.randn(8, 96).bfloat16()
    got = router_logits(x_TC, weight_EC, torch.zeros(1024, dtype=torch.int32))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), x_TC.double() @ weight_EC.double().t(), rtol=1e-5, atol=1e-5)


@kernels
def test_few_rows_of_logits_are_near_the_exact_ones():
    """Programs sum shares of the inputs, and the last one adds them."""
    from dovetail.core.ops.kernels.matmul import matmul_triton

    x_TC, weight_EC = torch.randn(3, 300).to(DTYPE), torch.randn(70, 300).to(DTYPE)
    counts = torch.zeros(1024, dtype=torch.int32, device=DEVICE)
    got = matmul_triton(x_TC.to(DEVICE), weight_EC.to(DEVICE), LOGITS_TILE, counts, dtype=torch.float32)
    assert got.dtype == torch.float32 and not counts.any()
    torch.testing.assert_close(got.cpu().double(), x_TC.double() @ weight_EC.double().t(), rtol=1e-4, atol=1e-4)


# Products


def routings(tokens: int, experts: int, active: int) -> dict[str, torch.Tensor]:
    """Experts of each token. Some have no row, one row or every row; some tokens have none."""
    random = torch.rand(tokens, experts).argsort(1)[:, :active].int()
    few = torch.zeros_like(random) - 1
    few[tokens // 2, 0] = experts - 1
    partly = torch.where(torch.rand(tokens, active) < 0.3, -1, random)
    none = torch.zeros_like(random) - 1
    one = none + 2
    return {"random": random, "all in one": one, "one row": few, "some padding": partly, "no expert": none}


def exact(
    x_TC: torch.Tensor,
    routing: Routing,
    up_E2FC: torch.Tensor,
    down_ECF: torch.Tensor,
    activation: GatedActivation,
    bias: ExpertBias | None,
) -> torch.Tensor:
    """In float64, one pair at a time."""
    total_TC = torch.zeros(len(x_TC), x_TC.shape[1], dtype=torch.float64)
    for token, expert in ((t, int(e)) for t, row in enumerate(routing.experts_TK) for e in row if e >= 0):
        place = routing.experts_TK[token].tolist().index(expert)
        up_2F = up_E2FC[expert].double() @ x_TC[token].double()
        up_2F = up_2F if bias is None else up_2F + bias.up[expert].double()
        inner_F = activation.reference(*up_2F.chunk(2))
        y_C = down_ECF[expert].double() @ inner_F
        y_C = y_C if bias is None else y_C + bias.down[expert].double()
        total_TC[token] += routing.weights_TK[token, place].double() * y_C
    return total_TC


CLAMPED = GatedActivation(alpha=1.702, limit=1.5, offset=1.0)


def case(tokens, experts, active, hidden, channels, routed, dtype, biased=False):
    x_TC, up, down = (
        torch.randn(shape).to(dtype)
        for shape in ((tokens, hidden), (experts, 2 * channels, hidden), (experts, hidden, channels))
    )
    up, down = up * hidden**-0.5, down * channels**-0.5
    experts_TK = routings(tokens, experts, active)[routed]
    if routed == "all in one" and active > 1:  # An expert appears once in a token.
        experts_TK[:, 1:] = -1
    routing = Routing(experts_TK, torch.rand(tokens, active))
    bias = None
    if biased:
        bias = ExpertBias(torch.randn(experts, 2 * channels).to(dtype), torch.randn(experts, hidden).to(dtype))
    return x_TC, routing, up, down, bias


def check(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    has_T = expected.abs().sum(1) > 0
    assert not got[~has_T].any(), "tokens without experts must be zero"
    assert row_error(got[has_T], expected[has_T]) < tolerance


@pytest.mark.parametrize("routed", ["random", "all in one", "one row", "some padding"])
@pytest.mark.parametrize(("hidden", "channels"), [(64, 32), (40, 21)])
def test_the_reference_is_near_the_exact_sum(routed, hidden, channels):
    for biased, activation in ((False, SWIGLU), (True, CLAMPED)):
        x_TC, routing, up, down, bias = case(9, 5, 3, hidden, channels, routed, torch.float32, biased)
        x = Activation(PLAIN, x_TC.clone())
        x.values[(routing.experts_TK < 0).all(1)] = float("nan")
        got = gated_experts_reference(x, routing, ExpertWeights(up, down), activation, bias, PLAIN, torch.float32)
        check(got, exact(x_TC, routing, up, down, activation, bias), 1e-5)


@kernels
@pytest.mark.parametrize(
    ("tokens", "experts", "active", "hidden", "channels", "routed", "dtype"),
    [
        (1, 6, 3, 64, 32, "random", DTYPE),  # each pair is a tile
        (9, 5, 3, 72, 40, "random", torch.float32),
        (9, 5, 3, 64, 48, "some padding", DTYPE),
        (9, 5, 3, 64, 32, "one row", DTYPE),
        (40, 3, 2, 64, 70, "all in one", DTYPE),
        (150, 2, 2, 64, 32, "some padding", DTYPE),  # tiles of 128 rows
        (64, 2, 2, 64, 32, "random", DTYPE),
    ],
)
def test_the_kernels_are_near_the_exact_sum(tokens, experts, active, hidden, channels, routed, dtype):
    from dovetail.core.ops.kernels.experts import gated_experts_triton

    biased = tokens % 2 == 1
    activation = CLAMPED if biased else SWIGLU
    x_TC, routing, up, down, bias = case(tokens, experts, active, hidden, channels, routed, dtype, biased)
    x = x_TC.clone()
    x[(routing.experts_TK < 0).all(1)] = float("nan")
    on = [tensor.to(DEVICE) for tensor in (x, routing.experts_TK, routing.weights_TK, up, down)]
    placed = None if bias is None else ExpertBias(bias.up.to(DEVICE), bias.down.to(DEVICE))
    with poisoned_memory():
        got = gated_experts_triton(
            Activation(PLAIN, on[0]), Routing(*on[1:3]), ExpertWeights(*on[3:]), activation, placed, PLAIN, dtype, True
        )
    check(got.cpu(), exact(x_TC, routing, up, down, activation, bias), 1e-5 if dtype is torch.float32 else 5e-3)


def on_device(weights: ExpertWeights) -> ExpertWeights:
    tensors = {name: getattr(weights, name) for name in ("up", "down", "up_scale", "down_scale")}
    return replace(weights, **{name: x.to(DEVICE) for name, x in tensors.items() if x is not None})


@kernels
@pytest.mark.parametrize(("tokens", "routed"), [(1, "random"), (20, "some padding"), (70, "random")])
@pytest.mark.parametrize("fmt", [FP8_TOKEN, INT8_TOKEN])
def test_kernels_of_8_bits_equal_the_reference(tokens, routed, fmt):
    from dovetail.core.ops.kernels.experts import gated_experts_triton

    x_TC, routing, up, down, _ = case(tokens, 3, 2, 64, 48, routed, torch.float32)
    weights = rounded(up, down, fmt)
    x = encode(x_TC.to(DEVICE), (fmt,))[fmt]
    placed = on_device(weights)
    on = Routing(routing.experts_TK.to(DEVICE), routing.weights_TK.to(DEVICE))
    with poisoned_memory():
        got = gated_experts_triton(x, on, placed, SWIGLU, None, fmt, DTYPE, True)
    x_cpu = replace(x, values=x.values.cpu(), scale=x.scale.cpu())
    want = gated_experts(x_cpu, routing, weights, SWIGLU, between=fmt, dtype=DTYPE)
    # A value between the products that lies between two E4M3 numbers may be rounded to either, which differ by 1/8.
    assert row_error(got.cpu().float(), want.float()) < 4e-2
    check(want.float(), exact(x_TC, routing, up, down, SWIGLU, None), 0.25)


@kernels
@pytest.mark.parametrize(
    ("tokens", "hidden", "channels", "block"),
    [(1, 64, 48, (32, 16)), (20, 96, 80, (64, 32)), (150, 64, 64, (32, 64))],
)
def test_blocks_with_scales(tokens, hidden, channels, block):
    """The last group of channels may be smaller."""
    from dovetail.core.ops.kernels.experts import gated_experts_triton

    weights = blocks_of(3, hidden, channels, block)
    x_TC, routing, *_ = case(tokens, 3, 2, hidden, channels, "random", torch.float32)
    x = encode(x_TC.to(DEVICE), (FP8_TOKEN,))[FP8_TOKEN]
    on = Routing(routing.experts_TK.to(DEVICE), routing.weights_TK.to(DEVICE))
    with poisoned_memory():
        got = gated_experts_triton(x, on, on_device(weights), SWIGLU, None, FP8_TOKEN, DTYPE, True)
    x_cpu = replace(x, values=x.values.cpu(), scale=x.scale.cpu())
    want = gated_experts(x_cpu, routing, weights, SWIGLU, between=FP8_TOKEN, dtype=DTYPE)
    assert row_error(got.cpu().float(), want.float()) < 4e-2, "see test_fp8_kernels_equal_the_reference"


HOPPER = pytest.mark.skipif(
    INTERPRETED or not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="Hopper's kernel is in Gluon, which has no interpreter",
)


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize(
    ("tokens", "hidden", "channels", "routed"),
    [
        (40, 320, 192, "some padding"),
        (300, 1024, 336, "random"),
        (150, 64, 48, "one row"),
        (260, 2048, 80, "all in one"),
        (40, 320, 192, "no expert"),
    ],
)
@pytest.mark.parametrize("kind", ["blocks", "fp8", "int8", "fp16", "bf16"])
def test_the_kernel_for_hopper_equals_the_reference(tokens, hidden, channels, routed, kind):
    """Tiles of 64 and 128 rows, and rows whose last block is not whole."""
    from dovetail.core.ops.kernels.expert_pairs import sort_pairs
    from dovetail.core.ops.kernels.experts import gated_experts_triton

    fmt = {"blocks": FP8_TOKEN, "fp8": FP8_TOKEN, "int8": INT8_TOKEN}.get(kind, PLAIN)
    dtype = torch.bfloat16 if kind == "bf16" else DTYPE
    x_TC, routing, up, down, bias = case(tokens, 3, 2, hidden, channels, routed, dtype, biased=True)
    if kind == "blocks":
        weights = blocks_of(3, hidden, channels, (128, 128))
    else:
        weights = ExpertWeights(up, down) if fmt is PLAIN else rounded(up, down, fmt)
    placed = on_device(weights)
    x = encode(x_TC.cuda(), (fmt,))[fmt]
    on = Routing(routing.experts_TK.cuda(), routing.weights_TK.cuda())
    biases = ExpertBias(bias.up.cuda(), bias.down.cuda())
    rows = sort_pairs(on, 3, None).rows
    tiles = (specialized_expert_tile(rows, weights.up.element_size(), HOPPER_SHARED),) * 2
    with poisoned_memory():
        got, again = (
            gated_experts_triton(x, on, placed, CLAMPED, biases, fmt, dtype, True, chosen)
            for chosen in (tiles, None if rows == 128 and kind == "blocks" else tiles)
        )
    assert torch.equal(got, again)
    x_cpu = replace(x, values=x.values.cpu(), scale=None if x.scale is None else x.scale.cpu())
    want = gated_experts(x_cpu, routing, weights, CLAMPED, bias, between=fmt, dtype=dtype)
    # See test_kernels_of_8_bits_equal_the_reference.
    assert row_error(got.cpu().float(), want.float()) < (4e-2 if fmt is not PLAIN else 2e-2 if kind == "bf16" else 5e-3)


def rounded(up: torch.Tensor, down: torch.Tensor, fmt: ActFormat) -> ExpertWeights:
    """Matrices of all experts in 8 bits, with a scale for each output."""
    quantize = {FP8_TOKEN: quantize_rows, INT8_TOKEN: quantize_to_int8}[fmt]
    (up_q, up_scale), (down_q, down_scale) = (quantize(weight.flatten(0, 1)) for weight in (up, down))
    scales = up_scale.view(up.shape[:2]), down_scale.view(down.shape[:2])
    return ExpertWeights(up_q.view(up.shape), down_q.view(down.shape), *scales)


def blocks_of(experts: int, hidden: int, channels: int, block: tuple[int, int]) -> ExpertWeights:
    """Random E4M3 matrices with random scales."""
    c, f = -(-hidden // block[0]), -(-channels // block[1])
    up, down = torch.randn(experts, 2 * channels, hidden), torch.randn(experts, hidden, channels)
    scales = torch.rand(experts, 2 * f, c) + 0.5, torch.rand(experts, c, f) + 0.5
    return ExpertWeights(up.to(torch.float8_e4m3fn), down.to(torch.float8_e4m3fn), *scales, block=block)


def test_the_reference_applies_the_scale_of_each_block():
    weights = blocks_of(3, 40, 24, (32, 16))
    x_TC, routing, *_ = case(7, 3, 2, 40, 24, "random", torch.float32)
    x = encode(x_TC, (FP8_TOKEN,))[FP8_TOKEN]
    got = gated_experts(x, routing, weights, SWIGLU, between=FP8_TOKEN, dtype=torch.float32)
    up, down = weights.up.double(), weights.down.double()
    for expert in range(3):
        for row in range(48):
            half, channel = divmod(row, 24)
            for column in range(40):
                up[expert, row, column] *= weights.up_scale[expert, 2 * half + channel // 16, column // 32]
                if row < 24:
                    down[expert, column, row] *= weights.down_scale[expert, column // 32, row // 16]
    plain_TC = x.values.double() * x.scale.double()
    check(got, exact(plain_TC, routing, up, down, SWIGLU, None), 0.2)
