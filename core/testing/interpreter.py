"""Triton's interpreter, for processes with TRITON_INTERPRET=1: mended for this NumPy and for casts to 8-bit floats, and
without work whose results nobody looks at."""

from __future__ import annotations

from dataclasses import replace
from typing import Any


def mend_interpreter() -> None:
    """Call before the first kernel runs; twice does no harm."""
    from triton.runtime import interpreter

    if getattr(interpreter, "_mended", False):
        return
    interpreter._mended = True
    patch, convert = interpreter._patch_lang_tensor, interpreter._convert_float

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        """Loops over bounds that a kernel loaded: Triton asks int() of an array of one element, NumPy 2.4 refuses."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def convert_float(source: Any, source_type: Any, target_type: Any, rounding: Any) -> Any:
        """Triton 3.7 drops the carry where rounding to 8 bits reaches the next power of two."""
        if str(source_type) != "fp32" or str(target_type) not in ("fp8e4nv", "fp8e5"):
            return convert(source, source_type, target_type, rounding)
        import torch

        dtype = torch.float8_e4m3fn if str(target_type) == "fp8e4nv" else torch.float8_e5m2
        largest = torch.finfo(dtype).max
        return torch.from_numpy(source).clamp(-largest, largest).to(dtype).view(torch.uint8).numpy()

    interpreter._patch_lang_tensor, interpreter._convert_float = patch_lang_tensor, convert_float


def quicken() -> None:
    """Call before the first kernel runs; twice does no harm."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch, numpy_type = interpreter._patch_lang, interpreter._get_np_dtype
    builder = interpreter.interpreter_builder
    types: dict[str, Any] = {}

    def patch_once(fn: Any) -> Any:
        """Each function that a kernel calls would have the language patched once more; the launch has done it."""
        patched = not (tl.core.is_builtin(tl.load) or tl.core.is_builtin(tl.core.load))
        return interpreter._LangPatchScope() if patched else patch(fn)

    def known_numpy_type(dtype: Any) -> Any:
        """Each question would make a table of all types."""
        name = dtype.scalar.name
        if name not in types:
            types[name] = numpy_type(dtype)
        return types[name]

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, known_numpy_type
    # Sums and products of integers are made once more in 64 bits; without `debug` their assertion is not looked at.
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
