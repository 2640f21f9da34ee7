"""CUDA graph timing, shared by the scripts that time kernels."""

from __future__ import annotations

import multiprocessing
import os
import statistics
from collections.abc import Callable, Sequence
from functools import cache

import torch
import triton
import triton.language as tl

from dovetail.core.ops.kernels.launch import announce, dependent, wait

ROTATED_BYTES = 200 << 20
"""Operands are copied until they total more than this, several times the L2 cache."""
CYCLES = 1800
"""Clock cycles of a multiprocessor in a microsecond."""


def copies(nbytes: int) -> int:
    """How many copies of an operand of `nbytes` to rotate through, so that none is found in the L2 cache."""
    return max(2, -(-ROTATED_BYTES // nbytes))


@cache
def _stream() -> torch.cuda.Stream:
    """One stream for all captures: graphs that share a memory pool reuse memory of the same stream only."""
    return torch.cuda.Stream()


def capture(run: Callable[[], object], pool: tuple[int, int] | None = None) -> torch.cuda.CUDAGraph:
    """Record a graph of `run`, which must have run before.

    torch.cuda.graph would collect garbage and empty the allocator's cache each time; searches capture thousands.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(_stream()):
        graph.capture_begin(*(() if pool is None else (pool,)))
        try:
            run()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(_stream())
    return graph


def medians(graphs: Sequence[torch.cuda.CUDAGraph], repeats: int) -> list[float]:
    """Median microseconds of a replay of each graph. They are replayed in turn, since the GPU's clocks drift."""
    times: list[list[float]] = [[] for _ in graphs]
    for graph in graphs:
        graph.replay()
    for _ in range(repeats):
        for graph, found in zip(graphs, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) * 1e3)
    return [statistics.median(found) for found in times]


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
