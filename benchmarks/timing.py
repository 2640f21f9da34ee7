"""CUDA graph timing, shared by the scripts that time kernels."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from dovetail.core.ops.kernels.launch import announce, dependent, wait
from dovetail.core.tuning.timing import capture, copies, medians

__all__ = ["capture", "copies", "delay", "in_processes", "medians", "microseconds"]

CYCLES = 1800
"""Clock cycles of a multiprocessor in a microsecond."""


def microseconds(call: Callable[[], object], calls: int = 1, repeats: int = 15) -> float:
    """Median microseconds of `call`, recorded `calls` times in a graph so that the graph's launch does not count."""
    call()
    return medians([capture(lambda: [call() for _ in range(calls)])], repeats)[0] / calls


@triton.jit
def _cycles(after):
    return tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l,r", [after], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _delay(out_ptr, cycles, PDL: tl.constexpr):
    wait(PDL)
    announce(PDL)
    program = tl.program_id(0)
    began = _cycles(program)
    while _cycles(program) - began < cycles:
        pass
    tl.store(out_ptr + program, program)


def delay(programs: torch.Tensor, us: float) -> None:
    """Stand-in for a preceding matmul: one program for each element of `programs` spins for `us` microseconds. Like a
    matmul, it lets the next kernel start only once its own predecessor has ended."""
    _delay[(len(programs),)](programs, int(us * CYCLES), num_warps=8, **dependent(programs))


def in_processes(work: Callable[..., None], *args: object) -> None:
    """Call work(*args, share, count) in a process for each spare core. Searches compile their candidates so, into
    Triton's cache on disk, before they time them."""
    count = max(1, len(os.sched_getaffinity(0)) - 1)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=work, args=(*args, share, count)) for share in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
