"""What kernels in Gluon, Triton's lower language, have in common."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

barrier = getattr(gl, "thread_barrier", None) or gl.barrier
"""All threads of a program: its name in Triton 3.6, and from 3.7 on."""
