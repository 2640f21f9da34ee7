"""The same models compiled on a GPU: Triton kernels, bf16, int8 matmuls with few rows."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from dovetail.core.interfaces import PLAIN, Activation, LinearShape
from dovetail.core.layers.packed import PackedLinear
from dovetail.core.ops import encode, rms_norm
from dovetail.core.ops.choices import Choices, temporarily
from dovetail.core.ops.formats import with_sums
from dovetail.core.ops.kernels.matmul import matmul_triton
from dovetail.core.ops.matmul import block_scaled_reference, matmul, matmul_reference, scaled_matmul, unscaled_matmul
from dovetail.core.ops.packed_matmul import packed_matmul_reference
from dovetail.core.ops.padding import empty_rows
from dovetail.core.ops.tile_choice import LIBRARY_ROWS, OP, matmul_key, runs
from dovetail.core.ops.tiles import MOST_SHARED_TILES, MatmulTile, specialized_tiles
from dovetail.core.ops.weight_formats import INT4, UINT4
from dovetail.core.tuning.matmul import tiles_of
from dovetail.core.tuning.packages import builtin_table
from dovetail.plugins.quant.config import FP8Config, Int8Config
from dovetail.plugins.quant.fp8.format import FP8_TOKEN
from dovetail.plugins.quant.fp8.quantizer import FP8
from dovetail.plugins.quant.int8.format import INT8_TOKEN
from dovetail.plugins.quant.int8.quantizer import Int8

from .checkpoints import VARIANTS, random_tokens, reference_logits, save_random
from .driver import CPU, Driver, load_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
GPU = torch.device("cuda")
on_hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="for Hopper"
)
SHIPPED = builtin_table()
TILES = tiles_of(SHIPPED)
TOKENS = random_tokens(150, seed=5)


def logits_of(model) -> torch.Tensor:
    """Return logits of a first chunk, a second chunk, and three single-token decode rows with a second prompt."""
    driver = Driver(model)
    found = [*driver.step([("a", TOKENS[:90])]), *driver.step([("a", TOKENS[90:140])])]
    for at in range(140, len(TOKENS)):
        found.append(driver.step([("a", TOKENS[at : at + 1]), (f"beside {at}", TOKENS[:7])], 1, slack=5, padding=3)[0])
    return torch.cat(found).cpu()


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_equals_transformers(variant, tmp_path):
    reference = save_random(tmp_path, variant)
    expected = reference_logits(reference, TOKENS)
    torch.testing.assert_close(logits_of(load_model(tmp_path, device=GPU)), expected, atol=5e-4, rtol=0)


@pytest.mark.parametrize("variant", ["gqa", "mistral_window", "tied"])
def test_bfloat16_is_as_near_as_bfloat16_gets(variant, tmp_path):
    """The test is teacher-forced, so one rounding does not change the text. The bound is the same on the CPU."""
    reference = save_random(tmp_path, variant)
    expected = reference_logits(reference, TOKENS)
    on_gpu, on_cpu = (logits_of(load_model(tmp_path, device=d, dtype=torch.bfloat16)) for d in (GPU, CPU))
    gpu_error, cpu_error = ((got - expected).norm() / expected.norm() for got in (on_gpu, on_cpu))
    assert gpu_error < 1.5 * cpu_error + 1e-3


@pytest.mark.parametrize("tokens", [1, 16, 17, 33])
def test_int8_product_equals_the_cpu(tokens):
    torch.seed()
    x_TI, weight_OI = torch.randn(tokens, 256), torch.randn(96, 256)
    shape = LinearShape(256, 96, (96,), dtype=torch.float32)
    outcomes = []
    for device in (CPU, GPU):
        method = Int8(Int8Config()).linear("layers.0.mlp.down", shape)
        params = method.create(shape, device)
        method.load(params, slice(0, 96), {"weight": weight_OI})
        x = encode(x_TI.to(device), (INT8_TOKEN,))[INT8_TOKEN]
        outcomes.append(method.apply(params, x).cpu())
    assert (outcomes[0] - outcomes[1]).norm() / outcomes[0].norm() < 1e-3


def test_int8_model(tmp_path):
    save_random(tmp_path, "gqa", hidden_size=128, intermediate_size=256, head_dim=16)
    on_cpu, on_gpu = (logits_of(load_model(tmp_path, quantizer=Int8(Int8Config()), device=d)) for d in (CPU, GPU))
    assert (on_gpu - on_cpu).norm() / on_cpu.norm() < 0.02


def fp8_layer(inp: int, out: int, dtype: torch.dtype, config: FP8Config | None = None):
    shape = LinearShape(inp, out, (out,), dtype=dtype)
    method = FP8(config or FP8Config()).linear("layers.0.mlp.down", shape)
    params = method.create(shape, GPU)
    weight_OI = torch.randn(out, inp, device=GPU)
    method.load(params, slice(0, out), {"weight": weight_OI})
    return method, params, weight_OI


@pytest.mark.parametrize("tokens", [1, 16, 17, 33, 64, 65, 300])
@pytest.mark.parametrize(("inp", "out"), [(4096, 6144), (14336, 4096), (688, 1376), (4096, 28672)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fp8_product_equals_the_reference(tokens, inp, out, dtype):
    """Both sides use the same 8-bit numbers. They differ in order and precision of sums and in the last rounding."""
    torch.seed()
    method, params, _ = fp8_layer(inp, out, dtype)
    x_TI, bias_O = torch.randn(tokens, inp, device=GPU).to(dtype), torch.randn(out, device=GPU).to(dtype)
    x = encode(x_TI, (FP8_TOKEN,))[FP8_TOKEN]
    got = method.apply(params, x, bias_O)
    expected = matmul_reference(x.values, params["weight"], x.scale, params["scale"], bias_O, torch.float32)
    assert got.dtype is dtype
    assert (got.float() - expected).norm() / expected.norm() < 5e-3
    assert torch.equal(got, method.apply(params, x, bias_O)) and not params["counts"].any()


@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 100, 128, 129])
@pytest.mark.parametrize(("inp", "out"), [(4096, 6144), (688, 1376), (4096, 28672)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain_inputs_of_fp8_weights_equal_the_reference(tokens, inp, out, dtype):
    torch.seed()
    method, params, _ = fp8_layer(inp, out, dtype, FP8Config(activations="plain"))
    x_TI, bias_O = torch.randn(tokens, inp, device=GPU).to(dtype), torch.randn(out, device=GPU).to(dtype)
    x = Activation(PLAIN, x_TI)
    got = method.apply(params, x, bias_O)
    expected = matmul_reference(x_TI, params["weight"], None, params["scale"], bias_O, torch.float32)
    assert method.input is PLAIN and got.dtype is dtype
    assert (got.float() - expected).norm() / expected.norm() < 5e-3
    assert torch.equal(got, method.apply(params, x, bias_O)) and not params["counts"].any()


class Stored(PackedLinear):
    """Loads codes, scales and zeros as they are stored."""

    def load(self, params, part, tensors):
        self.store(params, part, tensors["codes"], tensors["scale"], tensors.get("zero"))


@on_hopper
@pytest.mark.parametrize("tokens", [1, 40, 64, 130, 300])
@pytest.mark.parametrize(("inp", "out", "group"), [(4096, 6144, 128), (688, 1376, 32), (14336, 4096, 0)])
@pytest.mark.parametrize("fmt", [INT4, UINT4], ids=lambda fmt: fmt.name)
@temporarily(Choices())
def test_packed_weights_multiply_inputs_of_which_the_norm_wrote_sums(fmt, inp, out, group, tokens):
    """The rule's tiles use sums wherever they are asked for, so that others give another result."""
    torch.seed()
    method = Stored(fmt, group, activations=FP8_TOKEN)
    params = method.create(LinearShape(inp, out, (out,), dtype=torch.bfloat16), GPU)
    tensors = {"codes": torch.randint(16, (out, inp), dtype=torch.uint8)}
    tensors["scale"] = torch.rand(params["scale"].shape, device=GPU) + 0.5
    if fmt.zero:
        tensors["zero"] = torch.randint(16, tensors["scale"].shape, device=GPU)
    method.load(params, slice(None), tensors)
    method.finish(params)
    # Inputs whose mean is not 0.
    x_TI, bias_O = torch.randn(tokens, inp, device=GPU).bfloat16() + 0.5, torch.randn(out, device=GPU).bfloat16()
    fmt = with_sums(method.input, method.sums)
    x = rms_norm(x_TI, None, torch.ones(inp, device=GPU).bfloat16(), 1e-5, (fmt,))[0][fmt]
    assert (x.sums is None) == (group == 32 or tokens == 1)
    expected = packed_matmul_reference(x.values, method.packed(params), bias_O, torch.float32, x.scale)
    if x.sums is not None:
        wrong = method.apply(params, replace(x, sums=2 * x.sums), bias_O)
        assert error_of(wrong, expected) > 0.05
    for given in (x, replace(x, sums=None)):
        got = method.apply(params, given, bias_O)
        assert error_of(got, expected) < 5e-3 and not params["counts"].any()
        assert torch.equal(got, method.apply(params, given, bias_O))


@pytest.mark.parametrize("key", TILES, ids=str)
@temporarily(Choices(SHIPPED.entries))
def test_measured_products_equal_the_reference(key):
    """Tuned tiles are used on the GPU for which they were measured; other GPUs use the rule or the library."""
    _, kind, out, inp = key
    torch.seed()
    for rows in {n for most in TILES[key] for n in (most, most // 2 + 1)}:
        x_TI = torch.randn(rows, inp, device=GPU, dtype=torch.bfloat16)
        if kind == "fp8":
            method, params, _ = fp8_layer(inp, out, torch.bfloat16)
            x = encode(x_TI, (FP8_TOKEN,))[FP8_TOKEN]
            got = method.apply(params, x)
            expected = matmul_reference(x.values, params["weight"], x.scale, params["scale"], dtype=torch.float32)
        else:
            weight_OI = torch.randn(out, inp, device=GPU, dtype=torch.bfloat16)
            counts = torch.zeros(MOST_SHARED_TILES, dtype=torch.int32, device=GPU)
            got = matmul(x_TI, weight_OI, counts=counts)
            expected = matmul_reference(x_TI, weight_OI, dtype=torch.float32)
            assert not counts.any()
        assert (got.float() - expected).norm() / expected.norm() < 5e-3


def error_of(got, expected):
    return float((got.float() - expected).norm() / expected.norm())


def library_calls(dtype, out, inp, rows, room):
    """Return (products of the library, their exact results, a function that draws other x), with NaN in the memory
    behind x if there is `room`, and else no such memory."""
    allocate = empty_rows if room else torch.empty
    x_TI = allocate(rows, inp, dtype=dtype, device=GPU)
    x_scale_T1 = allocate(rows, 1, dtype=torch.float32, device=GPU)
    for held in (x_TI, x_scale_T1):
        whole = torch.empty(0, dtype=held.dtype, device=GPU).set_(held.untyped_storage())
        whole.copy_(torch.full((len(whole),), torch.nan, device=GPU))
        assert (len(whole) > held.numel()) is room
    weight_OI = torch.randn(out, inp, device=GPU).to(dtype)
    counts = torch.zeros(MOST_SHARED_TILES, dtype=torch.int32, device=GPU)
    scale_O, one = torch.rand(out, device=GPU) + 0.5, torch.ones(1, device=GPU)
    bias_O = torch.randn(out, device=GPU)

    def draw():
        x_TI.copy_(torch.randn(rows, inp, device=GPU))
        x_scale_T1.uniform_(0.5, 1.5)

    if dtype.itemsize == 2:
        bias_O = bias_O.to(dtype)
        return (
            [lambda: matmul(x_TI, weight_OI, bias_O, counts)],
            [lambda: matmul_reference(x_TI, weight_OI, None, None, bias_O, torch.float32)],
            draw,
        )

    def scaled(to):
        return scaled_matmul(x_TI, weight_OI, x_scale_T1, scale_O, bias_O.to(to), to, counts)

    products = [lambda: scaled(torch.bfloat16), lambda: scaled(torch.float16)]
    exact = [lambda: matmul_reference(x_TI, weight_OI, x_scale_T1, scale_O, bias_O, torch.float32)] * 2
    if rows <= 256:
        products.append(lambda: unscaled_matmul(x_TI, weight_OI, one))
        exact.append(lambda: matmul_reference(x_TI, weight_OI, dtype=torch.float32))
    return products, exact, draw


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize(("rows", "more"), [(200, 256), (448, 512)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_the_library_multiplies_more_rows_than_there_are(dtype, rows, more, room):
    """Its results are those of as many rows as there are, up to rounding, also in a graph. NaN in the further rows does
    not reach the others."""
    torch.seed()
    out, inp, name = 6144, 4096, torch.cuda.get_device_properties(GPU).name
    key = matmul_key("fp8" if dtype.itemsize == 1 else "bf16", out, inp)
    products, exact, draw = library_calls(dtype, out, inp, rows, room)
    draw()
    expected = [reference() for reference in exact]
    with temporarily(Choices({(OP, name, key): {rows: None}})):
        plain = [product().float() for product in products]
    with temporarily(Choices({(OP, name, key): {rows: {LIBRARY_ROWS: more}}})):
        found = [product() for product in products]
        assert found[0].untyped_storage().nbytes() == more * out * 2, "rows of the library"
        for got, same, reference in zip(found, plain, expected, strict=True):
            assert got.shape == (rows, out) and bool(got.isfinite().all())
            assert error_of(got, reference) < 5e-3 and error_of(got, same) < 1e-2
        for product, reference in zip(products, exact, strict=True):
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = product()
            for _ in range(2):
                draw()
                graph.replay()
                assert error_of(captured, reference()) < 5e-3


EARLY = (
    MatmulTile(16, 64, 128, stages=2, prefetch=3),
    MatmulTile(16, 64, 256, stages=3, split=3, prefetch=5, prefetch_l2=2),
    MatmulTile(64, 128, 128, warps=8, stages=2, split=2, prefetch=4, prefetch_l2=6),
    MatmulTile(32, 64, 512, stages=2, split=7, prefetch=3),
    MatmulTile(128, 64, 128, stages=4, prefetch=6, prefetch_l2=1),
)
"""Tiles for FP8; with 16 bits, blocks have half as many inputs."""


def early_product(dtype, tile, tokens, out, inp):
    """Return (matmul with the tile, reference), both functions of x, and counters."""
    counts = torch.zeros(MOST_SHARED_TILES, dtype=torch.int32, device=GPU)
    weight_OI = torch.randn(out, inp, device=GPU).to(dtype)
    scales, bias_O = (torch.rand(tokens, 1, device=GPU), torch.rand(out, device=GPU)), torch.randn(out, device=GPU)
    if dtype.itemsize > 1:
        tile, scales = replace(tile, inputs=tile.inputs // 2), (None, None)

    def got(x_TI):
        return matmul_triton(x_TI, weight_OI, tile, counts, *scales, bias_O, torch.bfloat16)

    def expected(x_TI):
        return matmul_reference(x_TI, weight_OI, *scales, bias_O, torch.float32)

    return got, expected, counts


@on_hopper
@pytest.mark.parametrize("tile", EARLY, ids=lambda tile: f"{tile.tokens}x{tile.outputs}x{tile.inputs}-{tile.split}")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("out", "inp"), [(1280, 8192), (72, 176), (200, 4112)])
def test_prefetching_matmuls(dtype, tile, out, inp):
    """Sizes that tiles do not divide, more tokens than a tile has, and programs without a block."""
    torch.seed()
    for tokens in (1, tile.tokens, tile.tokens + 3):
        product, reference, counts = early_product(dtype, tile, tokens, out, inp)
        x_TI = torch.randn(tokens, inp, device=GPU).to(dtype)
        got, expected = product(x_TI), reference(x_TI)
        assert (got.float() - expected).norm() / expected.norm() < 5e-3
        assert torch.equal(got, product(x_TI)) and not counts.any()
        # What is in memory after the last row changes nothing.
        held_TI = torch.full((2 * tokens + tile.tokens, inp), torch.nan, device=GPU).to(dtype)
        held_TI[:tokens] = x_TI
        assert torch.equal(got, product(held_TI[:tokens])) and not counts.any()


SPECIALIZED = [
    changed
    for tile in specialized_tiles(192, 1)
    for changed in (tile, replace(tile, split=3), replace(tile, programs=7))
]


@on_hopper
@pytest.mark.parametrize("tile", SPECIALIZED, ids=lambda t: f"{t.tokens}x{t.outputs}x{t.inputs}-{t.split}-{t.programs}")
def test_specialized_matmuls(tile):
    """Sizes that tiles do not divide, fewer blocks than places, more tokens than a tile has, one program for many
    tiles."""
    torch.seed()
    for dtype, (out, inp) in itertools.product(
        (torch.bfloat16, torch.float16, torch.float8_e4m3fn), ((1280, 8192), (72, 176), (2008, 1040))
    ):
        for tokens in (1, tile.tokens - 1, 2 * tile.tokens + 3):
            multiply, reference, counts = early_product(dtype, tile, tokens, out, inp)
            x_TI = torch.randn(tokens, inp, device=GPU).to(dtype)
            got, expected = multiply(x_TI), reference(x_TI)
            assert (got.float() - expected).norm() / expected.norm() < 5e-3
            assert torch.equal(got, multiply(x_TI)) and not counts.any()


WITH_BLOCKS = [tile for tile in (*EARLY, *SPECIALIZED) if runs(tile, "fp8_block")]


@on_hopper
@pytest.mark.parametrize("tile", WITH_BLOCKS, ids=lambda t: f"{t.tokens}x{t.outputs}x{t.inputs}-{t.split}-{t.programs}")
def test_matmuls_with_scales_of_blocks(tile):
    """Blocks that outputs and inputs do not fill, and sums that would lose bits without float32."""
    torch.seed()
    counts = torch.zeros(MOST_SHARED_TILES, dtype=torch.int32, device=GPU)
    for out, inp in ((1280, 8192), (72, 176), (2008, 1040)):
        weight_OI, bias_O = torch.randn(out, inp, device=GPU).to(torch.float8_e4m3fn), torch.randn(out, device=GPU)
        scale = torch.rand(-(-out // 128), -(-inp // 128), device=GPU) + 0.5
        for tokens in (1, tile.tokens - 1, 2 * tile.tokens + 3):
            x_TI = torch.randn(tokens, inp, device=GPU).to(torch.float8_e4m3fn)
            x_scale_T1 = torch.rand(tokens, 1, device=GPU)
            args = x_TI, weight_OI, tile, counts, x_scale_T1, scale, bias_O, torch.float32, 128, (128, 128)
            got = matmul_triton(*args)
            expected = block_scaled_reference(x_TI, weight_OI, x_scale_T1, scale, bias_O, torch.float32)
            assert (got - expected).norm() / expected.norm() < 1e-3
            assert torch.equal(got, matmul_triton(*args)) and not counts.any()


@on_hopper
@pytest.mark.parametrize("tile", SPECIALIZED, ids=lambda t: f"{t.tokens}x{t.outputs}x{t.inputs}-{t.split}-{t.programs}")
def test_specialized_int8_matmuls(tile):
    """Integers are summed exactly."""
    if not runs(tile, "int8"):
        pytest.skip("Triton has no such instruction")
    torch.seed()
    counts = torch.zeros(MOST_SHARED_TILES, dtype=torch.int32, device=GPU)
    for out, inp in ((1280, 8192), (72, 176), (2008, 1040)):
        weight_OI = torch.randint(-127, 128, (out, inp), device=GPU).to(torch.int8)
        for tokens in (1, tile.tokens - 1, 2 * tile.tokens + 3):
            x_TI = torch.randint(-127, 128, (tokens, inp), device=GPU).to(torch.int8)
            scales = torch.rand(tokens, 1, device=GPU), torch.rand(out, device=GPU)
            args = x_TI, weight_OI, tile, counts, *scales, None, torch.float32
            expected = (x_TI.double() @ weight_OI.double().t()) * scales[0] * scales[1]
            assert torch.equal(matmul_triton(*args), matmul_triton(*args)) and not counts.any()
            torch.testing.assert_close(matmul_triton(*args).double(), expected, rtol=1e-6, atol=1e-6)


@on_hopper
@pytest.mark.parametrize("tile", EARLY[:3], ids=lambda tile: f"{tile.tokens}x{tile.outputs}x{tile.inputs}-{tile.split}")
def test_prefetching_matmuls_wait_for_their_input(tile):
    """Each matmul reads the output of its preceding kernel, a norm that allows the next launch at its start."""
    torch.seed()
    size = 1024
    steps = [early_product(torch.bfloat16, tile, 16, size, size) for _ in range(12)]
    norm_C = torch.ones(size, device=GPU, dtype=torch.bfloat16)
    x_TC = torch.randn(16, size, device=GPU, dtype=torch.bfloat16)

    def run(pause=lambda: None):
        values = x_TC
        for product, _, _ in steps:
            values = rms_norm(values, None, norm_C, 1e-5, (PLAIN,))[0][PLAIN].values
            pause()
            values = product(values)
            pause()
        return values

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(30):
        x_TC.normal_()
        graph.replay()
        assert torch.equal(out, run(torch.cuda.synchronize))


def test_fast_sums_cost_little_beside_the_rounding_to_8_bits():
    torch.seed()
    x_TI = torch.randn(512, 14336, device=GPU, dtype=torch.bfloat16)
    method, params, weight_OI = fp8_layer(14336, 4096, torch.bfloat16)
    x, exact = encode(x_TI, (FP8_TOKEN,))[FP8_TOKEN], x_TI.double() @ weight_OI.double().t()
    errors = []
    for method.fast_accum in (False, True):
        errors.append(float((method.apply(params, x).double() - exact).norm() / exact.norm()))
    assert errors[1] < 1.05 * errors[0] < 0.045, f"exact and fast sums are off by {errors}"


def test_fp8_layer_in_a_graph():
    torch.seed()
    method, params, _ = fp8_layer(4096, 4096, torch.bfloat16)
    x_TI = torch.randn(7, 4096, device=GPU, dtype=torch.bfloat16)

    def run():
        return method.apply(params, encode(x_TI, (FP8_TOKEN,))[FP8_TOKEN])

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(3):
        x_TI.normal_()
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, run())


def test_fp8_model_is_as_near_as_fp8_gets(tmp_path):
    """CPU and GPU are not compared with each other: the library rounds matmuls with many rows to bfloat16, and a value
    halfway between two 8-bit ones may be rounded either way, a step of one sixteenth."""
    reference = save_random(tmp_path, "gqa", hidden_size=128, intermediate_size=256, head_dim=16)
    expected = reference_logits(reference, TOKENS)
    on_gpu, on_cpu = (logits_of(load_model(tmp_path, quantizer=FP8(FP8Config()), device=d)) for d in (GPU, CPU))
    gpu_error, cpu_error = (float((got - expected).norm() / expected.norm()) for got in (on_gpu, on_cpu))
    assert gpu_error < 1.1 * cpu_error < 0.4
