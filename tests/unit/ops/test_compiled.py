"""Compile every kernel for Hopper, without a GPU, through the functions that launch it.

A new kernel needs a launch in launches.CASES; test_every_kernel_compiles lists those without one. CI compiles the first
variant of each kernel; DOVETAIL_KERNELS=all compiles all of them, in more shapes.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys

import pytest

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton's compiler", allow_module_level=True)

import torch
import triton
import triton.language as tl
from triton.runtime.errors import PTXASError

from dovetail.core.interfaces import PLAIN, Activation, LinearShape
from dovetail.core.layers import PlainLinear
from dovetail.core.ops import encode, gelu, layer_norm, rms_norm, silu_and_mul
from dovetail.core.ops.choices import temporarily
from dovetail.core.ops.kernels import prefetch_matmul
from dovetail.core.ops.kernels.formats import warps
from dovetail.core.ops.kernels.launch import dependent, wait
from dovetail.core.ops.kernels.matmul import matmul_triton
from dovetail.core.ops.matmul import _has_prefetch_kernel, device_facts, matmul, unscaled_matmul
from dovetail.core.ops.padding import readable_rows
from dovetail.core.ops.tiles import HOPPER_SHARED, MOST_SHARED_TILES, MatmulTile
from dovetail.core.testing.compiling import H200, SHARED_BYTES, compiled_for, compiled_for_hopper, resources
from dovetail.plugins.quant.fp8.format import FP8_TOKEN

from ..nowhere import lone_copies, lone_reducer
from .early_access import CONSTANTS, touched_before_waiting
from .emulated import BF16, E4M3, EVERYTHING, FP32, INT32, INT64, cuda
from .launches import CASES, jit_functions, more_functions, spilling
from .shipped import SHIPPED, TILES

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("kernel_cache")]


@pytest.mark.timeout(3600 if EVERYTHING else 1800)
def test_every_kernel_compiles(kernel_cache):
    # Functions inlined into cached kernels would not be recorded.
    shutil.rmtree(kernel_cache)
    failed = []
    with compiled_for(H200, one_each=not EVERYTHING) as compiled:
        for name, case in CASES.items():
            try:
                case()
            except Exception as error:
                failed.append(f"{name}: {type(error).__name__}: {error}")
    assert not failed, "\n\n".join(failed)
    with compiled_for_hopper() as more:
        more_functions()
    missing = sorted(jit_functions() - compiled.functions - more.functions)
    assert not missing, f"no launch compiles {', '.join(missing)}: add one to CASES, or to more_functions"
    kernels = (*compiled.kernels, *more.kernels)
    assert not spilling(kernels), "threads spill registers to so many bytes"
    for name, kernel in kernels:
        too_early = touched_before_waiting(kernel)
        assert too_early <= CONSTANTS.get(name, set()), f"{name} accesses {too_early} before the preceding kernel ends"


@triton.jit
def never_waits(x_ptr, PDL: tl.constexpr):
    tl.store(x_ptr, 1.0)


@triton.jit
def waits_late(x_ptr, PDL: tl.constexpr):
    tl.store(x_ptr, 1.0)
    wait(PDL)


@triton.jit
def waits_at_times(x_ptr, PDL: tl.constexpr):
    if tl.program_id(0) > 0:
        return
    wait(PDL)
    tl.store(x_ptr, 1.0)


def test_a_kernel_that_writes_before_it_waits_is_detected():
    with compiled_for_hopper() as compiled:
        for kernel in (never_waits, waits_late, waits_at_times):
            x = cuda(1, dtype=FP32)
            kernel[(1,)](x, **dependent(x))
    (_, never), (_, late), (_, at_times) = compiled.kernels
    with pytest.raises(AssertionError, match="branches around the wait"):
        touched_before_waiting(at_times)
    with pytest.raises(AssertionError, match="waits 0 times"):
        touched_before_waiting(never)
    assert touched_before_waiting(late) == {"x_ptr, written"}


def test_a_prefetching_matmul_fetches_only_the_weight_before_it_waits():
    """It fetches as many weight blocks as its ring holds; the preceding kernel writes its input."""
    tiles = (
        MatmulTile(16, 64, 512, stages=2, split=6, prefetch=5, prefetch_l2=2),
        MatmulTile(64, 128, 256, 8, 3, prefetch=4),
    )
    with compiled_for_hopper() as compiled:
        for tile in tiles:
            scales = cuda(64, 1, dtype=FP32), cuda(1280, dtype=FP32)
            x, weight = cuda(64, 8192, dtype=E4M3), cuda(1280, 8192, dtype=E4M3)
            matmul_triton(x, weight, tile, cuda(MOST_SHARED_TILES, dtype=INT32), *scales, None, BF16)
    assert len(compiled.kernels) == len(tiles)
    for tile, (_, kernel) in zip(tiles, compiled.kernels, strict=True):
        before, after = (
            re.findall(r"cp\.async\.bulk\.tensor.*?\], \[(%rd\d+),", part)
            for part in kernel.asm["ptx"].split("griddepcontrol.wait")
        )
        boxes = tile.inputs // 128
        (weight_map,) = set(before)
        assert len(before) == boxes * tile.prefetch
        # After the wait it fills the input's ring, then fetches one block of each per iteration.
        assert after.count(weight_map) == boxes and len(after) == boxes * (tile.stages + 2)
        # The matmuls of all boxes of a block are issued before the first one's sums are added.
        assert re.search(rf"wgmma\.wait_group\.sync\.aligned\s+{boxes - 1};", kernel.asm["ptx"])
        assert resources(kernel).stack == 0


@pytest.mark.nightly
def test_a_specialized_matmul_fetches_only_the_weight_before_it_waits():
    """It fetches as many weight blocks as its ring holds. While a block is multiplied, the next one is issued."""
    tiles = (
        MatmulTile(64, 128, 128, stages=6, specialized=True),
        MatmulTile(128, 256, 128, stages=4, split=2, specialized=True),
        MatmulTile(192, 128, 256, stages=2, programs=132, specialized=True),
    )
    with compiled_for_hopper() as compiled:
        for tile in tiles:
            scales = cuda(200, 1, dtype=FP32), cuda(1280, dtype=FP32)
            x, weight = cuda(200, 8192, dtype=E4M3), cuda(1280, 8192, dtype=E4M3)
            matmul_triton(x, weight, tile, cuda(MOST_SHARED_TILES, dtype=INT32), *scales, None, BF16)
    for tile, (_, kernel) in zip(tiles, compiled.kernels, strict=True):
        before, after = (
            re.findall(r"cp\.async\.bulk\.tensor.*?\], \[(%rd\d+),", part)
            for part in kernel.asm["ptx"].split("griddepcontrol.wait")
        )
        boxes = tile.inputs // 128
        assert len(set(before)) == 1 and len(before) == boxes * tile.stages
        # After the wait it fills the input's ring, then fetches one block of each per iteration.
        assert len(after) == boxes * (tile.warp_groups * (tile.stages + 1) + 1)
        assert re.search(rf"wgmma\.wait_group\.sync\.aligned\s+{boxes};", kernel.asm["ptx"])
        assert kernel.metadata.shared <= tile.shared_bytes(itemsize=1) <= HOPPER_SHARED
        assert resources(kernel).stack == 0


def test_inputs_of_matmuls_have_memory_for_whole_tiles():
    """Otherwise tensor maps would reach past the last row, which is slow."""
    emit = PLAIN, FP8_TOKEN
    with compiled_for_hopper(machine_code=False):
        x, weight = cuda(80, 4096), cuda(4096)
        made = {
            "rms_norm": rms_norm(x, None, weight, 1e-5, emit)[0],
            "layer_norm": layer_norm(x, None, weight, weight, 1e-5, emit)[0],
            "silu_and_mul": silu_and_mul(cuda(80, 8192), emit),
            "gelu": gelu(x, emit=emit),
            "sum of ranks": lone_reducer(0, 2).boundary(x, x, weight, 1e-5, emit, "one_shot")[0],
            "sharded sum of ranks": lone_reducer(0, 2).sharded_boundary(x, x[:40], weight, 1e-5, emit)[0],
        }
        encoded = encode(x, (FP8_TOKEN,))[FP8_TOKEN]
        for name, bundle in made.items():
            for fmt in emit:
                assert readable_rows(bundle[fmt].values, 128) == 128, name
        assert readable_rows(encoded.values, 128) == readable_rows(encoded.scale, 128) == 128


@pytest.mark.nightly
def test_sums_of_eight_ranks_fit_into_registers():
    """Words of all ranks are polled in registers. If they spilled, each polling iteration would access memory."""
    with compiled_for_hopper() as compiled:
        for rows, columns in ((64, 8192), (1, 16384)):
            x = cuda(rows, columns)
            lone_reducer(3, 8).reduce(x, "one_shot")
            lone_reducer(3, 8).boundary(x, x, x[0], 1e-5, (PLAIN, FP8_TOKEN), "one_shot")
            lone_reducer(3, 8).boundary(x, x, x[0], 1e-5, (PLAIN, FP8_TOKEN), "two_shot")
            if lone_reducer(3, 8).serves_sharded(x, (PLAIN, FP8_TOKEN)):
                lone_reducer(3, 8).sharded_boundary(x, x, x[0], 1e-5, (PLAIN, FP8_TOKEN))
        for columns in (2304, 4608):  # A program's block is almost twice as long.
            x = cuda(1, columns)
            lone_reducer(3, 8).boundary(x, x, x[0], 1e-5, (PLAIN, FP8_TOKEN), "one_shot")
    for name, kernel in compiled.kernels:
        assert resources(kernel).stack == 0, name


@pytest.mark.nightly
def test_parts_of_a_row_are_loaded_together():
    """Sequential loads would cost one memory round trip each, and so would the loads of the mailbox addresses."""
    with compiled_for_hopper() as compiled:
        x = cuda(64, 8192)
        lone_reducer(3, 8).boundary(x, x, x[0], 1e-5, (FP8_TOKEN,), "two_shot")
    ((_, kernel),) = compiled.kernels
    before, after = kernel.asm["ptx"].split("griddepcontrol.wait")
    addresses, sent = re.findall(r"ld\.global\.b64", before), after[: after.index("st.global")]
    assert len(addresses) == 8
    assert len(re.findall(r"ld\.global", sent)) == 1 + 8, "the turn, and a part for each rank"
    # Both polls load the host's word and the rank's own first, not only after the mail has arrived.
    looks = ["m" if wide else "w" for wide in re.findall(r"ld\.volatile\.global\.(v?)", after)]
    assert re.fullmatch(r"wwm{8}wwm+", "".join(looks))


def test_matmuls_use_the_kernel_for_all_gpus_if_gluon_is_unsupported(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "dovetail.core.ops.kernels.prefetch_matmul", None)
    monkeypatch.delattr("dovetail.core.ops.kernels.prefetch_matmul", raising=False)
    assert not _has_prefetch_kernel(9, 0)
    assert "matmuls with few rows use the library" in caplog.text
    monkeypatch.undo()
    assert _has_prefetch_kernel(9, 0) and not _has_prefetch_kernel(8, 9) and not _has_prefetch_kernel(10, 0)


@temporarily(SHIPPED)
@pytest.mark.parametrize(("early", "counted"), [(True, True), (True, False), (False, True)])
def test_split_16_bit_matmuls_use_the_kernel_if_it_runs_and_has_counters(monkeypatch, early, counted):
    """Otherwise the library runs."""
    monkeypatch.setattr(sys.modules[device_facts.__module__], "_has_prefetch_kernel", lambda *capability: early)
    device_facts.cache_clear()
    with compiled_for_hopper(machine_code=False) as compiled:
        x, weight = cuda(1, 8192), cuda(1280, 8192)
        matmul(x, weight, None, cuda(MOST_SHARED_TILES, dtype=INT32) if counted else None)
        assert matmul(x[:0], weight, None, cuda(MOST_SHARED_TILES, dtype=INT32)).shape == (0, 1280)
    device_facts.cache_clear()
    assert compiled.launches == (early and counted)


@temporarily(SHIPPED)
def test_plain_layers_have_the_counters_that_split_matmuls_need():
    with compiled_for_hopper(machine_code=False) as compiled:
        layer, shape = PlainLinear(), LinearShape(8192, 1280, (1280,), dtype=BF16)
        layer.apply(layer.create(shape, torch.device("cuda")), Activation(PLAIN, cuda(1, 8192)))
    assert [name for name, _ in compiled.variants] == ["dovetail.core.ops.kernels.prefetch_matmul:matmul_prefetching"]


def test_kernel_arguments_are_in_order(monkeypatch):
    """The compiler cannot check the order of integer arguments."""
    passed = {}

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: passed.update(zip(names, args, strict=False), grid=grid, **options)

    names = prefetch_matmul.matmul_prefetching.arg_names
    monkeypatch.setattr(prefetch_matmul, "matmul_prefetching", Kernel())
    tile = MatmulTile(16, 64, 512, stages=3, split=6, prefetch=5, prefetch_l2=4, prefetch_cycles=1000)
    with compiled_for_hopper(machine_code=False):
        scales = cuda(1, 1, dtype=FP32), cuda(1280, dtype=FP32)
        x, weight = cuda(17, 8192, dtype=E4M3), cuda(1280, 8192, dtype=E4M3)
        matmul_triton(x, weight, tile, cuda(MOST_SHARED_TILES, dtype=INT32), *scales, None, BF16)
    wanted = dict(tokens=17, outputs=1280, inputs=8192, x_scale_st=0, weight_scale_so=1, t_tiles=2, blocks=16)
    wanted |= dict(
        split=6, prefetch_l2=4, prefetch_cycles=1000, BLOCK_T=16, BLOCK_O=64, BOXES=4, X_PLACES=3, PLACES=5, grid=(240,)
    )
    assert {name: passed[name] for name in wanted} == wanted
    assert (
        passed["weight_ptr"] is weight
        and passed["x_scale_ptr"] is scales[0]
        and passed["weight_scale_ptr"] is scales[1]
    )


@pytest.mark.parametrize(("rows", "left"), [(64, False), (65, True), (256, True), (257, False)])
def test_scales_are_deferred_for_the_row_counts_that_gain(rows, left):
    with compiled_for_hopper(), temporarily(SHIPPED):
        x, weight, one = cuda(rows, 256, dtype=E4M3), cuda(512, 256, dtype=E4M3), cuda(1, dtype=FP32)
        assert (unscaled_matmul(x, weight, one) is not None) is left


@pytest.mark.parametrize(("columns", "late"), [(3584, False), (14336, True)])
def test_a_wide_row_is_loaded_before_the_next_launch_is_allowed(columns, late):
    with compiled_for_hopper() as compiled:
        silu_and_mul(cuda(1, 2 * columns), (FP8_TOKEN,))
    ((_, kernel),) = compiled.kernels
    before, after = kernel.asm["ptx"].split("griddepcontrol.launch_dependents")
    assert ("ld.global" in before) is late and ("ld.global" in after) is not late
    assert ("griddepcontrol.wait" in before) is late


def test_scales_are_not_deferred_if_the_kernel_has_a_tile():
    """Such tiles were tuned against the library without scales."""
    few, gpu = range(65, 257), "NVIDIA H200"
    (outputs, inputs), rows = next(
        (key[2:], rows) for key, tiles in TILES.items() for rows in few if key[:2] == (gpu, "fp8") and tiles.get(rows)
    )
    with compiled_for_hopper(), temporarily(SHIPPED):
        x, weight, one = cuda(rows, inputs, dtype=E4M3), cuda(outputs, inputs, dtype=E4M3), cuda(1, dtype=FP32)
        assert unscaled_matmul(x, weight, one) is None


def test_programs_have_more_threads_with_few_rows():
    assert [warps(4096, rows) for rows in (1, 16, 17, 256, 257, None)] == [16, 16, 32, 32, 8, 8]


@triton.jit
def changes_type(out_ptr, flag):
    if flag > 0:
        x = tl.zeros((16,), tl.float32)
    else:
        x = tl.zeros((16,), tl.int32)
    tl.store(out_ptr + tl.arange(0, 16), x)


@triton.jit
def large_blocks(x_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    acc = tl.zeros((SIZE, SIZE), tl.float32)
    for i in range(4):
        x = tl.load(x_ptr + i * SIZE * SIZE + at)
        acc = tl.dot(x, x, acc)
    tl.store(out_ptr + at, acc)


@triton.jit
def no_such_instruction(x_ptr):
    at = x_ptr + tl.arange(0, 32)
    tl.store(at, tl.inline_asm_elementwise("no.such $0, $1;", "=r,r", [tl.load(at)], tl.int32, True, 1))


def test_compiler_errors_are_detected():
    with compiled_for_hopper():
        with pytest.raises(triton.CompilationError):
            changes_type[(1,)](cuda(16, dtype=FP32), 5)
        with pytest.raises(ValueError, match=f"{SHARED_BYTES}.*fewer stages"):
            large_blocks[(1,)](cuda(128, 128), cuda(128, 128), 128, num_stages=8)
        with pytest.raises(PTXASError, match="ptxas"):
            no_such_instruction[(1,)](cuda(32, dtype=INT32))
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AssertionError)):
            cuda(1)


def test_boundaries_of_any_number_of_rows_use_the_kernels_compiled_at_start_up():
    """Otherwise a request would wait for compilation, half a second per kernel."""
    many = (128, 130, 131, 250, 256, 1000, 1024, 2049, 4096, 6000)
    with compiled_for_hopper(machine_code=False) as compiled:
        reducer, ranks = lone_reducer(3, 8), lone_copies(3, 8)

        def edges(tokens: int) -> None:
            x = cuda(tokens, 8192)
            own = cuda(-(-tokens // 8), 8192)
            for emit in ((FP8_TOKEN,), (PLAIN,)):
                reducer.sharded_boundary(x, own, x[0], 1e-5, emit)
                reducer.boundary(x, x, x[0], 1e-5, emit, "two_shot")
            whole = cuda(8 * len(own), 8192)
            ranks.boundary(whole, own, x[0], 1e-5, (FP8_TOKEN,))
            ranks.reduce_rows(whole)
            reducer.argmax(cuda(tokens % 200 + 1, dtype=FP32), cuda(tokens % 200 + 1, dtype=INT64))

        edges(2048)
        met = set(compiled.variants)
        for tokens in many:
            edges(tokens)
        assert set(compiled.variants) == met
