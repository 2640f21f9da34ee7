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

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, known_numpy_type
    # Skip the 64-bit recomputation of integer sums and products; its assertion is checked only with `debug`.
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
