"""Grammars of running requests: compiled off the step loop, with masks that threads compute while the device runs."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from dovetail.core.arithmetic import ceil_div
from dovetail.core.errors import RequestError
from dovetail.core.interfaces import (
    FinishReason,
    Grammar,
    GrammarCompiler,
    Matcher,
    ModelSpec,
    Sequence,
    Status,
    Vocabulary,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dovetail.core.compose import Composition

log = logging.getLogger(__name__)

_COMPILING = 4
"""Threads."""
_MASKING = min(8, os.cpu_count() or 1)
"""Threads."""
_KEPT = 128
"""Compiled grammars kept for requests to come."""
_SLOW = 0.005
"""Seconds that an advance may take in the step loop, while everybody waits."""
_FORGIVEN = 1.0
"""Seconds that one sequence's slower ones may take in all: an ambiguous grammar is the slower the longer the output."""
_MOMENT = 0.01
"""Seconds to wait where there is nothing else to do; new requests wait as long."""


@dataclass(slots=True, eq=False)
class _Compiled:
    """A matcher that nobody advances, and its mask. Sequences take copies."""

    matcher: Matcher
    mask_W: NDArray[np.uint32]


@dataclass(slots=True, eq=False)
class _Followed:
    """One sequence's output. The engine's thread advances the matcher while `ready` is set, a mask thread reads it
    while it is not."""

    matcher: Matcher
    mask_W: NDArray[np.uint32]
    """Written by a mask thread."""
    stops_W: NDArray[np.uint32]
    """The tokens that end the request."""
    ready: threading.Event = field(default_factory=threading.Event)
    """Set by a mask thread when the mask is that of the matcher's state, cleared by the engine's."""
    asked: float = 0.0
    """time.perf_counter() when it was cleared."""
    slow: float = 0.0
    """Seconds that its slow advances took. Written by the engine's thread."""
    empty: bool = False
    """No token may follow, nor end the output. Written by a mask thread."""
    error: str = ""
    """Why there is no mask. Written by a mask thread."""


@dataclass(slots=True, eq=False)
class _Compiling:
    """A request whose grammar is not there yet."""

    future: Future[_Compiled]
    sequences: dict[int, Sequence]
    """Those not aborted meanwhile."""
    deadline: float


@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence that its grammar ends without another token."""

    uid: int
    reason: FinishReason
    detail: str = ""


class Grammars:
    """Called by the engine's thread alone."""

    def __init__(self, compiler: GrammarCompiler, vocabulary: Vocabulary, patience: float) -> None:
        """`patience`: seconds that a step waits for a mask when others could go on without it."""
        self._compiler, self._patience = compiler, patience
        self._words = ceil_div(vocabulary.size, 32)
        self._not_eos_W = ~self._bits(vocabulary.eos_ids)
        self._compiled: OrderedDict[Grammar, Future[_Compiled]] = OrderedDict()
        self._compiling: list[_Compiling] = []
        self._followed: dict[int, _Followed] = {}
        self._pool = ThreadPoolExecutor(_COMPILING, "dovetail-grammar")
        self._asked: queue.SimpleQueue[_Followed | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    # Compiling.

    def add(self, sequences: Seq[Sequence]) -> None:
        """Sequences of one request that has a grammar. `admitted` returns them when they may run."""
        grammar = sequences[0].request.params.grammar
        assert grammar is not None
        future = self._compiled.get(grammar)
        if future is None or (future.done() and future.exception() is not None):
            future = self._compiled[grammar] = self._pool.submit(self._compile, grammar)
        self._compiled.move_to_end(grammar)
        while len(self._compiled) > _KEPT:
            self._compiled.popitem(last=False)
        deadline = time.perf_counter() + self._compiler.timeout
        self._compiling.append(_Compiling(future, {seq.uid: seq for seq in sequences}, deadline))

    def _compile(self, grammar: Grammar) -> _Compiled:
        matcher = self._compiler.compile(grammar)
        if matcher.finished:
            raise RequestError("grammar: it allows the empty output alone")
        compiled = _Compiled(matcher, np.zeros(self._words, np.uint32))
        # The first mask is the costliest.
        matcher.mask(compiled.mask_W)
        compiled.mask_W &= self._not_eos_W
        if not compiled.mask_W.any():
            raise RequestError("grammar: no output fits it that this model's tokens can write")
        return compiled

    def admitted(self) -> tuple[list[Sequence], list[Ended]]:
        """Since the last call: who may run now, and who never will."""
        ready: list[Sequence] = []
        refused: list[Ended] = []
        for waiting in list(self._compiling):
            if waiting.future.done():
                error = waiting.future.exception()
                if error is None:
                    for seq in waiting.sequences.values():
                        self._follow(seq, waiting.future.result())
                        ready.append(seq)
            elif time.perf_counter() > waiting.deadline:
                error = RequestError(f"grammar: it was not compiled within {self._compiler.timeout:g} s")
            else:
                continue
            self._compiling.remove(waiting)
            if error is not None:
                for seq in waiting.sequences.values():
                    seq.status = Status.FINISHED
                    refused.append(Ended(seq.uid, FinishReason.REJECTED, _words(error)))
        return ready, refused

    @property
    def compiling(self) -> bool:
        """Somebody waits to be admitted."""
        return bool(self._compiling)

    def wait(self) -> None:
        """For somebody to be admitted; a moment at most."""
        wait_for_futures([waiting.future for waiting in self._compiling], _MOMENT, FIRST_COMPLETED)

    # Following outputs.

    def __contains__(self, uid: int) -> bool:
        return uid in self._followed

    def __bool__(self) -> bool:
        return bool(self._followed)

    def _follow(self, seq: Sequence, compiled: _Compiled) -> None:
        stops_W = self._bits(seq.request.stop_ids)
        matcher, mask_W = compiled.matcher.fork(), compiled.mask_W.copy()
        if matcher.accepting:
            mask_W |= stops_W
        followed = self._followed[seq.uid] = _Followed(matcher, mask_W, stops_W)
        followed.ready.set()

    def leave(self, uid: int) -> bool:
        """The sequence is over. Whether it was waiting for its grammar, so that nobody else knows of it."""
        self._followed.pop(uid, None)
        for waiting in self._compiling:
            if (seq := waiting.sequences.pop(uid, None)) is not None:
                seq.status = Status.FINISHED
                return True
        return False

    def advance(self, uid: int, token: int) -> Ended | None:
        """The output of a followed sequence goes on with this token. Unless that was the end, its next mask is being
        computed from now on."""
        followed = self._followed[uid]
        began = time.perf_counter()
        try:
            followed.matcher.advance(token)
        except Exception as error:  # a plugin's method may raise anything; it concerns this request alone
            return Ended(uid, FinishReason.REJECTED, _words(error))
        if (taken := time.perf_counter() - began) > _SLOW:
            followed.slow += taken
            if followed.slow > _FORGIVEN:
                detail = f"grammar: following the output held everybody up for {followed.slow:.1f} s: is it ambiguous?"
                return Ended(uid, FinishReason.REJECTED, detail)
        if followed.matcher.finished:
            return Ended(uid, FinishReason.STOP)
        followed.ready.clear()
        followed.asked = time.perf_counter()
        if not self._threads:
            self._start_threads()
        self._asked.put(followed)
        return None

    def masks(self, uids: Iterable[int], others: bool) -> tuple[dict[int, NDArray[np.uint32]], list[Ended]]:
        """Of followed sequences: masks by uid, and who has come to an end. Whoever is in neither has no mask yet.
        Waits no longer than patience allows, or a moment where there are no `others` that the step could serve."""
        followed = {uid: self._followed[uid] for uid in uids if uid in self._followed}
        for each in followed.values():
            if not each.ready.is_set():
                left = each.asked + self._patience - time.perf_counter()
                each.ready.wait(min(max(0.0, left), threading.TIMEOUT_MAX))
        if followed and not others and not any(each.ready.is_set() for each in followed.values()):
            next(iter(followed.values())).ready.wait(_MOMENT)
        masks: dict[int, NDArray[np.uint32]] = {}
        ended: list[Ended] = []
        for uid, each in followed.items():
            if not each.ready.is_set():
                continue
            if each.error:
                ended.append(Ended(uid, FinishReason.REJECTED, each.error))
            elif not each.empty:
                masks[uid] = each.mask_W
            elif each.matcher.accepting:
                ended.append(Ended(uid, FinishReason.STOP))
            else:
                detail = "grammar: its output has come to a point where no token may follow"
                ended.append(Ended(uid, FinishReason.REJECTED, detail))
        return masks, ended

    def _start_threads(self) -> None:
        for i in range(_MASKING):
            name = f"dovetail-mask-{i}"
            self._threads.append(threading.Thread(target=self._compute_masks, name=name, daemon=True))
            self._threads[-1].start()

    def _compute_masks(self) -> None:
        while (followed := self._asked.get()) is not None:
            try:
                followed.matcher.mask(followed.mask_W)
                followed.mask_W &= self._not_eos_W
                if followed.matcher.accepting:
                    followed.mask_W |= followed.stops_W
                followed.empty = not followed.mask_W.any()
            except Exception as error:  # as in advance
                followed.error = _words(error)
            followed.ready.set()

    def _bits(self, tokens: Iterable[int]) -> NDArray[np.uint32]:
        bits_W = np.zeros(self._words, np.uint32)
        for token in tokens:
            bits_W[token // 32] |= np.uint32(1 << token % 32)
        return bits_W

    def close(self) -> None:
        """End the threads; one that is at work ends after it."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for _ in self._threads:
            self._asked.put(None)


def build_grammars(composition: Composition, spec: ModelSpec, *, patient: bool) -> Grammars | None:
    """None = the app has no such part. `patient`: no row may sit a step out, however late its mask."""
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


def _words(error: BaseException) -> str:
    if isinstance(error, RequestError):
        return str(error)
    log.error("a grammar component failed", exc_info=error)
    return f"grammar: its component failed: {type(error).__name__}: {error}"
