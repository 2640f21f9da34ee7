"""Launches of the kernels of routed experts, with few and many rows."""

from __future__ import annotations

from dataclasses import replace

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
from dovetail.core.interfaces.weight import PackedWeight
from dovetail.core.ops.expert_copies import count_experts, locate_copies
from dovetail.core.ops.experts import ExpertWeights, gated_experts
from dovetail.core.ops.packed_experts import PackedExperts, packed_gated_experts, spans
from dovetail.core.ops.packing import empty_by_group
from dovetail.core.ops.routing import route
from dovetail.core.ops.stacked_experts import StackedExperts, stacked_gated_experts
from dovetail.core.ops.weight_formats import E2M1, INT8, NF4, UINT4
from dovetail.plugins.quant.fp8.format import FP8_TOKEN
from dovetail.plugins.quant.int8.format import INT8_TOKEN

from .emulated import BF16, E4M3, EVERYTHING, FP16, FP32, INT32, cuda, has_fp8
from .packed_launches import packed_weight

CLAMPED = GatedActivation(1.702, 7.0, 1.0)
RULES = (
    RoutingRule(128, 8, normalize=True),
    RoutingRule(256, 8, "sigmoid", normalize=True, scale=2.5, groups=8, kept_groups=4),
    RoutingRule(8, 2, uniform=True),
)


def experts() -> None:
    """EVERYTHING: whether to add shapes."""
    for rule in RULES:
        choose(rule)
    chosen = cuda(64, 8, dtype=torch.int32)
    locate_copies(chosen, *(cuda(128, 4, dtype=torch.int32) for _ in range(2)), cuda(128, dtype=torch.int32), 64)
    count_experts(chosen, cuda(128, dtype=torch.int64))
    # Qwen3-30B-A3B: each pair a tile, tiles of 16 and of 128 rows.
    for tokens in (1, 64, 512, 8192) if EVERYTHING else (1, 64, 8192):
        multiply(tokens, 128, 8, 2048, 768, BF16)
        if has_fp8() and (EVERYTHING or tokens > 1):
            multiply(tokens, 128, 8, 2048, 768, E4M3)
            multiply(tokens, 128, 8, 2048, 768, E4M3, blocks=True)
        if EVERYTHING or tokens == 64:
            multiply(tokens, 128, 8, 2048, 768, torch.int8)
    # Tiles of 64 rows, a clamped activation, biases, and channels that no block divides.
    multiply(128, 8, 2, 2880, 1440, BF16, CLAMPED, biased=True)
    multiply(16, 8, 2, 72, 40, FP16)
    # gpt-oss 120B: each pair a tile, tiles of 16, 64 and 128 rows. ptxas takes ten seconds for some of them.
    for tokens in (1, 64, 1024, 8192) if EVERYTHING else (64,):
        if EVERYTHING or not has_fp8():
            multiply_packed(tokens, 128, 4, 2880, 2880, PLAIN)
        if has_fp8():
            multiply_packed(tokens, 128, 4, 2880, 2880, FP8_TOKEN)
    # Qwen3-30B-A3B in int4, with inputs in the model's dtype and in FP8.
    gptq = packed_weight(UINT4, 8, 2048, 128, BF16)
    for tokens in (1, 64, 256, 512, 8192) if EVERYTHING else (64,):
        multiply_stacked(tokens, 128, 8, 2048, 768, gptq, PLAIN)
        if has_fp8() and (EVERYTHING or tokens == 64):
            multiply_stacked(tokens, 128, 8, 2048, 768, gptq, FP8_TOKEN)
    if EVERYTHING:
        for tokens in (1, 64):
            multiply_stacked(tokens, 128, 8, 2048, 768, gptq, PLAIN, ordered=True)
        nvfp4 = packed_weight(E2M1, 8, 2048, 16, INT32)
        for packed in (nvfp4, packed_weight(INT8, 8, 2048, 0, BF16), packed_weight(NF4, 8, 2048, 64, FP32)):
            for tokens in (1, 64, 512, 8192):
                multiply_stacked(tokens, 128, 8, 2048, 704, packed, PLAIN)
        # Ends of rows with 192 and 128 inputs, and tiles of 32 and 64 rows.
        multiply_packed(256, 32, 4, 2880, 704, PLAIN)
        multiply_packed(128, 32, 4, 2880, 384, PLAIN, FP16)
        if has_fp8():
            multiply(1024, 32, 8, 7168, 2048, E4M3, blocks=True)
            multiply(1024, 32, 8, 7168, 2048, E4M3, blocks=True, model=FP32)
            multiply(1024, 8, 2, 4096, 14336, E4M3, model=FP32)
        multiply_packed(16, 8, 2, 224, 96, PLAIN, FP32)
        multiply_packed(64, 2, 2, 224, 96, PLAIN, FP16)


def choose(rule: RoutingRule) -> None:
    logits, live = cuda(64, rule.experts, dtype=FP32), cuda(64, dtype=torch.bool)
    route(logits, rule, cuda(rule.experts, dtype=FP32) if rule.groups > 1 else None, live)
    route(logits, rule)


def multiply(
    tokens: int,
    count: int,
    active: int,
    hidden: int,
    channels: int,
    dtype: torch.dtype,
    activation: GatedActivation = SWIGLU,
    biased: bool = False,
    blocks: bool = False,
    model: torch.dtype = BF16,
) -> None:
    """`model`: dtype of results of weights in 8 bits."""
    fmt = {E4M3: FP8_TOKEN, torch.int8: INT8_TOKEN}.get(dtype, PLAIN)
    scaled = fmt is not PLAIN
    model = model if scaled else dtype
    weights = ExpertWeights(
        cuda(count, 2 * channels, hidden, dtype=dtype),
        cuda(count, hidden, channels, dtype=dtype),
        cuda(count, 2 * channels, dtype=FP32) if scaled else None,
        cuda(count, hidden, dtype=FP32) if scaled else None,
    )
    if blocks:
        of_c, of_f = hidden // 128, channels // 128
        scales = cuda(count, 2 * of_f, of_c, dtype=FP32), cuda(count, of_c, of_f, dtype=FP32)
        weights = replace(weights, up_scale=scales[0], down_scale=scales[1], block=(128, 128))
    bias = ExpertBias(cuda(count, 2 * channels, dtype=model), cuda(count, hidden, dtype=model)) if biased else None
    x = Activation(fmt, cuda(tokens, hidden, dtype=dtype), cuda(tokens, 1, dtype=FP32) if scaled else None)
    routing = Routing(cuda(tokens, active, dtype=torch.int32), cuda(tokens, active, dtype=FP32))
    gated_experts(x, routing, weights, activation, bias, between=fmt, dtype=model)


def multiply_packed(
    tokens: int,
    count: int,
    active: int,
    hidden: int,
    channels: int,
    fmt: ActFormat,
    model: torch.dtype = BF16,
) -> None:
    """Experts in MXFP4 with biases and a clamped activation."""
    weights = PackedExperts(
        E2M1,
        cuda(count, 2 * channels, hidden // 8, dtype=torch.int32),
        cuda(count, hidden, channels // 8, dtype=torch.int32),
        cuda(count, len(list(spans(hidden))), 2 * channels, dtype=torch.int64),
        cuda(count, len(list(spans(channels))), hidden, dtype=torch.int64),
    )
    bias = ExpertBias(cuda(count, 2 * channels, dtype=model), cuda(count, hidden, dtype=model))
    scale = None if fmt is PLAIN else cuda(tokens, 1, dtype=FP32)
    x = Activation(fmt, cuda(tokens, hidden, dtype=fmt.dtype or model), scale)
    routing = Routing(cuda(tokens, active, dtype=torch.int32), cuda(tokens, active, dtype=FP32))
    packed_gated_experts(x, routing, weights, CLAMPED, bias, between=fmt, dtype=model)


def multiply_stacked(
    tokens: int,
    count: int,
    active: int,
    hidden: int,
    channels: int,
    like: PackedWeight,
    fmt: ActFormat,
    ordered: bool = False,
) -> None:
    """Experts in the format of `like`, with scales of a row if these are words of E4M3, as in NVFP4. `ordered`: with
    act-order."""

    def stacked(outputs: int, inputs: int) -> PackedWeight:
        one = packed_weight(like.format, outputs, inputs, like.group, like.scale.dtype)
        tensors = {"codes": cuda(count, *one.codes.shape, dtype=INT32)}
        for name in ("scale", "zero"):
            if (x_OG := getattr(one, name)) is not None:
                tensors[name] = empty_by_group(count, *x_OG.shape, dtype=x_OG.dtype, device=x_OG.device)
        row_scale = cuda(count, outputs, dtype=FP32) if like.scale.dtype is INT32 else None
        return replace(one, **tensors, row_scale=row_scale)

    order_EC = cuda(count, hidden, dtype=torch.int32) if ordered else None
    weights = StackedExperts(stacked(2 * channels, hidden), stacked(hidden, channels), order_EC)
    scale = None if fmt is PLAIN else cuda(tokens, 1, dtype=FP32)
    x = Activation(fmt, cuda(tokens, hidden, dtype=fmt.dtype or BF16), scale)
    routing = Routing(cuda(tokens, active, dtype=torch.int32), cuda(tokens, active, dtype=FP32))
    stacked_gated_experts(x, routing, weights, SWIGLU, between=fmt, dtype=BF16)
