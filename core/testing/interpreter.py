"""Triton's interpreter, mended for this NumPy and for casts to 8-bit floats. For processes with TRITON_INTERPRET=1."""

from __future__ import annotations

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
