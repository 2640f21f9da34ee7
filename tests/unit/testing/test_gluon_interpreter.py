"""The interpreter of Gluon: results, accesses outside of tensors, and barriers that are never completed."""

from __future__ import annotations

import importlib.util
import os

import pytest

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton, whose interpreter replaces functions of these kernels", allow_module_level=True)

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from dovetail.core.ops.kernels.gluon import tensor_map
from dovetail.core.testing import gluon_interpreter
from dovetail.core.testing.compiling import compiled_for_hopper
from dovetail.core.testing.gluon_interpreter import StuckError, interpreted_gluon

EACH = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))


@gluon.jit
def _twice(x):
    return x + x


@gluon.jit
def _double(x_ptr, out_ptr, count, BLOCK: gl.constexpr, MASKED: gl.constexpr):
    at = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, EACH)
    mask = at < count if MASKED else at >= 0
    gl.store(out_ptr + at, _twice(gl.load(x_ptr + at, mask=mask, other=0.0)), mask=mask)


@gluon.jit
def _wait(full, out_ptr):
    mbarrier.wait(full, 0)
    gl.store(out_ptr, 1)


@gluon.jit
def _arrive(full, COUNT: gl.constexpr):
    for _ in range(COUNT):
        mbarrier.arrive(full)


@gluon.jit
def _meet(out_ptr, COUNT: gl.constexpr):
    """A partition waits for two arrivals, of which another one makes COUNT."""
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=2)
    gl.warp_specialize([(_wait, (full, out_ptr)), (_arrive, (full, COUNT))], [1], [24])


@gluon.jit
def _fetch(source, out_ptr):
    """Copy two boxes past the corner of a matrix, and read them as one."""
    boxes = gl.allocate_shared_memory(source.dtype, [2, 8, 64], source.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.expect(full, 2 * source.block_type.nbytes)
    for box in gl.static_range(2):
        tma.async_copy_global_to_shared(source, [4, box * 64], full, boxes.index(box))
    mbarrier.wait(full, 0)
    whole = boxes._reinterpret(source.dtype, [8, 128], source.layout)
    at = gl.arange(0, 8, gl.SliceLayout(1, WIDE))[:, None] * 128 + gl.arange(0, 128, gl.SliceLayout(0, WIDE))[None, :]
    gl.store(out_ptr + at, whole.load(WIDE))


def test_programs_read_and_write_what_the_mask_allows():
    x, out = torch.randn(100), torch.full((100,), torch.nan)
    with interpreted_gluon():
        _double[(2,)](x, out, 100, BLOCK=64, MASKED=True)
    assert torch.equal(out, 2 * x)
    with interpreted_gluon(), pytest.raises(IndexError, match="element 100 of memory with 100 elements"):
        _double[(2,)](x, out, 100, BLOCK=64, MASKED=False)


def test_a_launch_after_it_is_compiled_again():
    """A function that the interpreter left behind would hide the one that only compiles."""
    out = torch.zeros(1, dtype=torch.int32)
    with interpreted_gluon():
        _meet[(1,)](out, COUNT=2)
    with compiled_for_hopper(machine_code=False) as compiled:
        _meet[(1,)](torch.zeros(1, dtype=torch.int32, device="cuda"), COUNT=2)
    assert compiled.launches == 1


def test_partitions_meet_at_barriers(monkeypatch):
    out = torch.zeros(1, dtype=torch.int32)
    with interpreted_gluon():
        _meet[(1,)](out, COUNT=2)
    assert out.item() == 1
    monkeypatch.setattr(gluon_interpreter, "PATIENCE", 0.05)
    with interpreted_gluon(), pytest.raises(StuckError, match="at a barrier"):
        _meet[(1,)](out, COUNT=1)


def test_boxes_of_a_tensor_map_are_zero_outside_and_form_one_matrix():
    x = torch.randn(9, 96).bfloat16()
    out = torch.full((8, 128), torch.nan).bfloat16()
    with interpreted_gluon():
        _fetch[(1,)](tensor_map(x, 8, 9), out)
    want = torch.zeros(8, 128).bfloat16()
    want[:5, :96] = x[4:]
    assert torch.equal(out, want)
