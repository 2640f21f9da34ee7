"""Compilation of Triton kernels in processes. Triton's code generation is Python code, which the threads of one process
run in turn, and for which a launching thread would wait.

A server process imports torch and Triton while the engine loads weights, then forks workers: it has no CUDA context. A
worker compiles into Triton's cache on disk, and the engine's own compilation reads the result from there. The engine
thus depends on no worker: it compiles itself whatever a worker could not. Each rank of a host has a server with as many
workers as there are cores. A worker waits while another one compiles the same variant, so most ranks only wait.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import logging
import os
import pickle
import pkgutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, Self

from dovetail.core.parallel.channel import Channel, ChannelClosed
from dovetail.core.parallel.failure import describe_exit
from dovetail.core.parallel.process import die_with, enter, start_process

log = logging.getLogger(__name__)


class Job(NamedTuple):
    """Variant of a kernel, with the terms of Triton's JITFunction._do_compile."""

    kernel: Any
    signature: Any
    constants: Any
    options: Any
    attributes: Any
    target: Any
    cache_folder: str

    def source(self) -> Any:
        return self.kernel.ASTSource(self.kernel, self.signature, self.constants, self.attributes)

    def digest(self) -> str:
        """Return the job's name in Triton's cache."""
        from triton._C.libtriton import get_cache_invalidating_env_vars
        from triton.compiler import get_cache_key, make_backend

        variables = get_cache_invalidating_env_vars()
        key = get_cache_key(self.source(), make_backend(self.target), self.options, variables)
        return hashlib.sha256(key.encode()).hexdigest()

    def stored(self) -> bool:
        """Whether Triton's cache has the compiled job."""
        from triton.runtime.cache import get_cache_manager

        return get_cache_manager(self.digest()).get_group(f"{self.source().name[:150]}.json") is not None

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes that use this cache from compiling the job meanwhile."""
        import fcntl

        os.makedirs(self.cache_folder, exist_ok=True)
        with open(Path(self.cache_folder) / "dovetail.lock", "wb") as file:
            # One file has a lock for each job, at an offset. The bytes need not exist.
            fcntl.lockf(file, fcntl.LOCK_EX, 1, int(self.digest()[:15], 16))
            yield


@contextmanager
def keys_from_sources() -> Iterator[None]:
    """Let a kernel's key in Triton's cache depend on its source alone. Triton merges the global values that an inner
    function uses before it looks for them, so that they are part of the key only if the function was met before."""
    from triton.runtime.jit import DependenciesFinder

    update = DependenciesFinder._update_hash

    def find_first(finder: Any, function: Any) -> None:
        _ = function.cache_key
        update(finder, function)

    DependenciesFinder._update_hash = find_first
    try:
        yield
    finally:
        DependenciesFinder._update_hash = update


class CompileServer:
    """Server process with `workers` workers. Use it as a context; the thread that enters has to outlive it."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._numbers = itertools.count()
        self._pending: dict[int, threading.Event] = {}
        self._ended = False

    def __enter__(self) -> Self:
        self._popen, self._channel = start_process("dovetail.core.ops.compile_server:serve")
        self._channel.send({"workers": self.workers})
        threading.Thread(target=self._receive, name="compile-server", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended = True
        self._popen.kill()
        self._popen.wait()

    def compile(self, job: Job) -> None:
        """Wait until a worker has compiled the job into Triton's cache or failed to. Callable from any thread."""
        number, done = next(self._numbers), threading.Event()
        self._pending[number] = done
        try:
            if not self._ended:
                self._channel.send({"job": number}, pack(job))
                done.wait()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            log.debug("this process compiles %s: %s", job.kernel, error)
        except ChannelClosed:
            pass  # `_receive` reports it.
        finally:
            self._pending.pop(number, None)

    def _receive(self) -> None:
        from triton.runtime.cache import triton_key

        triton_key()  # Takes half a second, for which the first compilation need not wait then.
        try:
            while True:
                message, _ = self._channel.recv()
                if message["error"]:
                    log.debug("this process compiles a kernel that a worker could not: %s", message["error"])
                self._pending[message["job"]].set()
        except ChannelClosed:
            if not self._ended:
                how = describe_exit(self._popen.wait(), "compiling kernels")
                log.warning("a process %s: kernels compile in threads instead, which takes longer", how)
            self._ended = True
            for done in list(self._pending.values()):
                done.set()
            self._channel.close()


def serve(control_fd: int, parent: int) -> None:
    """Entry point of the server: answer each job once it is in Triton's cache."""
    channel = enter(control_fd, parent, signal.SIGINT, signal.SIGTERM)
    workers = channel.recv()[0]["workers"]
    import torch  # noqa: F401
    import triton.experimental.gluon  # noqa: F401
    from triton.runtime.cache import triton_key

    triton_key()  # Reads the whole compiler, and keeps its hash for the workers.
    fork = partial(ProcessPoolExecutor, workers, get_context("fork"), initializer=die_with, initargs=(os.getpid(),))
    with keys_from_sources(), fork() as pool:
        try:
            while True:
                message, raw = channel.recv()
                pool.submit(_compile, raw).add_done_callback(partial(_answer, channel, message["job"]))
        except ChannelClosed:
            pool.shutdown(cancel_futures=True)


def _answer(channel: Channel, number: int, done: Future[None]) -> None:
    error = done.exception()
    channel.send({"job": number, "error": "" if error is None else f"{type(error).__name__}: {error}"})


def _compile(raw: bytes) -> None:
    """Compile a packed job. Runs in a worker."""
    from triton import knobs
    from triton.runtime.driver import driver

    job = unpack(raw)
    knobs.cache.dir = job.cache_folder
    driver.set_active(_TargetOnly(job.target))
    job.kernel.create_binder()  # Sets the kernel's `ASTSource` and `compile`.
    with job.lock():
        job.kernel.compile(job.source(), target=job.target, options=job.options.__dict__)


class _TargetOnly:
    """Driver of a worker, which needs no CUDA context."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target


class _Pickler(pickle.Pickler):
    """Pickles functions of kernels by name."""

    def persistent_id(self, obj: Any) -> str | None:
        from triton.runtime.jit import JITCallable

        if not isinstance(obj, JITCallable):
            return None
        name = f"{obj.fn.__module__}:{obj.fn.__qualname__}"
        with suppress(ImportError, AttributeError, ValueError):
            if _resolve(name) is obj:
                return name
        raise pickle.PicklingError(f"{name} is not the name of this function, so another process cannot import it")


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: str) -> Any:
        return _resolve(pid)


def _resolve(name: str) -> Any:
    from triton.runtime.jit import JITCallable

    found = pkgutil.resolve_name(name)
    while not isinstance(found, JITCallable):
        found = found.fn  # of triton.autotune or triton.heuristics
    return found


def pack(what: Any) -> bytes:
    """Pickle what has functions of kernels in it, for a process of this program."""
    packed = io.BytesIO()
    _Pickler(packed).dump(what)
    return packed.getvalue()


def unpack(raw: bytes) -> Any:
    return _Unpickler(io.BytesIO(raw)).load()
