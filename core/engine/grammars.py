"""Grammars of running requests. Threads compile them, after a process that checks them, and compute their masks while
the device runs."""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.core.arithmetic import ceil_div
from dovetail.core.engine.tracked import CompilingGrammar, GrammarState, Tracked
from dovetail.core.errors import RequestError
from dovetail.core.interfaces import (
    FinishReason,
    Grammar,
    GrammarCompiler,
    ModelSpec,
    Sequence,
    Status,
    Vocabulary,
)
from dovetail.core.parallel.grammar_check import (
    STACK,
    CompiledGrammar,
    GrammarChecker,
    bits,
    check_order,
    compile_grammar,
    thread_stack,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dovetail.core.compose import Composition

log = logging.getLogger(__name__)

_COMPILE_THREADS = 4
_MASK_THREADS = min(8, os.cpu_count() or 1)
_LARGEST = 16
"""One compiled grammar takes at most this part of the cache."""
_SMALLEST = 1 << 16
"""Bytes that a compiled grammar counts at least."""
_GROWTH = 64 << 20
"""Bytes by which the shared tables of a compiled grammar grow in each second of computing masks, at most. Native code
does not report it."""
_SLOW_SECONDS = 0.005
"""An advance that takes longer is slow: it runs in the step loop and delays every request."""
_SLOW_TOTAL_SECONDS = 1.0
"""Slow advances of one sequence may take this long in all. An ambiguous grammar gets slower as the output grows."""
_IDLE_SECONDS = 0.01
"""How long to wait when the engine has nothing else to do; new requests wait as long."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence that its grammar ends."""

    uid: int
    reason: FinishReason
    detail: str = ""


class Grammars:
    """Used by the engine's thread alone. A sequence's state is in its Tracked record."""

    def __init__(
        self,
        compiler: GrammarCompiler,
        vocabulary: Vocabulary,
        patience: float,
        cache: int,
        order: Mapping[str, Any] | None = None,
    ) -> None:
        """`patience`: seconds that a step waits for a mask when other rows could run without it. `cache`: bytes of
        compiled grammars kept for later requests. `order`: from `check_order`; None = grammars are not checked."""
        self._compiler, self._patience, self._cache, self._order = compiler, patience, cache, order
        self._words = ceil_div(vocabulary.size, 32)
        self._not_eos_W = ~bits(vocabulary.eos_ids, self._words)
        self._compiled: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()
        self._compiling: list[CompilingGrammar] = []
        self.running = 0
        """Number of sequences whose output follows a grammar."""
        self._pool = ThreadPoolExecutor(_COMPILE_THREADS, "dovetail-grammar")
        self._asked: queue.SimpleQueue[GrammarState | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._own = threading.local()
        """`checker` of a thread of the pool."""
        self._checkers: list[GrammarChecker] = []

    def add(self, sequences: Seq[Tracked]) -> None:
        """Compile the grammar of one request's sequences. `compiled` returns them once they may run."""
        grammar = sequences[0].seq.request.params.grammar
        assert grammar is not None
        self._trim()
        future = self._compiled.get(grammar)
        if future is None:
            with thread_stack(STACK):
                future = self._compiled[grammar] = self._pool.submit(self._compile, grammar)
        self._compiled.move_to_end(grammar)
        deadline = time.perf_counter() + self._compiler.timeout
        compiling = CompilingGrammar(future, {tracked.seq.uid: tracked for tracked in sequences}, deadline)
        for tracked in sequences:
            tracked.compiling = compiling
        self._compiling.append(compiling)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        size = 0 if self._order is None else self._check(grammar, self._order)
        try:
            compiled = compile_grammar(self._compiler, grammar, self._not_eos_W)
        except Exception as error:  # a plugin's method may raise anything
            # The traceback would keep what was compiled.
            raise RequestError(_detail(error)) from None
        compiled.size = size
        return compiled

    def _check(self, grammar: Grammar, order: Mapping[str, Any]) -> int:
        """Check the grammar in the process of this thread and return the bytes that it takes compiled."""
        if not hasattr(self._own, "checker"):
            self._own.checker = GrammarChecker(order, self._compiler.timeout)
            self._checkers.append(self._own.checker)
        size: int = self._own.checker.check(grammar)
        if size > self._cache // _LARGEST:
            raise RequestError(
                f"grammar: compiled it takes {size} bytes, and a grammar may take {self._cache // _LARGEST}, "
                f"1/{_LARGEST} of engine.grammar_cache={self._cache}"
            )
        return size

    def _trim(self) -> None:
        """Drop what was refused or has failed, what has grown too large, and the least recently used of what is more
        than the cache may hold."""
        sizes: dict[Grammar, float] = {}
        for grammar, future in list(self._compiled.items()):
            if not future.done():
                continue
            size = math.inf if future.exception() is not None else _size(future.result())
            if size > self._cache // _LARGEST:
                del self._compiled[grammar]
            else:
                sizes[grammar] = size
        total = sum(sizes.values())
        for grammar, size in sizes.items():
            if total <= self._cache:
                break
            del self._compiled[grammar]
            total -= size

    def compiled(self) -> tuple[list[Sequence], list[Ended]]:
        """Return the sequences whose grammar was compiled since the last call, and those whose grammar failed."""
        ready: list[Sequence] = []
        refused: list[Ended] = []
        for waiting in list(self._compiling):
            if waiting.future.done():
                error = waiting.future.exception()
            elif time.perf_counter() > waiting.deadline:
                error = RequestError(f"grammar: it was not compiled within {self._compiler.timeout:g} s")
            else:
                continue
            self._compiling.remove(waiting)
            for uid, tracked in waiting.sequences.items():
                tracked.compiling = None
                if error is None:
                    self._start(tracked, waiting.future.result())
                    ready.append(tracked.seq)
                else:
                    tracked.seq.status = Status.FINISHED
                    refused.append(Ended(uid, FinishReason.REJECTED, _detail(error)))
        if ready or refused:
            self._trim()
        return ready, refused

    @property
    def compiling(self) -> bool:
        """Whether any request waits for its grammar."""
        return bool(self._compiling)

    def wait(self) -> None:
        """Wait for a grammar to be compiled, at most _IDLE_SECONDS."""
        wait_for_futures([waiting.future for waiting in self._compiling], _IDLE_SECONDS, FIRST_COMPLETED)

    def _start(self, tracked: Tracked, compiled: CompiledGrammar) -> None:
        stops_W = bits(tracked.seq.request.stop_ids, self._words)
        matcher, mask_W = compiled.matcher.fork(), compiled.mask_W.copy()
        if matcher.accepting:
            mask_W |= stops_W
        tracked.grammar = GrammarState(compiled, matcher, mask_W, stops_W)
        tracked.grammar.ready.set()
        self.running += 1

    def leave(self, tracked: Tracked) -> None:
        """Drop a sequence that has ended."""
        if tracked.grammar is not None:
            self.running -= 1
        if tracked.compiling is not None:
            del tracked.compiling.sequences[tracked.seq.uid]
            tracked.seq.status = Status.FINISHED

    def advance(self, tracked: Tracked, token: int) -> Ended | None:
        """Advance by a token of the output. Unless that ends the sequence, a thread begins to compute its next mask."""
        uid, state = tracked.seq.uid, tracked.grammar
        assert state is not None
        began = time.perf_counter()
        try:
            state.matcher.advance(token)
        except Exception as error:  # a plugin's method may raise anything; only this request fails
            state.origin.failed = True
            return Ended(uid, FinishReason.REJECTED, _detail(error))
        if (taken := time.perf_counter() - began) > _SLOW_SECONDS:
            state.slow += taken
            if state.slow > _SLOW_TOTAL_SECONDS:
                detail = f"grammar: following the output delayed all requests by {state.slow:.1f} s: is it ambiguous?"
                return Ended(uid, FinishReason.REJECTED, detail)
        if state.matcher.finished:
            return Ended(uid, FinishReason.STOP)
        state.ready.clear()
        state.asked = time.perf_counter()
        if not self._threads:
            self._start_threads()
        self._asked.put(state)
        return None

    def masks(
        self, states: Mapping[int, GrammarState], others: bool
    ) -> tuple[dict[int, NDArray[np.uint32]], list[Ended]]:
        """Return (mask by uid, sequences whose grammar ended). A uid in neither has no mask yet. Waits no longer than
        patience allows, or _IDLE_SECONDS if there are no `others` that the step could serve."""
        for state in states.values():
            if not state.ready.is_set():
                left = state.asked + self._patience - time.perf_counter()
                state.ready.wait(min(max(0.0, left), threading.TIMEOUT_MAX))
        if states and not others and not any(state.ready.is_set() for state in states.values()):
            next(iter(states.values())).ready.wait(_IDLE_SECONDS)
        masks: dict[int, NDArray[np.uint32]] = {}
        ended: list[Ended] = []
        for uid, state in states.items():
            if not state.ready.is_set():
                continue
            if state.error:
                state.origin.failed = True
                ended.append(Ended(uid, FinishReason.REJECTED, state.error))
            elif not state.empty:
                masks[uid] = state.mask_W
            elif state.matcher.accepting:
                ended.append(Ended(uid, FinishReason.STOP))
            else:
                detail = "grammar: no token may follow the output so far, which is not complete"
                ended.append(Ended(uid, FinishReason.REJECTED, detail))
        return masks, ended

    def _start_threads(self) -> None:
        for i in range(_MASK_THREADS):
            name = f"dovetail-mask-{i}"
            self._threads.append(threading.Thread(target=self._compute_masks, name=name, daemon=True))
            with thread_stack(STACK):
                self._threads[-1].start()

    def _compute_masks(self) -> None:
        while (state := self._asked.get()) is not None:
            began = time.perf_counter()
            try:
                state.matcher.mask(state.mask_W)
                state.mask_W &= self._not_eos_W
                if state.matcher.accepting:
                    state.mask_W |= state.stops_W
                state.empty = not state.mask_W.any()
            except BaseException as error:  # as in advance; a panic of native code is no Exception
                state.error = _detail(error)
            state.origin.worked += time.perf_counter() - began
            state.ready.set()

    def close(self) -> None:
        """End the checking processes and the threads, each after the work that it has begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for checker in list(self._checkers):
            checker.close()
        for _ in self._threads:
            self._asked.put(None)


def build_grammars(composition: Composition, spec: ModelSpec, *, patient: bool) -> Grammars | None:
    """Return None if the app has no such part. `patient`: every row waits for its mask without a time limit."""
    if "grammar" not in composition.parts:
        return None
    model = composition.part("model")
    checkpoint = model.target().source(model.config).checkpoint
    tokenizer = None if checkpoint is None else checkpoint.text("tokenizer.json")
    vocabulary = Vocabulary(spec.vocab, spec.eos_ids, tokenizer)
    compiler: GrammarCompiler = composition.build("grammar", vocabulary=vocabulary)
    order = check_order(composition.part("grammar"), vocabulary, compiler.memory) if compiler.checked else None
    engine = composition.engine
    return Grammars(
        compiler, vocabulary, threading.TIMEOUT_MAX if patient else engine.mask_wait, engine.grammar_cache, order
    )


def _size(compiled: CompiledGrammar) -> float:
    """Return the bytes that a compiled grammar may take by now; infinite if it must not be used again."""
    return math.inf if compiled.failed else max(compiled.size, _SMALLEST) + compiled.worked * _GROWTH


def _detail(error: BaseException) -> str:
    if isinstance(error, RequestError):
        return str(error)
    log.error("a grammar component failed", exc_info=error)
    return f"grammar: its component failed: {type(error).__name__}: {error}"
