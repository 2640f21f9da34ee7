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
from types import MappingProxyType
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
        *,
        drafts: bool = False,
    ) -> None:
        """`patience`: seconds that a step waits for a mask when other rows could run without it. `cache`: bytes of
        compiled grammars kept for later requests. `order`: from `check_order`; None = grammars are not checked.
        `drafts`: whether rows verify drafts."""
        self._compiler, self._patience, self._cache, self._order = compiler, patience, cache, order
        self._words, self._drafts = ceil_div(vocabulary.size, 32), drafts
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
        tracked.grammar = state = GrammarState(compiled, matcher, mask_W, stops_W)
        state.ready.set()
        if self._drafts:
            self._expect(state)
        self.running += 1

    @staticmethod
    def _expect(state: GrammarState) -> None:
        """Ask the grammar for tokens to draft. A component that fails here costs drafts, and fails again where its
        failure is reported."""
        try:
            state.forced = tuple(state.matcher.forced())
        except Exception:  # a plugin's method may raise anything
            log.exception("a grammar component failed to name the tokens that follow")
            state.forced = ()

    def leave(self, tracked: Tracked) -> None:
        """Drop a sequence that has ended."""
        if tracked.grammar is not None:
            self.running -= 1
        if tracked.compiling is not None:
            del tracked.compiling.sequences[tracked.seq.uid]
            tracked.seq.status = Status.FINISHED

    def advance(self, tracked: Tracked, token: int) -> Ended | None:
        """Advance by a token of the output. `follow` must come after the last one, unless the sequence ends."""
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
        state.taken.append(token)
        if state.dead and state.dead == tuple(state.taken):
            # No token may follow, so what the step drew behind the drafts has no meaning.
            return _stuck(uid, state)
        return None

    def follow(self, tracked: Tracked) -> None:
        """Let a thread compute the mask of the tokens that may follow the output, which `advance` took."""
        state = tracked.grammar
        assert state is not None
        state.drafts, state.dead = (), ()
        state.draft_masks.clear()
        state.taken.clear()
        if self._drafts:
            self._expect(state)
        self._ask(state)

    def _ask(self, state: GrammarState) -> None:
        state.ready.clear()
        state.asked = time.perf_counter()
        if not self._threads:
            self._start_threads()
        self._asked.put(state)

    def masks(
        self,
        states: Mapping[int, GrammarState],
        others: bool,
        guesses: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
    ) -> tuple[dict[int, list[NDArray[np.uint32]]], list[Ended]]:
        """Return (masks by uid, sequences whose grammar ended). A row has the mask of its next token, and one behind
        each of its first drafts, which are in `guesses`. A uid in neither has no mask yet. Waits no longer than
        patience allows, or _IDLE_SECONDS if there are no `others` that the step could serve."""
        self._wait(states, others)
        asked = {}
        for uid, state in states.items():
            # Once for each output: a step that misses these masks leaves them to the next, which may have other drafts.
            if (drafts := guesses.get(uid, ())) and state.ready.is_set() and not state.drafts:
                if not (state.error or state.empty):
                    state.drafts = drafts
                    self._ask(state)
                    asked[uid] = state
        self._wait(asked, others or len(asked) < len(states))
        masks: dict[int, list[NDArray[np.uint32]]] = {}
        ended: list[Ended] = []
        for uid, state in states.items():
            if not state.ready.is_set():
                continue
            if state.error:
                state.origin.failed = True
                ended.append(Ended(uid, FinishReason.REJECTED, state.error))
            elif state.empty:
                ended.append(_stuck(uid, state))
            else:
                same = common_prefix(guesses.get(uid, ()), state.drafts)
                masks[uid] = [state.mask_W, *state.draft_masks[:same]]
        return masks, ended

    def _wait(self, states: Mapping[int, GrammarState], others: bool) -> None:
        for state in states.values():
            if not state.ready.is_set():
                left = state.asked + self._patience - time.perf_counter()
                state.ready.wait(min(max(0.0, left), threading.TIMEOUT_MAX))
        if states and not others and not any(state.ready.is_set() for state in states.values()):
            next(iter(states.values())).ready.wait(_IDLE_SECONDS)

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
                if state.drafts:
                    self._mask_drafts(state)
                else:
                    self._mask(state, state.mask_W)
                    state.empty = not state.mask_W.any()
            except BaseException as error:  # as in advance; a panic of native code is no Exception
                state.error = _detail(error)
            state.origin.worked += time.perf_counter() - began
            state.ready.set()

    def _mask(self, state: GrammarState, mask_W: NDArray[np.uint32]) -> None:
        state.matcher.mask(mask_W)
        mask_W &= self._not_eos_W
        if state.matcher.accepting:
            mask_W |= state.stops_W

    def _mask_drafts(self, state: GrammarState) -> None:
        """Compute the masks behind the drafts, as far as the output may follow them, and take the drafts back."""
        mask_W, moved = state.mask_W, 0
        for token in state.drafts:
            allowed = has_bit(mask_W, token)
            # What follows a draft that is rejected or that ends the output is not read: any mask will do.
            state.draft_masks.append(mask_W)
            if not allowed or has_bit(state.stops_W, token):
                break
            state.matcher.advance(token)
            moved += 1
            if state.matcher.finished:
                break
            mask_W = np.empty_like(mask_W)
            self._mask(state, mask_W)
            if not mask_W.any():
                state.dead = state.drafts[:moved]
                break
            state.draft_masks[-1] = mask_W
        state.matcher.rollback(moved)

    def close(self) -> None:
        """End the checking processes and the threads, each after the work that it has begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for checker in list(self._checkers):
            checker.close()
        for _ in self._threads:
            self._asked.put(None)


def build_grammars(composition: Composition, spec: ModelSpec, *, patient: bool, drafts: bool) -> Grammars | None:
    """Return None if the app has no such part. `patient`: every row waits for its mask without a time limit. `drafts`:
    whether rows verify drafts."""
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
        compiler,
        vocabulary,
        threading.TIMEOUT_MAX if patient else engine.mask_wait,
        engine.grammar_cache,
        order,
        drafts=drafts,
    )


def has_bit(mask_W: NDArray[np.uint32], token: int) -> bool:
    """Return whether a mask allows the token."""
    word, bit = divmod(token, 32)
    return word < len(mask_W) and bool(mask_W[word] >> np.uint32(bit) & np.uint32(1))


def common_prefix(first: Seq[int], second: Seq[int]) -> int:
    """Return the number of equal tokens before the first unequal one."""
    for count, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return count
    return min(len(first), len(second))


def _stuck(uid: int, state: GrammarState) -> Ended:
    """Return the end of a sequence after whose output no token may follow."""
    if state.matcher.accepting:
        return Ended(uid, FinishReason.STOP)
    detail = "grammar: no token may follow the output so far, which is not complete"
    return Ended(uid, FinishReason.REJECTED, detail)


def _size(compiled: CompiledGrammar) -> float:
    """Return the bytes that a compiled grammar may take by now; infinite if it must not be used again."""
    return math.inf if compiled.failed else max(compiled.size, _SMALLEST) + compiled.worked * _GROWTH


def _detail(error: BaseException) -> str:
    if isinstance(error, RequestError):
        return str(error)
    log.error("a grammar component failed", exc_info=error)
    return f"grammar: its component failed: {type(error).__name__}: {error}"
