"""Tracked: the record that rank 0's engine keeps for one sequence. Scheduler and allocator keep their own state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dovetail.core.engine.grammars import CompilingGrammar, GrammarState
    from dovetail.core.interfaces import Sequence


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
