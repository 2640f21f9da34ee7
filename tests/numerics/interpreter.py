"""Triton's interpreter with this NumPy."""

from dovetail.core.testing.interpreter import mend_interpreter as mend

__all__ = ["mend"]
