"""Triton's interpreter without work whose results nobody looks at, for processes with TRITON_INTERPRET=1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any


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
