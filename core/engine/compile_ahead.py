"""Kernels compiled several at a time, before the first step needs them.

Triton compiles a kernel where it is first launched, one after another. Most of that work is C++, and an assembler and a
C compiler in processes of their own, so threads share it well.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
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

    def once(kernel: Any, key: Any, signature: Any, device: Any, *more: Any) -> Any:
        # Triton 3.6 forgets what is being compiled: each launch would prepare it again, which takes 0.3 ms.
        made = start(kernel, key, signature, device, *more)
        if made is not None:
            kernel.device_caches[device][0].setdefault(key, made)
        return made

    start, tune = JITFunction._do_compile, Autotuner.run
    with _Pool(workers) as pool, triton.AsyncCompileMode(pool):
        # Triton compiles in a pool for those who ask kernel by kernel; the plugins' kernels nobody here knows by name.
        JITFunction.run, JITFunction._do_compile, Autotuner.run = compile_only, once, each_config
        try:
            with _NewIsZero():
                yield
        finally:
            JITFunction.run, JITFunction._do_compile, Autotuner.run = launch, start, tune


class _Pool(ThreadPoolExecutor):
    """Compiles kernels, and makes them ready to be launched on the device of the thread that made the pool."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers, thread_name_prefix="compile")
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(self._ready, call, *args, **kwargs)

    def _ready(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kernel = call(*args, **kwargs)
        if self._device is not None:
            torch.cuda.set_device(self._device)
            # At its first launch Triton has C code compiled that passes the arguments, and loads the kernel.
            with suppress(Exception):  # What is wrong is told again by the launch: some are never launched.
                _ = kernel.run
        return kernel


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
