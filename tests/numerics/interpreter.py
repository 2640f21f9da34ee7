"""Triton's interpreter with this NumPy."""

from __future__ import annotations


def mend() -> None:
    """Loops over bounds that a kernel loaded: Triton 3.6 asks int() of an array of one element, NumPy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_mend
