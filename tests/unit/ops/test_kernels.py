"""Each kernel against its torch reference, with random inputs and poisoned outputs.

Kernels run compiled on a GPU, or in Triton's interpreter if TRITON_INTERPRET=1 is set before Triton is imported
(tests/test_in_interpreter.py starts such a process).
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("kernels need a GPU or TRITON_INTERPRET=1", allow_module_level=True)

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from dovetail.core.interfaces import (  # noqa: E402
    PLAIN,
    ActFormat,
    AttentionLayer,
    BatchMeta,
    KVGroup,
    Plane,
    QKNorm,
    Rope,
    Sums,
)
from dovetail.core.memory.pools import make_pools  # noqa: E402
from dovetail.core.ops.activations import gelu_reference  # noqa: E402
from dovetail.core.ops.bitmask import apply_bitmask_reference  # noqa: E402
from dovetail.core.ops.formats import encode_reference, plan_emit, sums_of  # noqa: E402
from dovetail.core.ops.gated import gelu_and_mul_reference, silu_and_mul_reference  # noqa: E402
from dovetail.core.ops.kernels.activations import gelu_triton  # noqa: E402
from dovetail.core.ops.kernels.bitmask import apply_bitmask_triton  # noqa: E402
from dovetail.core.ops.kernels.decoded_matmul import decoded_matmul_triton, dequantize_triton  # noqa: E402
from dovetail.core.ops.kernels.e4m3 import decode_e4m3, decode_e4m3_words  # noqa: E402
from dovetail.core.ops.kernels.formats import encode_plain, encode_triton  # noqa: E402
from dovetail.core.ops.kernels.gated import gelu_and_mul_triton, silu_and_mul_triton  # noqa: E402
from dovetail.core.ops.kernels.kv_write import rope_kv_write_triton  # noqa: E402
from dovetail.core.ops.kernels.layernorm import layer_norm_triton  # noqa: E402
from dovetail.core.ops.kernels.matmul import matmul_triton, rescale_triton  # noqa: E402
from dovetail.core.ops.kernels.norm import rms_norm_triton  # noqa: E402
from dovetail.core.ops.kernels.wide_norm import wide_qk_norm_triton  # noqa: E402
from dovetail.core.ops.kv_write import rope_kv_write_reference  # noqa: E402
from dovetail.core.ops.layernorm import layer_norm_reference  # noqa: E402
from dovetail.core.ops.matmul import matmul_reference  # noqa: E402
from dovetail.core.ops.norm import rms_norm_reference  # noqa: E402
from dovetail.core.ops.padding import readable_rows  # noqa: E402
from dovetail.core.ops.tiles import MatmulTile  # noqa: E402
from dovetail.core.ops.wide_norm import wide_qk_norm_reference  # noqa: E402
from dovetail.core.testing.interpreter import mend_interpreter  # noqa: E402
from dovetail.plugins.quant.fp8.format import FP8_TOKEN  # noqa: E402
from dovetail.plugins.quant.int4.order import set_order, with_order  # noqa: E402
from dovetail.plugins.quant.int8.format import INT8_TOKEN  # noqa: E402

if INTERPRETED:
    mend_interpreter()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
# The interpreter truncates float32 to bfloat16 instead of rounding, so float16 replaces it there.
DTYPES = (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


@pytest.fixture(autouse=True)
def fresh_random_and_poison():
    """Use torch's deterministic mode, which fills new tensors with NaN or the largest integer, to expose missing
    writes."""
    torch.seed()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@triton.jit
def encode_half_groups(x_GC, scale_in):
    """Third-party format: float16, with each group divided by its largest magnitude."""
    scale_G = tl.maximum(tl.max(tl.abs(x_GC), axis=1), 1e-6)
    return (x_GC / scale_G[:, None]).to(tl.float16), scale_G


@triton.jit
def encode_static(x_GC, scale_in):
    return (x_GC / scale_in).to(tl.float16), scale_in


def half_groups_reference(x_TC: torch.Tensor, group: int = 32):
    x_TGC = torch.nn.functional.pad(x_TC, (0, -x_TC.shape[1] % group)).unflatten(1, (-1, group))
    scale_TG = x_TGC.abs().amax(-1).clamp(min=1e-6)
    return (x_TGC / scale_TG[:, :, None]).flatten(1)[:, : x_TC.shape[1]].half(), scale_TG


def formats(columns: int) -> tuple[ActFormat, ...]:
    group = dict(dtype=torch.float16, group=32, encode=encode_half_groups, reference=half_groups_reference)
    static = torch.tensor([0.37], device=DEVICE)
    zeros = torch.full((13,), columns, device=DEVICE)
    order = torch.cat([torch.arange(columns, device=DEVICE), zeros])[torch.randperm(columns + 13, device=DEVICE)]
    ordered = dict(perm=order, places=order.argsort(stable=True).int())
    return (
        ActFormat("ordered", encode=encode_plain, reference=lambda x: (x, None), **ordered),
        replace(INT8_TOKEN, name="ordered_scaled", pre_scale=torch.rand(columns, device=DEVICE) + 0.5, **ordered),
        ActFormat("group_row", scale_layout="row", sums=Sums(64), **group),
        ActFormat("group_column", scale_layout="column", pre_scale=torch.rand(columns, device=DEVICE) + 0.5, **group),
        ActFormat(
            "static",
            dtype=torch.float16,
            group="tensor",
            static_scale=static,
            encode=encode_static,
            reference=lambda x: ((x / static).half(), None),
        ),
    )


def assert_near(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert got.shape == expected.shape and got.dtype == expected.dtype
    error = (got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)
    assert error <= tolerance, f"relative error {error:.2e}"  # NaN fails too


def assert_same_bundle(got, expected, emit, dtype: torch.dtype) -> None:
    for fmt in emit:
        if fmt.dtype == torch.int8:
            # A value halfway between two integers may be rounded either way.
            assert (got[fmt].values.int() - expected[fmt].values.int()).abs().max() <= 1 + (dtype != torch.float32)
        assert_near(got[fmt].values, expected[fmt].values, max(TOLERANCE[dtype], 1e-3 if fmt.dtype else 0) * 5)
        if expected[fmt].scale is not None:
            assert_near(got[fmt].scale, expected[fmt].scale, TOLERANCE[dtype] * 2)
            scale = got[fmt].scale
            assert (scale.t() if fmt.scale_layout == "column" else scale).is_contiguous()
        if fmt.sums:
            assert_sums(got[fmt].values, got[fmt].sums, fmt.sums.columns)


def assert_sums(values_TC: torch.Tensor, sums_TS: torch.Tensor, width: int) -> None:
    """Parts may be rounded otherwise, as the interpreter does, but add up to the same, and come in pairs."""
    got_TRN, expected_TRN = (x.unflatten(1, (-1, 8)) for x in (sums_TS, sums_of(values_TC, width)))
    assert got_TRN.shape == expected_TRN.shape and torch.equal(got_TRN[:, :, 0:6:2], got_TRN[:, :, 1:6:2])
    got_TR, expected_TR = (x.double().sum(2) / 2 for x in (got_TRN, expected_TRN))
    torch.testing.assert_close(got_TR, expected_TR, rtol=1e-5, atol=1e-4)


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "with_residual"), [(24, True), (1440, False), (1440, True)])
def test_rms_norm(dtype, columns, with_residual):
    # With a residual, x is a part of wider rows.
    x, weight = random(5, columns + 8 * with_residual, dtype=dtype)[:, :columns], random(columns, dtype=dtype)
    residual = random(5, columns, dtype=dtype) if with_residual else None
    for extra in ((), (INT8_TOKEN,), *((fmt,) for fmt in formats(columns)), formats(columns)):
        emit = (PLAIN, *extra)
        expected, expected_sum = rms_norm_reference(x, residual, weight, 1e-5, emit)
        got, got_sum = rms_norm_triton(x, residual, weight, 1e-5, emit)
        assert_same_bundle(got, expected, emit, dtype)
        assert torch.equal(got_sum, expected_sum)
        scale = (torch.rand(5, 1, device=DEVICE) + 0.5, torch.rand(columns, device=DEVICE) + 0.5)
        expected, expected_sum = rms_norm_reference(x, residual, weight, 1e-5, emit, scale)
        got, got_sum = rms_norm_triton(x, residual, weight, 1e-5, emit, scale)
        assert_same_bundle(got, expected, emit, dtype)
        # A fused multiply-add rounds float32 once less, so a number in the middle may round to its other neighbour.
        assert_near(got_sum, expected_sum, TOLERANCE[dtype])
    # A norm before the addition, and float32 weights, whose product alone is rounded.
    wide, first = weight.float() + 1, (random(columns, dtype=torch.float32), 1e-6)
    expected, expected_sum = rms_norm_reference(x, residual, wide, 1e-5, (PLAIN,), scale, first)
    got, got_sum = rms_norm_triton(x, residual, wide, 1e-5, (PLAIN,), scale, first)
    assert_same_bundle(got, expected, (PLAIN,), dtype)
    assert_near(got_sum, expected_sum, TOLERANCE[dtype])
    # A sum that is not normalized.
    for after in (None, first):
        expected, expected_sum = rms_norm_reference(x, residual, None, 0.0, (PLAIN, INT8_TOKEN), after=after)
        got, got_sum = rms_norm_triton(x, residual, None, 0.0, (PLAIN, INT8_TOKEN), after=after)
        assert_same_bundle(got, expected, (PLAIN, INT8_TOKEN), dtype)
        assert_near(got_sum, expected_sum, TOLERANCE[dtype])
    alone, _ = rms_norm_triton(x, residual, weight, 1e-5, (INT8_TOKEN,))
    with pytest.raises(KeyError, match="plain"):
        alone[PLAIN]


@pytest.mark.parametrize("norm", (wide_qk_norm_triton, wide_qk_norm_reference))
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_over_all_heads_of_q_and_of_k(norm, dtype):
    """Against float64, for all heads, and for the half of them that one of two ranks has."""
    q, k, v, eps = 72, 24, 24, 1e-5
    qkv, weight = random(5, q + k + v, dtype=dtype), random(q + k, dtype=torch.float32)
    parts = qkv.double().split((q, k, v), dim=1)
    normed = [part * (part.square().mean(1, keepdim=True) + eps).rsqrt() for part in parts[:2]]
    expected = [*(x * w.double() for x, w in zip(normed, weight.split((q, k)), strict=True)), parts[2]]

    got = norm(qkv.clone(), weight, (q, k), eps).split((q, k, v), dim=1)
    squares = torch.stack([part.square().sum(1) for part in parts[:2]], 1).float()
    half = torch.cat([part[:, : part.shape[1] // 2] for part in qkv.split((q, k, v), dim=1)], 1)
    weights = torch.cat([part[: len(part) // 2] for part in weight.split((q, k))])
    on_rank = norm(half, weights, (q // 2, k // 2), eps, squares, (q, k)).split((q // 2, k // 2, v // 2), dim=1)

    for whole, own, value in zip(got, on_rank, expected, strict=True):
        assert_near(whole, value.to(dtype), TOLERANCE[dtype])
        assert_near(own, value[:, : value.shape[1] // 2].to(dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [24, 1056, 2500])
def test_gated_activations(dtype, columns):
    gate_up = random(4, 2 * columns, dtype=dtype)
    wanted, got = gelu_and_mul_reference(gate_up), gelu_and_mul_triton(gate_up)
    assert_same_bundle(got, wanted, (PLAIN,), dtype)
    for extra in ((), (INT8_TOKEN,), *((fmt,) for fmt in formats(columns))):
        emit = (PLAIN, *extra)
        assert_same_bundle(silu_and_mul_triton(gate_up, emit), silu_and_mul_reference(gate_up, emit), emit, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [24, 256, 1440])
@pytest.mark.parametrize("with_residual", [True, False])
def test_layer_norm(dtype, columns, with_residual):
    x, weight, bias = random(5, columns, dtype=dtype) + 3, random(columns, dtype=dtype), random(columns, dtype=dtype)
    residual = random(5, columns, dtype=dtype) if with_residual else None
    emits = [(PLAIN, *extra) for extra in ((), (INT8_TOKEN,), *((fmt,) for fmt in formats(columns)), formats(columns))]
    for emit, plus in (*((emit, None) for emit in emits), (emits[1], random(5, columns, dtype=dtype))):
        expected, expected_sum = layer_norm_reference(x, residual, weight, bias, 1e-5, emit, plus)
        got, got_sum = layer_norm_triton(x, residual, weight, bias, 1e-5, emit, plus)
        assert_same_bundle(got, expected, emit, dtype)
        assert torch.equal(got_sum, expected_sum)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [24, 1056, 2500])
@pytest.mark.parametrize("tanh", [True, False])
def test_gelu(dtype, columns, tanh):
    x = 3 * random(4, columns, dtype=dtype)
    for extra in ((), (INT8_TOKEN,), *((fmt,) for fmt in formats(columns))):
        emit = (PLAIN, *extra)
        assert_same_bundle(gelu_triton(x, tanh, emit), gelu_reference(x, tanh, emit), emit, dtype)


@pytest.mark.parametrize("fmt", [PLAIN, FP8_TOKEN], ids=lambda fmt: fmt.name)
def test_the_order_of_act_order_is_fused(fmt):
    ordered, order = with_order(fmt, 40, torch.device(DEVICE)), torch.cat([torch.randperm(33), torch.full((7,), 33)])
    set_order(ordered, order[torch.randperm(40)])
    assert plan_emit((ordered,)).fused is ordered
    x = random(3, 33, dtype=torch.float32)
    got, expected = encode_triton(x, ordered), encode_reference(x, ordered)
    assert_near(got.values.float(), expected.values.float(), 2e-2 if fmt.dtype else 0)


@pytest.mark.parametrize("columns", [24, 1056])
def test_encode_alone(columns):
    x = random(3, columns, dtype=torch.float32)
    summed = replace(FP8_TOKEN, sums=Sums(128))
    for fmt in (INT8_TOKEN, FP8_TOKEN, summed, *formats(columns)):
        got, expected = encode_triton(x, fmt), encode_reference(x, fmt)
        # A value halfway between two 8-bit floats may be rounded either way.
        assert_near(got.values, expected.values, 2e-2 if fmt.dtype is torch.float8_e4m3fn else 5e-3)
        if fmt.sums:
            assert_sums(got.values, got.sums, fmt.sums.columns)
        if fmt.group != "none":
            assert_near(got.scale, expected.scale, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary_dim", "norm"),
    [(8, 2, 64, 64, False), (5, 1, 24, 24, True), (4, 4, 80, 32, True), (3, 3, 16, 0, True), (6, 2, 32, 0, False)],
)
def test_rope_kv_write(dtype, heads, kv_heads, dim, rotary_dim, norm):
    tokens, pages, page_tokens = 7, 4, 8
    plane = (kv_heads, dim)
    group = KVGroup(0, (0, 1), (Plane("k", plane, dtype), Plane("v", plane, dtype)), page_tokens=page_tokens)
    layer = AttentionLayer(1, 0, 1, heads, kv_heads, dim, dim**-0.5)
    qkv = random(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    rope = Rope(random(50, rotary_dim, dtype=torch.float32)) if rotary_dim else None
    # float32 weights multiply before the values are rounded.
    weight_dtype = dtype if rotary_dim else torch.float32
    weights = (random(dim, dtype=weight_dtype), random(dim, dtype=weight_dtype))
    qk_norm = QKNorm(*weights, 1e-6) if norm else None
    nothing = torch.empty(0, device=DEVICE)
    meta = BatchMeta(
        row_start_B1=nothing,
        kv_len_B=nothing,
        slots_B=nothing,
        positions_T=torch.randint(0, 50, (tokens,), device=DEVICE),
        rows_T=nothing,
        page_table_BP=nothing,
        write_T=torch.randperm((pages + 1) * page_tokens, device=DEVICE)[:tokens],
        page_tokens=page_tokens,
    )
    outcomes = []
    for write in (rope_kv_write_reference, rope_kv_write_triton):
        pool = make_pools([group], {0: pages}, DEVICE)[0]
        for tensor in pool.planes.values():
            tensor.fill_(7.0)
        outcomes.append((write(layer, meta, pool, qkv, rope, qk_norm), pool.planes["k"], pool.planes["v"]))
    for expected, got in zip(*outcomes, strict=True):
        assert_near(got, expected, TOLERANCE[dtype])
    for expected, got in zip(outcomes[0][1:], outcomes[1][1:], strict=True):
        assert torch.equal(expected == 7.0, got == 7.0)  # only the given slots are written


def test_no_tokens():
    x = random(0, 64, dtype=torch.float32)
    bundle, _ = rms_norm_triton(x, None, random(64, dtype=torch.float32), 1e-5, (PLAIN, INT8_TOKEN))
    assert bundle[PLAIN].values.shape == (0, 64) and bundle[INT8_TOKEN].scale.shape == (0, 1)


# Whole tiles, split-K, Stream-K that cuts tiles anywhere, Stream-K of whole tiles, and a single program.
CUTS = (
    MatmulTile(16, 32, 32),
    MatmulTile(16, 32, 32, split=3),
    MatmulTile(16, 32, 32, programs=7),
    MatmulTile(16, 32, 32, programs=4),
    MatmulTile(32, 64, 64, programs=1),
)


@pytest.mark.parametrize("tile", CUTS, ids=lambda tile: f"{tile.split}-{tile.programs}")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
def test_matmul(dtype, tile):
    counts = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    shapes = ((1, 96, 64, {}), (5, 160, 130, {"tma": True}), (40, 64, 96, {"swap": False}))
    for i, (tokens, inputs, outputs, variant) in enumerate(shapes):
        x_TI, weight_OI = (torch.randn(n, inputs, device=DEVICE).to(dtype) for n in (tokens, outputs))
        x_scale, weight_scale, bias_O = (torch.rand(n, device=DEVICE) + 0.5 for n in ((tokens, 1), outputs, outputs))
        every = ((), (x_scale, weight_scale[:1]), (x_scale[0], weight_scale, bias_O))
        # The interpreter is slow, so there each shape is combined with each epilogue for only some tile.
        for ends in every[(i + CUTS.index(tile)) % 3 :][:1] if INTERPRETED else every:
            got = matmul_triton(
                x_TI, weight_OI, replace(tile, **variant), counts, *ends, dtype=torch.float32, imprecise=32
            )
            expected = matmul_reference(x_TI, weight_OI, *ends, dtype=torch.float32)
            assert_near(got, expected, 1e-6 if INTERPRETED else 1e-3)
            assert not counts.any()


@pytest.mark.parametrize(
    "tile", [*CUTS[2:4], MatmulTile(64, 64, 64, swap=False)], ids=lambda t: f"{t.split}-{t.programs}"
)
def test_matmul_with_scales_of_blocks(tile):
    """Blocks that outputs and inputs do not fill."""
    counts = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    x_TI, weight_OI = (torch.randn(n, 336, device=DEVICE).to(torch.float8_e4m3fn) for n in (5, 200))
    x_scale_T1, scale, bias_O = torch.rand(5, 1), torch.rand(2, 3), torch.randn(200)
    x_scale_T1, scale, bias_O = (each.to(DEVICE) for each in (x_scale_T1, scale, bias_O))
    args = x_TI, weight_OI, tile, counts, x_scale_T1, scale, bias_O, torch.float32, 128, (128, 128)
    got = matmul_triton(*args)
    spread_OI = scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :336]
    expected = (x_TI.double() @ (weight_OI.double() * spread_OI).t()) * x_scale_T1 + bias_O
    assert_near(got, expected.float(), 1e-6 if INTERPRETED else 1e-3)
    assert torch.equal(got, matmul_triton(*args)) and not counts.any()


@pytest.mark.parametrize("tile", CUTS, ids=lambda tile: f"{tile.split}-{tile.programs}")
def test_int8_matmul(tile):
    """Integers are summed exactly; few rows by the kernel, many by the library and a pass that scales them."""
    counts = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    x_TI, weight_OI = (torch.randint(-127, 128, (n, 160), device=DEVICE).to(torch.int8) for n in (5, 130))
    ends = torch.rand(5, 1, device=DEVICE), torch.rand(130, device=DEVICE), random(130, dtype=torch.float16)
    sums_TO = (x_TI.double() @ weight_OI.double().t()).int()
    for x_scale, weight_scale, bias_O in (ends, (*ends[:2], None)):
        expected = sums_TO.double() * x_scale * weight_scale + (0 if bias_O is None else bias_O)
        got = matmul_triton(x_TI, weight_OI, tile, counts, x_scale, weight_scale, bias_O, torch.float32)
        assert_near(got, expected.float(), 1e-6)
        assert_near(rescale_triton(sums_TO, x_scale, weight_scale, bias_O, torch.float32), expected.float(), 1e-6)
        assert not counts.any()


# The interpreter does not support inline assembly.
DECODERS = [(decode_e4m3, dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
DECODERS += [] if INTERPRETED else [(decode_e4m3_words, dtype) for dtype in (torch.float16, torch.bfloat16)]


@pytest.mark.parametrize(("decode", "dtype"), DECODERS, ids=str)
def test_all_e4m3_codes(decode, dtype):
    """Subnormal codes, both NaN and both zeros included, next to every other code."""
    codes = torch.stack((torch.arange(256), torch.randint(256, (256,))), dim=1).to(torch.uint8).view(2, 256).to(DEVICE)
    expected = codes.view(torch.float8_e4m3fn).to(dtype)
    got = dequantize_triton(codes, torch.ones(2, device=DEVICE), decode, dtype)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_dequantized_rows_are_scaled():
    weight_OI, scale_O = random(5, 96, dtype=torch.float8_e4m3fn), torch.rand(5, device=DEVICE) + 0.5
    got = dequantize_triton(weight_OI.view(torch.uint8), scale_O, decode_e4m3, torch.float32)
    torch.testing.assert_close(got, weight_OI.float() * scale_O[:, None], rtol=0, atol=0)


@pytest.mark.parametrize("tile", CUTS[1:], ids=lambda tile: f"{tile.split}-{tile.programs}")
def test_decoded_matmul(tile):
    counts = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    for i, (tokens, inputs, outputs) in enumerate(((1, 96, 64), (5, 160, 130), (40, 40, 96))):
        dtype = DTYPES[(i + CUTS.index(tile)) % len(DTYPES)]
        x_TI, weight_OI = random(tokens, inputs, dtype=dtype), random(outputs, inputs, dtype=torch.float8_e4m3fn)
        scale_O, bias_O = torch.rand(outputs, device=DEVICE) + 0.5, random(outputs, dtype=dtype)
        decode = decode_e4m3 if INTERPRETED or dtype == torch.float32 else decode_e4m3_words
        for bias in (bias_O, None):
            got = decoded_matmul_triton(x_TI, weight_OI.view(torch.uint8), tile, decode, counts, scale_O, bias)
            assert_near(got, matmul_reference(x_TI, weight_OI, None, scale_O, bias), TOLERANCE[dtype])
            assert not counts.any()


def test_matmul_ignores_what_is_in_memory_after_the_last_row():
    whole = torch.full((16, 160), torch.nan, device=DEVICE, dtype=torch.float16)
    x_TI = whole[:5]
    x_TI.normal_()
    weight_OI = random(64, 160, dtype=torch.float16)
    tile = MatmulTile(16, 32, 32, tma=True)
    assert readable_rows(x_TI, tile.tokens) == 16
    got = matmul_triton(x_TI, weight_OI, tile)
    assert torch.equal(got, matmul_triton(x_TI.clone(), weight_OI, tile)) and got.isfinite().all()


@pytest.mark.parametrize("vocab", [5, 32, 129, 5000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_apply_bitmask(dtype, vocab):
    bits = torch.randint(-(2**31), 2**31, (3, -(-vocab // 32) + 1), dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([4, 0, 2], device=DEVICE)
    logits = random(6, vocab + 7, dtype=dtype)
    logits[1, 0] = float("nan")  # a row without a mask
    outcomes = []
    for apply in (apply_bitmask_reference, apply_bitmask_triton):
        whole = logits.clone()
        apply(whole[:, :vocab], bits, rows)
        outcomes.append(whole)
    expected, got = outcomes
    assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(expected[:, vocab:], logits[:, vocab:])
    for m, row in enumerate(rows.tolist()):
        for token in range(vocab):
            allowed = bits[m, token // 32].item() >> token % 32 & 1
            assert expected[row, token] == (logits[row, token] if allowed else float("-inf"))
