"""Matmuls with packed weights compiled for Hopper, without a GPU: registers, shared memory, and what is refused."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace

import pytest

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton's compiler", allow_module_level=True)

import torch

from dovetail.core.ops import packed_tiles
from dovetail.core.ops.kernels import specialized_packed
from dovetail.core.ops.kernels.packed_matmul import packed_matmul_triton
from dovetail.core.ops.packed_matmul import packed_matmul
from dovetail.core.ops.packed_tiles import packed_beside, pieces_that_fit, places_that_fit, rounded_base
from dovetail.core.ops.tiles import HOPPER_SHARED, MOST_SHARED_TILES, RESERVED, SM_SHARED, MatmulTile
from dovetail.core.ops.weight_formats import INT4, INT8, UINT4
from dovetail.core.startup_notes import collect_notes
from dovetail.core.testing.compiling import compiled_for_hopper, resources

from .emulated import BF16, E4M3, FP32, INT32, cuda
from .launches import FEW
from .packed_launches import packed_weight

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("kernel_cache")]

WIDE = MatmulTile(128, 128, 256, warps=8, stages=4, programs=132, tma=True)


@pytest.mark.parametrize(
    ("tile", "of_x"), [(WIDE, False), (WIDE, True), (replace(WIDE, outputs=64, inputs=512, warps=4, stages=2), True)]
)
def test_sums_of_a_packed_weight_with_many_tokens_fit_into_registers(tile, of_x):
    """A second set for a run in flight would be spilled, which cost up to a quarter of the time. So would the factors
    of four runs, with which sums of x are multiplied, if all were made first."""
    with compiled_for_hopper() as compiled:
        weight, counts = packed_weight(UINT4, 8192, 8192, 128, BF16), cuda(MOST_SHARED_TILES, dtype=INT32)
        x_TI, x_scale_T1 = cuda(128, 8192, dtype=E4M3), cuda(128, 1, dtype=FP32)
        sums_TS = cuda(128, 8192 // 128 * 8) if of_x else None
        packed_matmul_triton(x_TI, weight, tile, counts, None, x_scale_T1, BF16, sums_TS)
    (kernel,) = (kernel for name, kernel in compiled.kernels if name.endswith(":packed_specialized"))
    # With sums of x, Triton 3.7 spills a value from the start.
    assert resources(kernel).stack <= (FEW if of_x else 0)
    assert kernel.src.signature["sum_source"].startswith("tensordesc") == of_x


@pytest.mark.parametrize(
    ("fmt", "group", "scale", "tile"),
    [
        # Scales of one tile leave room for as many blocks as it has, those of the next for one less.
        (UINT4, 32, FP32, MatmulTile(32, 64, 256, stages=2, programs=132, tma=True, residents=4)),
        (UINT4, 32, FP32, MatmulTile(8, 256, 256, warps=16, stages=5, programs=132, tma=True)),
        (INT8, 0, FP32, MatmulTile(8, 64, 128, stages=16, programs=132, tma=True)),
        # With sums of x.
        (UINT4, 128, BF16, MatmulTile(64, 128, 256, warps=8, stages=8, programs=132, tma=True)),
        (UINT4, 128, FP32, MatmulTile(128, 64, 256, stages=3, programs=132, tma=True)),
    ],
)
def test_a_ring_of_packed_blocks_fills_shared_memory(fmt, group, scale, tile, monkeypatch):
    """Tiles are chosen without knowing the size of scales."""
    room, launched = min(HOPPER_SHARED, SM_SHARED // tile.residents - RESERVED), []

    def noted(tile, block, operand, itemsize):
        launched.append((block, places_that_fit(tile, block, operand, itemsize)))
        return launched[-1][1]

    monkeypatch.setattr(specialized_packed, "places_that_fit", noted)
    with compiled_for_hopper() as compiled:
        weight, counts = packed_weight(fmt, 4096, 4096, group, scale), cuda(MOST_SHARED_TILES, dtype=INT32)
        if group == 128:
            x = cuda(tile.tokens, 4096, dtype=E4M3), cuda(tile.tokens, 1, dtype=FP32), cuda(tile.tokens, 256)
        else:
            x = cuda(tile.tokens, 4096), None, None
        packed_matmul_triton(x[0], weight, tile, counts, None, x[1], BF16, x[2])
    (kernel,) = (kernel for name, kernel in compiled.kernels if name.endswith(":packed_specialized"))
    ((block, places),) = launched
    assert places * block < kernel.metadata.shared <= places * block + packed_beside(tile, BF16.itemsize)
    assert kernel.metadata.shared <= room and (places == tile.stages or kernel.metadata.shared + block > room)


@pytest.mark.parametrize(("fmt", "group", "scale"), [(UINT4, 128, BF16), (UINT4, 32, FP32), (INT4, 64, INT32)])
@pytest.mark.parametrize("programs", [0, 132])
def test_a_rounded_weight_fits_into_registers_and_shared_memory(fmt, group, scale, programs, monkeypatch):
    """A tile has 256 tokens, so half of the registers of a thread are sums."""
    launched = []

    def noted(tile, scales, itemsize):
        launched.append((scales, *pieces_that_fit(tile, scales, itemsize)))
        return launched[-1][1:]

    monkeypatch.setattr(packed_tiles, "pieces_that_fit", noted)
    with compiled_for_hopper() as compiled:
        weight, counts = packed_weight(fmt, 4096, 4096, group, scale), cuda(MOST_SHARED_TILES, dtype=INT32)
        weight = replace(weight, rounded_scale=cuda(4096, dtype=FP32))
        tile, x_TI, x_scale_T1 = rounded_base(), cuda(256, 4096, dtype=E4M3), cuda(256, 1, dtype=FP32)
        tile = replace(tile, programs=programs, specialized=programs == 0)
        packed_matmul_triton(x_TI, weight, tile, counts, None, x_scale_T1, BF16)
    (kernel,) = (kernel for name, kernel in compiled.kernels if name.endswith(":packed_rounded"))
    assert resources(kernel).stack <= FEW
    ((scales, blocks, pieces),) = launched
    used = blocks * (128 * 128 + scales) + pieces * 256 * 128
    assert pieces >= 4 and used < kernel.metadata.shared <= HOPPER_SHARED < kernel.metadata.shared + 256 * 128


def test_a_weight_without_a_scale_of_outputs_is_not_rounded():
    with compiled_for_hopper(machine_code=False):
        weight, x = packed_weight(UINT4, 4096, 4096, 128, BF16), cuda(256, 4096, dtype=E4M3)
        with pytest.raises(ValueError, match="has a rounded_scale"):
            packed_matmul_triton(x, weight, rounded_base(), None, None, cuda(256, 1, dtype=FP32), BF16)


def test_hoppers_kernel_refuses_zeros_beside_words_of_scales():
    """The groups of both are not those of one row."""
    tile = MatmulTile(8, 64, 256, tma=True)
    with compiled_for_hopper(machine_code=False):
        weight = packed_weight(UINT4, 4096, 4096, 32, INT32)
        with pytest.raises(ValueError, match="scales in words have no zeros"):
            packed_matmul_triton(cuda(8, 4096), weight, tile, None, None, None, BF16)


def test_scales_in_an_order_that_hoppers_kernel_cannot_read_are_noted():
    with compiled_for_hopper(machine_code=False), collect_notes() as notes:
        weight = packed_weight(UINT4, 4096, 4096, 128, BF16)
        packed_matmul(cuda(8, 4096), weight, None, BF16)
        assert not notes
        other = replace(weight, scale=cuda(4096, 32), zero=cuda(4096, 32, dtype=torch.uint8))
        packed_matmul(cuda(8, 4096), other, None, BF16)
    (text,) = notes
    assert "uint4 whose scales have the strides (32, 1) run by the kernel for all GPUs" in text
