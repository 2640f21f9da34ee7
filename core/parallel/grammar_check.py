"""Trial compilation of grammars in a process of its own, which bounds time, memory and the depth of the stack.

Grammars come from clients, and compilers are native code: a deep one overflows the stack, a large one exhausts memory.
Both end the process. So a grammar is compiled in a checking process first, and in the engine's process only after that
succeeded. The checking process has the smaller stack, so what it survives cannot overflow the engine's.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.core.arithmetic import ceil_div
from dovetail.core.errors import RequestError
from dovetail.core.heap import freeze_heap
from dovetail.core.interfaces import Grammar, GrammarCompiler, Matcher, Vocabulary
from dovetail.core.parallel.channel import Channel, ChannelClosed
from dovetail.core.parallel.failure import describe_exit
from dovetail.core.parallel.process import enter, start_process

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dovetail.core.compose import Selected

log = logging.getLogger(__name__)

CHECK_STACK = 4 << 20
"""Bytes of stack for the trial compilation."""
STACK = 4 * CHECK_STACK
"""Bytes of stack of the engine's threads that compile grammars and compute masks."""
_START_SECONDS = 60.0
"""How long a checking process may take to build the component, which may read a large tokenizer."""
_EXIT_SECONDS = 1.0
"""How long a process that closed its channel may take to exit."""
_SHARED_BYTES = 1 << 30
"""Most memory of what all grammars of a component share."""


@dataclass(slots=True, eq=False)
class CompiledGrammar:
    """A matcher at the start of its grammar, and its mask. Sequences get copies; these never change."""

    matcher: Matcher
    mask_W: NDArray[np.uint32]
    size: int = 0
    """Bytes that it took when it was compiled."""
    worked: float = 0.0
    """Seconds for which masks of its copies were computed. Written by mask threads."""
    failed: bool = False
    """A copy of the matcher reached a limit. Copies may share memory, so later ones would fail as well. Written by
    Grammars."""


def compile_grammar(compiler: GrammarCompiler, grammar: Grammar, not_eos_W: NDArray[np.uint32]) -> CompiledGrammar:
    """Compile a grammar and compute its first mask. Raises RequestError if it allows no output."""
    matcher = compiler.compile(grammar)
    if matcher.finished:
        raise RequestError("grammar: it allows only the empty output")
    compiled = CompiledGrammar(matcher, np.zeros_like(not_eos_W))
    # The first mask is the most expensive one.
    matcher.mask(compiled.mask_W)
    compiled.mask_W &= not_eos_W
    if not compiled.mask_W.any():
        raise RequestError("grammar: no sequence of this model's tokens fits it")
    return compiled


def bits(tokens: Iterable[int], words: int) -> NDArray[np.uint32]:
    """Return a mask [words] with the bits of these tokens."""
    bits_W = np.zeros(words, np.uint32)
    for token in tokens:
        bits_W[token // 32] |= np.uint32(1 << token % 32)
    return bits_W


@contextmanager
def thread_stack(size: int) -> Iterator[None]:
    """Context in which new threads get a stack of `size` bytes."""
    before = threading.stack_size(size)
    try:
        yield
    finally:
        threading.stack_size(before)


class GrammarChecker:
    """A checking process, started by the first check and again after its end. One thread calls `check` and must outlive
    the checker, because Linux ends the process together with the thread that started it."""

    def __init__(self, order: Mapping[str, Any], timeout: float) -> None:
        """`order`: from `check_order`. `timeout`: seconds for one grammar."""
        self._order, self._timeout = order, timeout
        self._process: tuple[subprocess.Popen[bytes], Channel] | None = None
        self._changing = threading.Lock()
        self._checking = self._closed = False

    def check(self, grammar: Grammar) -> int:
        """Compile the grammar in the process and return the bytes that it takes. Raises RequestError with the reason,
        also if that ends the process or takes too long."""
        with self._changing:
            self._checking = True
        try:
            answer = self._ask(self._running(), grammar)
        finally:
            with self._changing:
                self._checking = False
            if self._closed:
                self._end()
        if "refusal" in answer:
            raise RequestError(answer["refusal"], status=answer["status"])
        if "failure" in answer:
            log.error("a grammar component failed:\n%s", answer["traceback"])
            raise RequestError(f"grammar: its component failed: {answer['failure']}")
        return int(answer["bytes"])

    def _ask(self, channel: Channel, grammar: Grammar) -> dict[str, Any]:
        try:
            channel.send({}, grammar.model_dump_json().encode())
            if not channel.wait(self._timeout):
                self._end()
                raise RequestError(f"grammar: it was not compiled within {self._timeout:g} s")
            return channel.recv()[0]
        except ChannelClosed:
            status = self._end()
        if self._closed:
            raise RequestError("grammar: the engine stops")
        log.warning("the process that checks grammars %s; it refuses that request", describe_exit(status, "compiling"))
        raise RequestError(
            f"grammar: it is too deep or too large: compiling it takes more than {CHECK_STACK >> 20} MiB of stack or "
            f"{self._order['memory'] >> 20} MiB of memory"
        )

    def _running(self) -> Channel:
        """Return the channel of the process, which is started if it does not run."""
        if self._process is not None:
            return self._process[1]
        # One thread for each library, and Python's objects in malloc, whose memory the process can measure.
        environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ, "PYTHONMALLOC": "malloc"}
        with self._changing:
            if self._closed:
                raise RequestError("grammar: the engine stops")
            # A crash must not fill the log: a client may cause many.
            self._process = start_process(f"{__name__}:main", (), environment, subprocess.DEVNULL)
        channel = self._process[1]
        try:
            channel.send(self._order)
            error = channel.recv()[0].get("text") if channel.wait(_START_SECONDS) else "it does not answer"
        except ChannelClosed:
            error = describe_exit(self._end(), "starting")
        if error is not None:
            self._end()
            if self._closed:
                raise RequestError("grammar: the engine stops")
            raise RuntimeError(f"the process that checks grammars did not start: {error}")
        return channel

    def _end(self) -> int:
        """End the process and return its exit status."""
        with self._changing:
            process, self._process = self._process, None
        if process is None:
            return -signal.SIGKILL
        popen, channel = process
        try:
            # A process that closed its end is about to exit, and its status tells why.
            status = popen.wait(_EXIT_SECONDS if channel.wait(0) else 0)
        except subprocess.TimeoutExpired:
            popen.kill()
            status = popen.wait()
        channel.close()
        return status

    def close(self) -> None:
        """End the process; a check that runs fails. Callable from any thread."""
        with self._changing:
            self._closed = True
            if self._process is not None:
                self._process[0].kill()
            checking = self._checking
        if not checking:
            self._end()


def check_order(part: Selected, vocabulary: Vocabulary, memory: int) -> dict[str, Any]:
    """Return the message from which a checking process builds the same component."""
    config = type(part.config)
    return {
        "target": part.component.target,
        "config": f"{config.__module__}:{config.__qualname__}",
        "options": part.config.model_dump_json(),
        "vocabulary": [vocabulary.size, vocabulary.eos_ids, vocabulary.tokenizer],
        "memory": memory,
    }


def main(control_fd: int, parent: int) -> None:
    """Entry point of a checking process."""
    control = enter(control_fd, parent, signal.SIGINT)
    # Crashes are expected here.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with thread_stack(CHECK_STACK):
        thread = threading.Thread(target=_serve, args=(control,))
        thread.start()
    thread.join()


def _serve(control: Channel) -> None:
    try:
        order, _ = control.recv()
        try:
            checks = _Checks(order)
        except BaseException as error:
            control.send({"text": f"{type(error).__name__}: {error}"})
            os._exit(1)
        control.send({})
        while True:
            control.send(checks.answer(control.recv()[1]))
    except ChannelClosed:
        os._exit(1)


class _Checks:
    """The component in a checking process."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        size, eos_ids, tokenizer = order["vocabulary"]
        vocabulary = Vocabulary(size, tuple(eos_ids), tokenizer)
        config = resolve_name(order["config"]).model_validate_json(order["options"], strict=True)
        self._compiler: GrammarCompiler = resolve_name(order["target"])(config, vocabulary=vocabulary)
        self._not_eos_W = ~bits(eos_ids, ceil_div(size, 32))
        self._memory: int = order["memory"]
        self._first = True

    def answer(self, raw: bytes) -> dict[str, Any]:
        try:
            if self._first:
                # The first compilation also loads what all grammars share, such as the tokenizer.
                with _memory_limit(self._memory + _SHARED_BYTES):
                    self._trial(raw)
                self._first = False
                freeze_heap(collect=True)
            with _memory_limit(self._memory):
                return {"bytes": self._trial(raw)}
        except RequestError as error:
            return {"refusal": str(error), "status": error.status}
        except MemoryError:
            reason = f"grammar: it is too large: compiling it takes more than {self._memory >> 20} MiB of memory"
            return {"refusal": reason, "status": 400}
        except BaseException as error:  # a plugin's method may raise anything, and native code panics
            return {"failure": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}

    def _trial(self, raw: bytes) -> int:
        """Compile the grammar and return the bytes that it takes, its text included."""
        gc.collect()
        before = _allocated()
        grammar = Grammar.model_validate_json(raw)
        compiled = compile_grammar(self._compiler, grammar, self._not_eos_W)
        compiled.matcher.fork()
        return max(0, _allocated() - before)


@contextmanager
def _memory_limit(size: int) -> Iterator[None]:
    """Context in which this process may allocate `size` bytes more. Linux alone can limit that."""
    if sys.platform != "linux":
        yield
        return
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    with open("/proc/self/status") as file:
        (used,) = (int(line.split()[1]) << 10 for line in file if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)


class _MallInfo(ctypes.Structure):
    """Result of glibc's mallinfo2, mallinfo2(3)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks"),
            *("fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


_LIBC = ctypes.CDLL(None)
if _HAS_MALLINFO := hasattr(_LIBC, "mallinfo2"):
    _LIBC.mallinfo2.restype = _MallInfo


def _allocated() -> int:
    """Return the bytes that malloc has given out; with another C library than glibc, the most ever resident."""
    if _HAS_MALLINFO:
        info = _LIBC.mallinfo2()
        return int(info.uordblks + info.hblkhd)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
