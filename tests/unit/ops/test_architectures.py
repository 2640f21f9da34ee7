"""Compile every kernel for other GPUs than Hopper, without a GPU: each must fit into shared memory and registers.

Of each kernel one variant is compiled, and more of those whose tiles fill the shared memory, for a GPU with the least
shared memory. DOVETAIL_KERNELS=all compiles all variants for all GPUs.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton's compiler", allow_module_level=True)

import triton

from dovetail.core.compose import compose
from dovetail.core.compose.capabilities import FP8_HARDWARE, Host
from dovetail.core.ops import decoded_matmul, encode, matmul
from dovetail.core.ops.decoded_matmul import decoding_tile, shared_of
from dovetail.core.ops.gated import gelu_and_mul
from dovetail.core.ops.kernels import launch
from dovetail.core.ops.packed_tiles import packed_shared, packed_tile
from dovetail.core.ops.tile_choice import choose
from dovetail.core.ops.tiles import HOPPER_SHARED, MOST_SHARED_TILES
from dovetail.core.testing.compiling import GPUS, H200, EmulatedGpu, compiled_for
from dovetail.plugins.attention.config import TritonConfig
from dovetail.plugins.attention.triton import absorbed
from dovetail.plugins.attention.triton import gpu as gpu_facts
from dovetail.plugins.attention.triton.capabilities import capabilities
from dovetail.plugins.collective.symm_mem.collective import FP8
from dovetail.plugins.quant.int8.format import INT8_TOKEN

from ..nowhere import lone_copies
from . import latent_launches
from .attention_launches import LONG, SCARCE, attention
from .emulated import BF16, E4M3, E5M2, EVERYTHING, FP32, INT32, cuda
from .launches import CASES, jit_functions, multiply, ordered, spilling

OTHERS = [gpu for gpu in GPUS if gpu is not H200 and (EVERYTHING or gpu.capability == (8, 6))]
WITH_FP8 = {
    "dovetail.plugins.quant.fp8.kernel:encode_fp8",
    "dovetail.plugins.collective.symm_mem.kernels:encode_fp8",
    "dovetail.core.ops.kernels.decoders:decode_small_e2m1_words",
    "dovetail.core.ops.kernels.decoders:decode_small_uint4_words",
    "dovetail.core.ops.kernels.experts:_multiply_block",
    "dovetail.core.ops.kernels.stacked_experts:_subtrahend",
}
"""Functions that convert to E4M3 in hardware, or multiply in it."""
FROM_HOPPER = {
    "dovetail.core.ops.kernels.launch:prefetch",
    "dovetail.core.ops.kernels.expert_pairs:_gather_rows",
    "dovetail.core.ops.kernels.decoders:scaled_e2m1_words",
    "dovetail.core.ops.kernels.decoders:decode_large_byte_words",
    "dovetail.core.ops.kernels.formats:_store_sums",
    "dovetail.plugins.attention.triton.expanded:_copy",
}
"""Functions used only where kernels start before the preceding one ends, and by Hopper's kernels for experts, packed
weights (sums of x among them) and prompts."""


def chosen(fp8: bool) -> Iterator[Callable[[], object]]:
    """Yield launches whose tiles fill the shared memory, or whose functions are in no kernel's first variant."""
    yield CASES["attention: single tokens"]
    for page in (16, 64):
        yield lambda page=page: attention(LONG, page=page)
    yield lambda: attention(SCARCE, kv_dtype=E5M2, window=4096, head_scales=True, key_warps=8)
    yield lambda: attention(SCARCE, soft_cap=50.0, sinks=True, gluon=False)
    yield lambda: encode(cuda(64, 4096), (INT8_TOKEN, ordered(4096)[0]))
    yield lambda: gelu_and_mul(cuda(64, 2880))
    yield CASES["experts"]
    yield lambda: latent_launches.attend(latent_launches.FEW, 16, FP32, FP32)
    yield lambda: decoded_matmul(
        cuda(8, 64, dtype=FP32), cuda(64, 64, dtype=E4M3), cuda(64, dtype=FP32), None, cuda(1, dtype=INT32)
    )
    if fp8:
        yield CASES["attention: single tokens, e4m3"]
        for rows, outputs in ((1, 1280), (64, 14336), (64, 200064)):
            yield lambda rows=rows, outputs=outputs: multiply("fp8", rows, outputs, 4096)
        x = cuda(16, 8192)
        yield lambda: lone_copies(0, 2).boundary(x, cuda(8, 8192), x[0], 1e-5, (FP8,))


@pytest.fixture
def fresh(tmp_path, monkeypatch) -> Iterator[None]:
    """Facts of the emulated GPU are cached by device."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    module = importlib.import_module(matmul.__module__)
    decoding = importlib.import_module(decoded_matmul.__module__)
    cached = (
        *(module.device_facts, module._gpu_name, decoding._device, launch._capable),
        *(gpu_facts.gpu_name, gpu_facts.processors, gpu_facts.shared_bytes_of, gpu_facts.has_hopper),
        absorbed._stages_sums,
    )
    for one in cached:
        one.cache_clear()
    yield
    for one in cached:
        one.cache_clear()


@pytest.mark.nightly
@pytest.mark.timeout(3600 if EVERYTHING else 1200)
@pytest.mark.parametrize("gpu", OTHERS, ids=lambda gpu: gpu.name)
def test_every_kernel_compiles_and_fits(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    # In one process, Triton converts E5M2 for all GPUs as for the first one.
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        compiled, spilled = pool.submit(compile_everything, gpu).result()
    fp8 = gpu.capability >= FP8_HARDWARE
    not_here = (set() if fp8 else WITH_FP8) | (set() if gpu.capability >= launch.HOPPER else FROM_HOPPER)
    missing = jit_functions(everywhere=True) - compiled - not_here
    assert not missing, f"no launch compiles {', '.join(sorted(missing))} for {gpu.name}: add one to CASES or chosen()"
    assert not compiled & (jit_functions() - jit_functions(everywhere=True)), "kernels for Hopper"
    assert not spilled, "threads spill registers to so many bytes"


def compile_everything(gpu: EmulatedGpu) -> tuple[set[str], object]:
    """Return the functions that were compiled, and what spills registers. Entry point of a process."""
    with triton.knobs.cache.scope(), TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        with compiled_for(gpu, one_each=not EVERYTHING) as every:
            for case in CASES.values():
                case()
        with compiled_for(gpu) as more:
            for case in chosen(gpu.capability >= FP8_HARDWARE):
                case()
    return every.functions | more.functions, spilling((*every.kernels, *more.kernels))


def test_large_tiles_of_latents_fit_blackwell(fresh) -> None:
    (gpu,) = (gpu for gpu in GPUS if gpu.capability >= absorbed.BLACKWELL)
    with compiled_for(gpu) as compiled:
        latent_launches.attend(latent_launches.DECODE, 128, BF16)
    assert any(name.endswith(":attend_latents") for name, _ in compiled.kernels)


def test_a_tile_that_does_not_fit_is_an_error(fresh) -> None:
    small = EmulatedGpu("a small GPU", 10, (8, 9), 8 << 10)
    with compiled_for(small), pytest.raises(ValueError, match="a block of a small GPU has at most 8192"):
        CASES["attention: single tokens"]()


@pytest.mark.parametrize("rows", [1, 16, 33, 64])
@pytest.mark.parametrize("outputs", [1280, 14336, 200064])
def test_ruled_tiles_fit(rows: int, outputs: int) -> None:
    for gpu in GPUS:
        tile = choose(rows, outputs, 4096, "fp8", "a GPU", gpu.processors, False, gpu.shared_bytes)
        assert tile.shared_bytes(itemsize=1) <= gpu.shared_bytes
        large = choose(rows, outputs, 4096, "fp8", "a GPU", gpu.processors, False, HOPPER_SHARED)
        assert tile.stages <= large.stages and (gpu.shared_bytes < HOPPER_SHARED or tile == large)


@pytest.mark.parametrize("outputs", [64, 1280, 28672, 106496])
@pytest.mark.parametrize("rows", [1, 17, 64, 128])
def test_decoding_tiles_fit_every_gpu(rows, outputs):
    for gpu in GPUS:
        tile = decoding_tile(rows, outputs, 4096, gpu.processors, gpu.shared_bytes)
        assert shared_of(tile) <= gpu.shared_bytes
        _, tiles, blocks, programs = tile.launch(rows, outputs, 4096)
        assert programs <= tiles * blocks
        assert tiles <= MOST_SHARED_TILES or not tile.splits_tiles(rows, outputs, 4096), "split tiles need counters"


@pytest.mark.parametrize(("bits", "itemsize"), [(4, 1), (4, 2), (8, 2)])
@pytest.mark.parametrize("rows", [1, 17, 64, 128])
def test_tiles_of_packed_weights_fit_every_gpu(rows, bits, itemsize):
    for gpu in GPUS:
        for outputs in (64, 1280, 106496):
            tile = packed_tile(rows, outputs, 4096, bits, itemsize, gpu.processors, gpu.shared_bytes)
            assert packed_shared(tile, bits, itemsize) <= gpu.shared_bytes
            assert tile.counters(rows, outputs, 4096) <= MOST_SHARED_TILES


def test_eight_bit_keys_need_a_gpu_that_converts_them() -> None:
    def allowed(**facts: object) -> object:
        demands = capabilities(TritonConfig(), Host(device="cuda", **facts)).requires
        return next(one.allowed for one in demands if one.key == "kv_dtype")

    old = allowed(device_count=1, compute_capability=(8, 6))
    assert "fp8_e4m3" not in old and "fp8_e5m2" in old
    assert "fp8_e4m3" in allowed(device_count=1, compute_capability=(8, 9))
    assert "fp8_e4m3" in allowed(), "a plan for another machine"


@pytest.mark.parametrize("quant", ["int4", "fp4", "nf4", "gguf", "fp8", "mixed"])
def test_activations_in_fp8_need_a_gpu_that_converts_them(quant: str) -> None:
    """Kernels that encode E4M3 do not compile for others."""
    path = "quant.those.activations" if quant == "mixed" else "quant.activations"
    part = compose([f"quant={quant}", f"{path}=fp8"]).part("quant")

    def demands(capability: tuple[int, int], count: int = 1) -> list[str]:
        stated = part.capabilities(Host(device="cuda", device_count=count, compute_capability=capability))
        return [one.reason for one in stated.requires if one.key == "compute_capability"]

    (reason,) = demands((8, 6))
    assert "quant.activations=model runs on this GPU" in reason
    assert demands((8, 9)) == [] and demands((0, 0), count=0) == [], "a plan for another machine"
