"""Compatibility of Triton's interpreter with the installed NumPy."""

from dovetail.core.testing.interpreter import mend_interpreter as mend

__all__ = ["mend"]
