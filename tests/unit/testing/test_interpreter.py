"""Reductions of Triton's interpreter by halves equal those that visit each element."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("no Triton for this platform", allow_module_level=True)

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import ReduceOps, TensorHandle

from dovetail.core.testing.interpreter import reduce_by_halves


def tensor(data: np.ndarray) -> tl.core.tensor:
    dtype = tl.block_type(tl.int32, list(data.shape)) if data.shape else tl.int32
    return tl.core.tensor(TensorHandle(data, tl.int32), dtype)


def compose(*operands: tl.core.tensor) -> tuple[tl.core.tensor, tl.core.tensor]:
    """Return x -> a x + b after x -> c x + d: the order of the operands matters."""
    a, b, c, d = (x.handle.data for x in operands)
    return tensor(a * c), tensor(b * c + d)


@pytest.mark.parametrize("keep_dims", [False, True])
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_reductions_by_halves_equal_those_that_visit_each_element(axis: int | None, keep_dims: bool) -> None:
    random = np.random.default_rng()
    inputs = tuple(tensor(random.integers(-3, 4, (4, 8)).astype(np.int32)) for _ in range(2))
    function = SimpleNamespace(fn=compose)
    found = reduce_by_halves(ReduceOps(axis, function, keep_dims), inputs)
    if axis is None:  # Triton flattens only the first input.
        inputs = tuple(tensor(x.handle.data.reshape(-1)) for x in inputs)
    expected = ReduceOps(axis or 0, function, keep_dims).generic_reduce(inputs)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype and (axis is None or mine.shape == theirs.shape)
        assert np.array_equal(mine.handle.data.reshape(theirs.handle.data.shape), theirs.handle.data)
        assert axis is not None or not keep_dims or mine.shape == (1, 1)
