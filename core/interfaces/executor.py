"""The executor seam: where plans run. It hides processes, hosts and device queues from the engine."""

from __future__ import annotations

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
"""progress(phase, share done 0..1 or None): start-up phases, for a bar. Each call is a sign of life, may repeat the
last one, and may come from any thread."""


@dataclass(frozen=True, slots=True)
class JoinBlob:
    """What a Join refers to by (uid, epoch): ids of every known token, and the request's parameters."""

    tokens: tuple[int, ...]
    request: Request
    sample: int
    adapter: int = -1
    """Slot of its adapter on the device; -1 = the base model."""


Blobs = Mapping[tuple[int, int], JoinBlob]


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """What start-up found: the engine builds allocator and scheduler from it."""

    spec: ModelSpec
    groups: tuple[KVGroup, ...]
    num_pages: Mapping[int, int]
    """Usable pages per group, the least over ranks."""
    max_len: int
    lookahead: int
    """Draft tokens per step."""
    device: str
    phases: Mapping[str, float]
    """Start-up seconds by phase."""
    notes: tuple[str, ...] = ()
    """Slower paths that were chosen, in words."""
    adapter_slots: int = 0
    """Different adapters in one step at most; 0 = none can be loaded."""


class Executor(ABC):
    """Runs plans in order. One thread calls it, but for `interrupt`."""

    @abstractmethod
    def start(self, progress: Progress) -> ExecutorInfo:
        """Load everything. Errors of any rank surface here, first cause first."""

    @abstractmethod
    def submit(self, plan: StepPlan, blobs: Blobs) -> None:
        """Enqueue a plan; returns before the device is done where the device is asynchronous. Plan and blobs are the
        executor's from here on: the caller changes neither. Of a plan with LATE rows only the forward half is enqueued,
        and `complete` must follow before another `submit`."""

    @abstractmethod
    def complete(self, late: LateInputs) -> None:
        """Enqueue the sampling half of the newest plan, which has LATE rows. Earlier plans may be collected before this
        call, the plan itself only after it. Raises ValueError if no such plan waits."""

    @abstractmethod
    def collect(self) -> StepResult:
        """The oldest submitted plan's result; waits for it. Raises ValueError if that plan lacks its late inputs, and
        RankError or the like if a rank died."""

    @property
    @abstractmethod
    def pending(self) -> int:
        """Plans submitted and not collected."""

    def load_adapter(self, key: str, folder: str) -> Future[None]:
        """Let every rank read an adapter, while steps go on; done when all have it. The future raises RequestError
        where the folder does not fit. A join may name the key from then on. Only where adapter_slots > 0."""
        raise NotImplementedError(f"{type(self).__name__} loads no adapters")

    def unload_adapter(self, key: str) -> None:
        """Let every rank forget an adapter once it has run the plans submitted so far. Ranks that do not know the key
        ignore it."""
        raise NotImplementedError(f"{type(self).__name__} loads no adapters")

    def interrupt(self) -> None:
        """From any other thread: end a call that waits for a step which does not end, as a rank's death would; only
        `shutdown` may follow. An executor whose steps wait for nobody has nothing to end."""

    @abstractmethod
    def shutdown(self) -> None:
        """Free devices and processes. Idempotent."""
