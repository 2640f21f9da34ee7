"""Failures of ranks, and which of them came first."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass

from dovetail.core.errors import DovetailError


class RankError(DovetailError):
    """A rank died, which ends the run. `rank` is the first rank that died."""

    def __init__(self, rank: int, cause: str) -> None:
        self.rank, self.cause = rank, cause
        super().__init__(f"rank {rank} {cause}")


class StartHung(RankError):
    """No rank made progress for engine.start_timeout. `rank` is the slowest one."""


@dataclass(frozen=True, slots=True)
class RankFailure:
    rank: int
    at: float
    """Time of the error or of its detection, from time.monotonic(), which all processes of a machine share."""
    cause: str
    """End of a sentence whose subject is the rank."""
    silent: bool
    """The rank sent no message: it was killed by a signal or exited in C code."""
    kind: type[RankError] = RankError

    def error(self) -> RankError:
        return self.kind(self.rank, self.cause)


def first_cause(failures: Iterable[RankFailure]) -> RankFailure:
    """Select the first failure; silent deaths take precedence, since they are detected after closed connections."""
    return min(failures, key=lambda failure: (not failure.silent, failure.at))


def describe_exit(status: int, phase: str) -> str:
    """Describe the exit `status` as given by subprocess: negative is a signal."""
    if status >= 0:
        return f"ended with exit status {status} and no message while {phase}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = " (by hand, or by the kernel when memory runs out)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint} while {phase}"
