"""Patches for the interpreter of Triton (TRITON_INTERPRET=1): fixes for NumPy 2.4 and 8-bit casts, and speed-ups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any


def mend_interpreter() -> None:
    """Fix known bugs. Call before the first kernel runs; further calls do nothing."""
    from triton.runtime import interpreter

    if getattr(interpreter, "_mended", False):
        return
    interpreter._mended = True
    patch, convert = interpreter._patch_lang_tensor, interpreter._convert_float

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        """Support loop bounds loaded by a kernel: Triton calls int() on an array of one element, NumPy 2.4 refuses."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def convert_float(source: Any, source_type: Any, target_type: Any, rounding: Any) -> Any:
        """Round correctly: Triton 3.7 drops the carry if rounding to 8 bits reaches the next power of two."""
        if str(source_type) != "fp32" or str(target_type) not in ("fp8e4nv", "fp8e5"):
            return convert(source, source_type, target_type, rounding)
        import torch

        dtype = torch.float8_e4m3fn if str(target_type) == "fp8e4nv" else torch.float8_e5m2
        largest = torch.finfo(dtype).max
        return torch.from_numpy(source).clamp(-largest, largest).to(dtype).view(torch.uint8).numpy()

    interpreter._patch_lang_tensor, interpreter._convert_float = patch_lang_tensor, convert_float


def quicken() -> None:
    """Skip redundant work. Call before the first kernel runs; further calls do no harm."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch, numpy_type = interpreter._patch_lang, interpreter._get_np_dtype
    builder = interpreter.interpreter_builder
    types: dict[str, Any] = {}

    def patch_once(fn: Any) -> Any:
        """Patch the language once per launch instead of again for each function that a kernel calls."""
        patched = not (tl.core.is_builtin(tl.load) or tl.core.is_builtin(tl.core.load))
        return interpreter._LangPatchScope() if patched else patch(fn)

    def known_numpy_type(dtype: Any) -> Any:
        """Cache the answer; Triton builds a table of all types for each call."""
        name = dtype.scalar.name
        if name not in types:
            types[name] = numpy_type(dtype)
        return types[name]

    interpreter.ReduceOps.generic_reduce = reduce_by_halves
    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, known_numpy_type
    # Skip the 64-bit recomputation of integer sums and products; its assertion is checked only with `debug`.
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


def reduce_by_halves(self: Any, input: Any) -> list[Any]:
    """Combine neighbours until one element is left. Triton calls the function for each element of the block.

    Installed as ReduceOps.generic_reduce. Triton assumes that the function is associative.
    """
    import numpy as np

    whole = self.axis is None
    axis = 0 if whole else self.axis
    dtypes = [x.dtype for x in input]
    parts = [x.handle.data.reshape(-1) if whole else x.handle.data for x in input]
    while (length := parts[0].shape[axis]) > 1:
        pairs = ([part.take(range(first, length, 2), axis) for part in parts] for first in (0, 1))
        left, right = ([*map(self.to_tensor, values, dtypes)] for values in pairs)
        found = self.combine_fn.fn(*left, *right)
        parts = [x.handle.data for x in (found if isinstance(found, tuple) else (found,))]
    if whole and self.keep_dims:
        parts = [part.reshape((1,) * len(input[0].shape)) for part in parts]
    elif not self.keep_dims:
        parts = [np.squeeze(part, axis) for part in parts]
    return [*map(self.to_tensor, parts, dtypes)]
