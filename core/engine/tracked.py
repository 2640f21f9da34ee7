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
    a mask thread reads it while `ready` is clear, and advances it by drafts, which it takes back."""

    origin: CompiledGrammar
    matcher: Matcher
    mask_W: NDArray[np.uint32]
    """Tokens that may follow the output. Written by a mask thread."""
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
    forced: tuple[int, ...] = ()
    """Tokens that the grammar expects to follow the output. Written by the engine's thread."""
    drafts: tuple[int, ...] = ()
    """Drafts behind the output whose masks were asked for. Written by the engine's thread."""
    draft_masks: list[NDArray[np.uint32]] = field(default_factory=list)
    """Mask behind each of the first of them, up to one that the grammar does not allow or that ends the output: what
    follows that one is not read. Written by a mask thread."""
    dead: tuple[int, ...] = ()
    """The first drafts, if no token may follow them. Written by a mask thread."""
    taken: list[int] = field(default_factory=list)
    """Tokens that the output got since `drafts` was set or cleared. Written by the engine's thread."""


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
