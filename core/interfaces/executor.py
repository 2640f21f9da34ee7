"""Executor contract: where plans run. It hides processes, hosts and device queues from the engine."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import Future

    from dovetail.core.interfaces.kv_cache import KVGroup
    from dovetail.core.interfaces.model import ModelSpec
    from dovetail.core.interfaces.plan import LateInputs, StepPlan
    from dovetail.core.interfaces.records import Request, StepResult

Progress = Callable[[str, float | None], None]
"""progress(phase, fraction done or None): reports start-up phases. Calls may repeat and come from any thread."""


@dataclass(frozen=True, slots=True)
class JoinBlob:
    """Data of a Join, identified by (uid, epoch): the ids of all known tokens, and the request with its parameters."""

    tokens: tuple[int, ...]
    request: Request
    sample: int
    adapter: int = -1
    """Device slot of its adapter; -1 = the base model."""


Blobs = Mapping[tuple[int, int], JoinBlob]


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """Results of start-up. The engine builds allocator and scheduler from them."""

    spec: ModelSpec
    groups: tuple[KVGroup, ...]
    num_pages: Mapping[int, int]
    """Usable pages per group: the minimum over ranks."""
    max_len: int
    lookahead: int
    """Maximum number of draft tokens per row and step."""
    device: str
    phases: Mapping[str, float]
    """Duration of each start-up phase in seconds."""
    notes: tuple[str, ...] = ()
    """Slower paths that start-up selected, described for the user."""
    adapter_slots: int = 0
    """Maximum number of different adapters in one step; 0 = adapters are off."""
    tuning: str = ""
    """Hash of the measured entries of the tuning table; "" = nothing is tuned. Equal hashes make equal choices."""


class Clock:
    """Time of an engine, seconds: that of `time.perf_counter`."""

    virtual = False
    """Whether time passes only in `wait_until`, as in a simulation that does not wait."""

    def now(self) -> float:
        return time.perf_counter()

    def wait_until(self, moment: float, *, spin: float = 0.0) -> None:
        """Return once `now()` is at least `moment`. It sleeps, except for the last `spin` seconds, since a sleep may
        overrun."""
        while (left := moment - self.now()) > 0:
            if left > spin:
                time.sleep(left - spin)


class VirtualClock(Clock):
    """Time of a discrete-event simulation: it begins at 0 and jumps to whatever is waited for."""

    virtual = True

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def wait_until(self, moment: float, *, spin: float = 0.0) -> None:
        self._now = max(self._now, moment)


class Executor(ABC):
    """Runs plans in order. All calls come from one thread, except `interrupt`."""

    clock: Clock = Clock()
    """Time of arrivals, plans and results. A simulated executor may have one of its own, in which waiting takes no
    time."""

    @abstractmethod
    def start(self, progress: Progress) -> ExecutorInfo:
        """Load everything and return when plans can run. Raises the errors of any rank, first cause first."""

    @abstractmethod
    def submit(self, plan: StepPlan, blobs: Blobs) -> None:
        """Enqueue a plan. On an asynchronous device this returns before the device is done. The executor owns plan and
        blobs from now on, so the caller must not change them. For a plan with LATE rows only the forward half is
        enqueued, and `complete` must be called before the next `submit`. A plan without rows has a result without
        rows. If it has a shape, an executor that states the capability `lanes` runs its layers with padding, since
        other lanes need the experts of its ranks."""

    @abstractmethod
    def complete(self, late: LateInputs) -> None:
        """Enqueue the sampling half of the newest plan, which has LATE rows. Earlier plans may be collected before this
        call, the plan itself only after it. Raises ValueError if no plan waits for late inputs."""

    def drafted(self) -> Mapping[int, tuple[int, ...]]:
        """Return the drafts of the newest plan's LATE rows, by index of the row: at most Row.draft tokens, in the
        order in which they would follow. A row that is left out verifies no drafts. Valid before `complete`; waits for
        the drafter, and so for all earlier plans. Raises ValueError if no plan waits for late inputs. Default: rows
        with late inputs verify no drafts."""
        return {}

    @abstractmethod
    def collect(self) -> StepResult:
        """Wait for the oldest submitted plan and return its result. Raises ValueError if that plan lacks its late
        inputs, and RankError (or similar) if a rank died."""

    @property
    @abstractmethod
    def pending(self) -> int:
        """Number of plans submitted and not collected."""

    def load_adapter(self, key: str, folder: str) -> Future[None]:
        """Make every rank read an adapter while steps continue. Joins may use the key once the future completes; it
        raises RequestError for a folder that does not fit the model. Only valid if adapter_slots > 0."""
        raise NotImplementedError(f"{type(self).__name__} loads no adapters")

    def unload_adapter(self, key: str) -> None:
        """Make every rank drop an adapter once the plans submitted so far have run. Unknown keys are ignored."""
        raise NotImplementedError(f"{type(self).__name__} loads no adapters")

    def interrupt(self) -> None:
        """Abort a call that waits for a step which does not end, with the error of a dead rank. Called from any other
        thread; afterwards only `shutdown` is valid. Optional for an executor that never blocks on a step."""

    @abstractmethod
    def shutdown(self) -> None:
        """Release devices and processes. Idempotent."""
