"""Grammars of running requests. Threads compile them, and compute their masks while the device runs."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dovetail.core.arithmetic import ceil_div
from dovetail.core.engine.tracked import CompiledGrammar, CompilingGrammar, GrammarState, Tracked
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

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dovetail.core.compose import Composition

log = logging.getLogger(__name__)

_COMPILE_THREADS = 4
_MASK_THREADS = min(8, os.cpu_count() or 1)
_CACHED = 128
"""Compiled grammars kept for later requests."""
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

    def __init__(self, compiler: GrammarCompiler, vocabulary: Vocabulary, patience: float) -> None:
        """`patience`: seconds that a step waits for a mask when other rows could run without it."""
        self._compiler, self._patience = compiler, patience
        self._words = ceil_div(vocabulary.size, 32)
        self._not_eos_W = ~self._bits(vocabulary.eos_ids)
        self._compiled: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()
        self._compiling: list[CompilingGrammar] = []
        self.running = 0
        """Number of sequences whose output follows a grammar."""
        self._pool = ThreadPoolExecutor(_COMPILE_THREADS, "dovetail-grammar")
        self._asked: queue.SimpleQueue[GrammarState | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def add(self, sequences: Seq[Tracked]) -> None:
        """Compile the grammar of one request's sequences. `compiled` returns them once they may run."""
        grammar = sequences[0].seq.request.params.grammar
        assert grammar is not None
        future = self._compiled.get(grammar)
        if future is None or (future.done() and future.exception() is not None):
            future = self._compiled[grammar] = self._pool.submit(self._compile, grammar)
        self._compiled.move_to_end(grammar)
        while len(self._compiled) > _CACHED:
            self._compiled.popitem(last=False)
        deadline = time.perf_counter() + self._compiler.timeout
        compiling = CompilingGrammar(future, {tracked.seq.uid: tracked for tracked in sequences}, deadline)
        for tracked in sequences:
            tracked.compiling = compiling
        self._compiling.append(compiling)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        matcher = self._compiler.compile(grammar)
        if matcher.finished:
            raise RequestError("grammar: it allows only the empty output")
        compiled = CompiledGrammar(matcher, np.zeros(self._words, np.uint32))
        # The first mask is the most expensive one.
        matcher.mask(compiled.mask_W)
        compiled.mask_W &= self._not_eos_W
        if not compiled.mask_W.any():
            raise RequestError("grammar: no sequence of this model's tokens fits it")
        return compiled

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
        return ready, refused

    @property
    def compiling(self) -> bool:
        """Whether any request waits for its grammar."""
        return bool(self._compiling)

    def wait(self) -> None:
        """Wait for a grammar to be compiled, at most _IDLE_SECONDS."""
        wait_for_futures([waiting.future for waiting in self._compiling], _IDLE_SECONDS, FIRST_COMPLETED)

    def _start(self, tracked: Tracked, compiled: CompiledGrammar) -> None:
        stops_W = self._bits(tracked.seq.request.stop_ids)
        matcher, mask_W = compiled.matcher.fork(), compiled.mask_W.copy()
        if matcher.accepting:
            mask_W |= stops_W
        tracked.grammar = GrammarState(matcher, mask_W, stops_W)
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
            self._threads[-1].start()

    def _compute_masks(self) -> None:
        while (state := self._asked.get()) is not None:
            try:
                state.matcher.mask(state.mask_W)
                state.mask_W &= self._not_eos_W
                if state.matcher.accepting:
                    state.mask_W |= state.stops_W
                state.empty = not state.mask_W.any()
            except Exception as error:  # as in advance
                state.error = _detail(error)
            state.ready.set()

    def _bits(self, tokens: Iterable[int]) -> NDArray[np.uint32]:
        bits_W = np.zeros(self._words, np.uint32)
        for token in tokens:
            bits_W[token // 32] |= np.uint32(1 << token % 32)
        return bits_W

    def close(self) -> None:
        """End the threads, each after the work that it has begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for _ in self._threads:
            self._asked.put(None)


def build_grammars(composition: Composition, spec: ModelSpec, *, patient: bool) -> Grammars | None:
    """Return None if the app has no such part. `patient`: every row waits for its mask without a time limit."""
    if "grammar" not in composition.parts:
        return None
    model = composition.part("model")
    folder = model.target().source(model.config).folder
    tokenizer = None if folder is None else folder / "tokenizer.json"
    if tokenizer is not None and not tokenizer.is_file():
        tokenizer = None
    vocabulary = Vocabulary(spec.vocab, spec.eos_ids, tokenizer)
    compiler = composition.build("grammar", vocabulary=vocabulary)
    return Grammars(compiler, vocabulary, threading.TIMEOUT_MAX if patient else composition.engine.mask_wait)


def _detail(error: BaseException) -> str:
    if isinstance(error, RequestError):
        return str(error)
    log.error("a grammar component failed", exc_info=error)
    return f"grammar: its component failed: {type(error).__name__}: {error}"
