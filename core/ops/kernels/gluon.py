"""Helpers for kernels in Gluon, Triton's lower-level language."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

barrier = getattr(gl, "thread_barrier", None) or gl.barrier
"""Barrier of all threads of a program. Triton 3.7 renamed it."""
