"""Loaders of ranks of which one ends or stops while it moves an expert, at a place that `MOVE_ENDS` names."""

from __future__ import annotations

import os
import signal
from typing import Any

from dovetail.core.worker import expert_moves
from dovetail.core.worker.loader import LoadedRank, load_rank

ENDS = {"before": signal.SIGKILL, "after": signal.SIGKILL, "stop": signal.SIGSTOP}


def load(*given: Any, rank: int = 0, **named: Any) -> LoadedRank:
    """Load a rank. Rank 1 sends itself a signal in its third move: before the message, or when it has got it."""
    where = os.environ["MOVE_ENDS"]
    if rank == 1:
        _end_at(where)
    return load_rank(*given, rank=rank, **named)


def _end_at(where: str) -> None:
    message, copy, count = expert_moves._Memory.message, expert_moves._copy, 0

    def end(call: Any) -> Any:
        def counted(*args: Any) -> Any:
            nonlocal count
            count += 1
            if count == 3:
                os.kill(os.getpid(), ENDS[where])
            return call(*args)

        return counted

    if where == "after":
        expert_moves._copy = end(copy)
    else:
        expert_moves._Memory.message = end(message)  # type: ignore[method-assign]
