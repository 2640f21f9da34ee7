"""Part of the contract suite for quantizers: formats of inputs and weights, in torch and in Triton. Shapes: T tokens, I
input, C columns, G scale groups."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache

import pytest
import torch

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces import PLAIN, ActFormat, LinearMethod, LinearShape
from dovetail.core.interfaces.tensor_record import TensorRecord
from dovetail.core.interfaces.weight import PackedWeight
from dovetail.core.layers.packed import PackedLinear
from dovetail.core.ops import encode, weight_formats
from dovetail.core.ops.formats import encode_reference, why_unfused
from dovetail.core.ops.packing import pack
from dovetail.core.testing.interpreter import mend_interpreter
from dovetail.core.testing.loaded_layer import Loaded
from dovetail.core.testing.numeric import assert_near, seed_note


class FormatTests:
    """Tests that QuantizerContract inherits. It has the meaning and defaults of the settings."""

    device: str
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, tuple[int, ...]], ...]

    def _method(
        self, inp: int, parts: Sequence[int], dtype: torch.dtype = torch.float32, path: str = ""
    ) -> tuple[LinearMethod, LinearShape]:
        raise NotImplementedError

    def _layer(self, inp: int, parts: Sequence[int], dtype: torch.dtype = torch.float32) -> Loaded:
        raise NotImplementedError

    def _x(self, tokens: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        raise NotImplementedError

    def test_input_is_what_encode_gives(self) -> None:
        """The ActFormat declares what producers write: dtype, scales and their memory order."""
        for dtype in self.dtypes:
            for inp, parts in self.shapes:
                fmt = self._layer(inp, parts, dtype).method.input
                x_TI = self._x(5, inp, dtype)
                x = encode(x_TI, (fmt,))[fmt]
                assert x.values.dtype == (fmt.dtype or dtype), f"{fmt.name} declares dtype {fmt.dtype}"
                if fmt.reference is not None:
                    values, _ = fmt.reference(x_TI.float())
                    kept = None if fmt.dtype is None else values.to(fmt.dtype)
                    held = values.is_floating_point() if kept is None else torch.equal(values.float(), kept.float())
                    target = fmt.dtype or "the model's dtype"
                    assert held, f"{fmt.name}: `reference` returns {values.dtype} values that {target} cannot hold"
                if fmt.group == "none":
                    unscaled = x.scale is None and fmt.scale_layout == "none"
                    assert unscaled, f"{fmt.name}: group is none, so there must be no scales and no scale_layout"
                    continue
                scaled = x.scale is not None and fmt.scale_layout != "none"
                assert scaled, f"{fmt.name}: group is {fmt.group}, so there must be scales and a scale_layout"
                assert x.scale.dtype == torch.float32, f"{fmt.name}: scales must be float32, not {x.scale.dtype}"
                if fmt.group != "tensor":
                    groups = 1 if fmt.group == "token" else ceil_div(inp, fmt.group)
                    shape = tuple(x.scale.shape)
                    assert shape == (5, groups), f"{fmt.name}: expected scales of shape {(5, groups)}, got {shape}"
                    by_row = x.scale if fmt.scale_layout == "row" else x.scale.t()
                    assert by_row.is_contiguous(), f"{fmt.name}: scales must be {fmt.scale_layout}-major in memory"

    def test_input_is_known_before_weights(self) -> None:
        """Producers are built before the checkpoint is read."""
        for inp, parts in self.shapes:
            method, _ = self._method(inp, parts)
            assert isinstance(method.input, ActFormat), f"`input` must be an ActFormat, not {method.input!r}"
            records = method.tensors and all(isinstance(record, TensorRecord) for record in method.tensors)
            assert records, f"`tensors` must be TensorRecords of a part, got {method.tensors!r}"
            for record in method.tensors:
                packed = any(axis.packed > 1 for axis in record.axes)
                assert not packed or record.unpack, f"{record.name} has a packed axis and no `unpack`"

    def test_triton_encode_agrees_with_the_reference(self) -> None:
        """Run compiled on a GPU, elsewhere in Triton's interpreter, which must be chosen before Triton is imported."""
        formats = [
            (inp, fmt)
            for inp, parts in self.shapes
            if (fmt := self._method(inp, parts)[0].input) is not PLAIN and why_unfused(fmt) is None
        ]
        if not formats:
            pytest.skip("the input format is plain, or no kernel can encode it")
        if torch.device(self.device).type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return run_in_interpreter(self, "test_triton_encode_agrees_with_the_reference")
        if torch.device(self.device).type != "cuda":
            mend_interpreter()
        from dovetail.core.ops.kernels.formats import encode_triton

        for inp, fmt in formats:
            # The interpreter truncates float32 to bfloat16 instead of rounding, so only a GPU can test 16-bit input.
            x_TI = self._x(7, inp) * self._x(7, 1).exp()
            x_TI[3] = 0
            got, expected = encode_triton(x_TI, fmt), encode_reference(x_TI, fmt)
            alike = got.values.dtype == expected.values.dtype and got.values.shape == expected.values.shape
            assert alike, f"{fmt.name}: the kernel's values differ from those of `reference` in dtype or shape"
            # A value halfway between two representable ones may round to either.
            unequal = float((got.values.view(torch.uint8) != expected.values.view(torch.uint8)).float().mean())
            assert unequal < 0.01, f"{fmt.name}: {unequal:.1%} of bytes differ from `reference` ({seed_note()})"
            if expected.scale is not None and got.scale is not None:
                assert got.scale.stride() == expected.scale.stride(), f"{fmt.name}: memory order of the scales"
                assert_near(got.scale, expected.scale, 1e-5, f"the scale tensor of {fmt.name}")

    def test_triton_decode_agrees_with_the_reference(self) -> None:
        """Every code of a weight format of the package's own."""
        method, _ = self._method(*self.shapes[0])
        fmt = method.format if isinstance(method, PackedLinear) else None
        if fmt is None or fmt.decode is None or fmt in vars(weight_formats).values():
            pytest.skip("no packed weights, or a format of the core")
        if torch.device(self.device).type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return run_in_interpreter(self, "test_triton_decode_agrees_with_the_reference")
        if torch.device(self.device).type != "cuda":
            mend_interpreter()
        from dovetail.core.ops.kernels.packed_rows import packed_rows_triton

        codes_OI = torch.arange(2**fmt.bits, dtype=torch.uint8, device=self.device)[None]
        one_OG = torch.ones(1, 1, device=self.device)
        packed = PackedWeight(fmt, codes_OI.shape[1], 0, pack(codes_OI, fmt.stored_bits), one_OG)
        got = packed_rows_triton(packed, None, torch.empty(1, codes_OI.shape[1], device=self.device))
        assert torch.equal(got, fmt.reference(codes_OI)), f"{fmt.name}: `decode` gives {got}"


def run_in_interpreter(suite: object, test: str) -> None:
    """Run one test of a suite class in a new process with Triton's interpreter."""
    cls = type(suite)
    if "<locals>" in cls.__qualname__:
        pytest.skip("the interpreter runs in a new process, which can import only a class at module level")
    output = _interpreted(inspect.getfile(cls), "Test" if cls.__name__.startswith("Test") else cls.__name__)
    assert f"::{cls.__name__}::{test} PASSED" in output, output


@cache
def _interpreted(file: str, classes: str) -> str:
    """Return pytest's output for the tests in Triton of a file's suites, whose class names start with `classes`. One
    process runs them all, because its start takes longer than the tests."""
    tests = [name for name in vars(FormatTests) if name.startswith("test_triton_")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", " or ".join(tests)]
        + ["-o", f"python_classes={classes}", file],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr
