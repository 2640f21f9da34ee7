"""Tracked: everything that rank 0's engine keeps for one sequence, besides what scheduler and allocator keep."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dovetail.core.interfaces import Matcher, Sequence
    from dovetail.core.parallel.grammar_check import CompiledGrammar


@dataclass(slots=True, eq=False)
class GrammarState:
    """Position of one sequence's output in its grammar. The engine's thread advances the matcher while `ready` is set;
    a mask thread reads it while `ready` is clear."""

    origin: CompiledGrammar
    matcher: Matcher
    mask_W: NDArray[np.uint32]
    """Written by a mask thread."""
    stops_W: NDArray[np.uint32]
    """The tokens that end the request."""
    ready: threading.Event = field(default_factory=threading.Event)
    """Set by a mask thread once the mask fits the matcher's state, cleared by the engine's thread."""
    asked: float = 0.0
    """time.perf_counter() when `ready` was cleared."""
    slow: float = 0.0
    """Seconds that slow advances took. Written by the engine's thread."""
    empty: bool = False
    """No token may follow, and none may end the output. Written by a mask thread."""
    error: str = ""
    """Why there is no mask. Written by a mask thread."""


@dataclass(slots=True, eq=False)
class CompilingGrammar:
    """A request that waits for its grammar."""

    future: Future[CompiledGrammar]
    sequences: dict[int, Tracked]
    """The request's sequences that were not aborted, by uid."""
    deadline: float


@dataclass(slots=True, eq=False)
class Tracked:
    """Record of a sequence from `Engine.add` until it ends. Dropping the record drops all of its state."""

    seq: Sequence
    compiling: CompilingGrammar | None = None
    """The grammar that the sequence waits for before the scheduler gets it. Written by Grammars."""
    grammar: GrammarState | None = None
    """Position of the output in its grammar. Written by Grammars."""
    embedding: tuple[int, NDArray[np.float32]] | None = None
    """(epoch, sum of the pooled states so far) of a prompt that is embedded in chunks. Written by Results."""
    prompt_logprobs: tuple[int, int, int] | None = None
    """(epoch, prompt positions reported in it, positions ever reported). A preempted prompt is fed again, and its
    positions must not be reported twice. Written by Results."""
