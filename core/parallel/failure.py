"""A rank that died, and which one died first."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass

from dovetail.core.errors import DovetailError


class RankError(DovetailError):
    """A rank died, and so the run is over. `rank` is the first that died."""

    def __init__(self, rank: int, cause: str) -> None:
        self.rank, self.cause = rank, cause
        super().__init__(f"rank {rank} {cause}")


class StartHung(RankError):
    """No rank went on loading for engine.start_timeout. `rank` is the one that is furthest behind."""


@dataclass(frozen=True, slots=True)
class Failure:
    rank: int
    at: float
    """time.monotonic(), which the processes of one machine share: when it raised, or was found dead."""
    cause: str
    """Ends a sentence that begins with the rank."""
    silent: bool
    """It left no message: a signal, or an exit in C code."""
    kind: type[RankError] = RankError

    def error(self) -> RankError:
        return self.kind(self.rank, self.cause)


def first_cause(failures: Iterable[Failure]) -> Failure:
    """A silent death goes first: it is noticed a little late, while its neighbours report the closed connection."""
    return min(failures, key=lambda failure: (not failure.silent, failure.at))


def describe_exit(status: int, phase: str) -> str:
    """`status` as subprocess gives it: negative is a signal."""
    if status >= 0:
        return f"ended with exit status {status} and no message while {phase}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = " (by hand, or by the kernel when memory runs out)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint} while {phase}"
