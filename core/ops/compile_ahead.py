"""Compilation of Triton kernels ahead of their first launch, in several threads or processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from dovetail.core.ops.compile_server import CompileServer, Job, keys_from_sources

MOST_WORKERS = 32


def compile_workers(ranks: int) -> int:
    """Return the number of kernels that each of `ranks` ranks on this host compiles at once."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_WORKERS, cores // ranks))


@contextmanager
def compile_ahead(workers: int, *, server: CompileServer | None = None, ignore_errors: bool = False) -> Iterator[None]:
    """Make each launch of a Triton kernel compile it instead of running it; all are compiled when the block ends. Their
    output reads as zeros, which other work in the block must accept, for example as indices. Up to `workers` threads
    compile, or wait for processes of `server` that do. `ignore_errors`: a kernel that does not compile raises only when
    it is launched."""
    import triton
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(kernel, *args, grid=grid, warmup=True, **options)

    def each_config(tuner: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        # Autotuning would time kernels that do not run, and keep the result.
        return tuner.warmup(*args, grid=grid, **options)

    def once(kernel: Any, key: Any, signature: Any, device: Any, constants: Any, options: Any, *more: Any) -> Any:
        # Triton 3.6 does not remember pending compilations: each launch would prepare them again, in 0.3 ms.
        target, folder = kernel.device_caches[device][2], triton.knobs.cache.dir
        pool.job = Job(kernel, signature, constants, options, more[0], target, folder)
        made = start(kernel, key, signature, device, constants, options, *more)
        if made is not None:
            kernel.device_caches[device][0].setdefault(key, made)
        return made

    start, tune = JITFunction._do_compile, Autotuner.run
    with _parsing_in_turn(), _Pool(workers, server) as pool, _mode(pool, ignore_errors):
        # Triton's own way to compile in a pool takes one kernel by name, and plugins' kernels are not known here.
        JITFunction.run, JITFunction._do_compile, Autotuner.run = compile_only, once, each_config
        try:
            with keys_from_sources(), _NewIsZero():
                yield
        finally:
            JITFunction.run, JITFunction._do_compile, Autotuner.run = launch, start, tune


@contextmanager
def _mode(pool: ThreadPoolExecutor, ignore_errors: bool) -> Iterator[None]:
    """Triton's mode for compiling in `pool`. Triton leaves it active where a kernel does not compile."""
    import triton
    from triton.runtime._async_compile import active_mode

    before = active_mode.get()
    try:
        with triton.AsyncCompileMode(pool, ignore_errors=ignore_errors):
            yield
    finally:
        active_mode.set(before)


@contextmanager
def _parsing_in_turn() -> Iterator[None]:
    """Let one thread at a time parse the source of a kernel. Python 3.11 counts the depth of a syntax tree for all
    threads together, and fails where another thread parses meanwhile (CPython issue 106905)."""
    from triton.runtime.jit import JITCallable

    parse, turn = JITCallable.parse, threading.Lock()

    def in_turn(function: Any) -> Any:
        with turn:
            return parse(function)

    JITCallable.parse = in_turn
    try:
        yield
    finally:
        JITCallable.parse = parse


class _Pool(ThreadPoolExecutor):
    """Compiles kernels and prepares their launch on the device that is current where the pool is created."""

    def __init__(self, workers: int, server: CompileServer | None) -> None:
        super().__init__(workers, thread_name_prefix="compile")
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._server = server
        self.job: Job
        """Job of the next call. Written before each `submit`."""

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(self._ready, self.job, call, *args, **kwargs)

    def _ready(self, job: Job, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._server is not None and not job.stored():
            self._server.compile(job)
        kernel = call(*args, **kwargs)
        if self._device is not None:
            torch.cuda.set_device(self._device)
            # Compiles the C code that passes the arguments and loads the kernel, so that the first launch need not.
            with suppress(Exception):  # A launch raises it again. Some kernels are never launched.
                _ = kernel.run
        return kernel


class _NewIsZero(TorchFunctionMode):
    """Fills new memory with zeros, in place of the kernels that would write it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in _NEW else made


_NEW = {torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty}
