"""Failures of a running engine: which component an error belongs to, which rank failed first, and tracebacks of other
processes."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from dovetail.core.compose import Selected
from dovetail.core.compose.composition import selected_in
from dovetail.core.errors import DovetailError, PluginError, one_line

if TYPE_CHECKING:
    from dovetail.core.compose import Composition


class RemoteTraceback(Exception):
    """Traceback of an error in another process: the `__cause__` of the error that reports it here."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(f"in another process:\n{text}")


def remote_cause(text: str) -> RemoteTraceback | None:
    """Return the cause of an error that another process reported with this traceback; None if the text is empty."""
    return RemoteTraceback(text) if text else None


def traceback_of(error: BaseException) -> str:
    """Return the traceback for a log; "" for an error whose message explains it."""
    if isinstance(error, DovetailError) and error.__cause__ is None:
        return ""
    return "".join(traceback.format_exception(error)).rstrip()


def for_user(error: BaseException, composition: Composition | None = None) -> DovetailError:
    """Return an error of a running engine in a form for users: one line that names the component in whose code it was
    raised, with its package. `error` is its cause. An error that is already for users is returned as it is.

    The traceback decides: the innermost frame in a selected component's code. Steps therefore need no extra code.
    """
    if isinstance(error, DovetailError):
        return error
    what = f"{type(error).__name__}: {one_line(str(error))}"
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    part = _component_of(frames, list(selected_in(composition.parts))) if composition is not None else None
    if part is not None:
        kind = part.component.kind
        found: DovetailError = PluginError(str(part.package), f"{kind}={part.name} failed: {what}")
    else:
        ours = [name for frame in frames if (name := _module(frame)).startswith("dovetail.")]
        found = DovetailError(what + (f" (in {ours[-1]})" if ours else ""))
    found.__cause__ = error
    return found


def _component_of(frames: list[FrameType], parts: list[Selected]) -> Selected | None:
    """Return the component of the innermost frame that belongs to one; `frames` are outermost first."""
    for frame in reversed(frames):
        own = frame.f_locals.get("self")
        for part in parts:
            # A method that a component inherits from the core is the component's code, too.
            if (target := _loaded_class(part)) is not None and isinstance(own, target):
                return part
        module = _module(frame)
        related = [part for part in parts if f"{module}.".startswith(_home(part))]
        if related:
            return max(related, key=lambda part: _common(module, part.component.target.partition(":")[0]))
        if module.startswith("dovetail.core.worker."):
            return None  # Further out is only the executor, which runs every other component.
    return None


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _loaded_class(part: Selected) -> type | None:
    module, _, name = part.component.target.partition(":")
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None


def _home(part: Selected) -> str:
    """Return the prefix of the component's modules: its folder in `dovetail.plugins`, or its top-level package."""
    names = part.component.target.partition(":")[0].split(".")
    return ".".join(names[:3] if names[:2] == ["dovetail", "plugins"] else names[:1]) + "."


def _common(one: str, other: str) -> int:
    """Return the number of leading names that two modules share."""
    pairs = zip(one.split("."), other.split("."), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(one))


class RankError(DovetailError):
    """A rank died, which ends the run. `rank` is the first rank that died. Its traceback, if known, is the cause."""

    def __init__(self, rank: int, cause: str, traceback: str = "") -> None:
        self.rank, self.cause = rank, cause
        super().__init__(f"rank {rank} {cause}")
        self.__cause__ = remote_cause(traceback)


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
    traceback: str = ""
    """Traceback of the rank's error; "" if it sent none."""

    def error(self) -> RankError:
        return self.kind(self.rank, self.cause, self.traceback)


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
