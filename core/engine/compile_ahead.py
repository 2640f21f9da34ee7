"""Kernels compiled several at a time, before the first step needs them.

Triton compiles a kernel where it is first launched, one after another. Most of that work is C++ and an assembler in a
process of its own, so threads share it well.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

log = logging.getLogger(__name__)

MOST_WORKERS = 32


def compile_workers(ranks: int) -> int:
    """Threads for each of so many ranks on this host."""
    return max(1, min(MOST_WORKERS, (os.cpu_count() or 1) // ranks))


@contextmanager
def compile_ahead(workers: int) -> Iterator[None]:
    """Within, launching a Triton kernel compiles it for these arguments, and nothing runs; all are compiled when the
    block ends. What a kernel would have written reads as zeros, so whatever else the block does on the device must
    take zeros: they are valid indices."""
    import triton
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(kernel, *args, grid=grid, warmup=True, **options)

    def each_config(tuner: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        # It would time kernels that do not run, and keep the verdict.
        return tuner.warmup(*args, grid=grid, **options)

    tune = Autotuner.run
    with ThreadPoolExecutor(workers, thread_name_prefix="compile") as pool, triton.AsyncCompileMode(pool):
        # Triton compiles in a pool for those who ask kernel by kernel; the plugins' kernels nobody here knows by name.
        JITFunction.run, Autotuner.run = compile_only, each_config
        try:
            with _NewIsZero():
                yield
        finally:
            JITFunction.run, Autotuner.run = launch, tune


def report_late_kernels(on: bool) -> None:
    """While on, each kernel that this process still has to compile is reported: a step and all its requests wait for
    it. Whoever listens to Triton's compilations already is left in his place."""
    from triton import knobs

    if knobs.compilation.listener in (None, _report):
        knobs.compilation.listener = _report if on else None


def _report(*, src: Any, times: Any, cache_hit: bool, **more: Any) -> None:
    taken = "read from Triton's cache" if cache_hit else "compiled"
    log.warning(
        "a step waited %.2f s until kernel %s was %s: start-up did not meet it", times.total / 1e6, src.name, taken
    )


class _NewIsZero(TorchFunctionMode):
    """Memory that a kernel was to fill holds zeros."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in _NEW else made


_NEW = {torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty}
