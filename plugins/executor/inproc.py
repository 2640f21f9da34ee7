"""One rank in the calling process."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar

from dovetail.core.interfaces import Blobs, Executor, ExecutorInfo, LateInputs, Progress, StepPlan, StepResult
from dovetail.core.parallel.slot_ledger import SlotLedger
from dovetail.plugins.executor.config import InprocConfig

if TYPE_CHECKING:
    from dovetail.core.compose import Composition
    from dovetail.core.worker.connection import Connection


@dataclass(slots=True)
class _DelayedPlan:
    """A plan that has not run yet."""

    plan: StepPlan
    blobs: Blobs
    late: LateInputs | None = None
    unloads: list[str] = field(default_factory=list)
    """Adapters to unload after the plan."""


class InprocExecutor(Executor):
    """Runs each plan on submission, or `delay` plans later. Submitted plans and blobs must not change."""

    loader: ClassVar[str] = "dovetail.core.worker.loader:load_rank"

    def __init__(self, config: InprocConfig, composition: Composition) -> None:
        self.config, self.composition = config, composition
        self._runner: Any = None
        self._open: Any = None
        """The furthest stage of start, closed by shutdown: connection, loaded rank, runner."""
        self._ledger = SlotLedger()
        self._delayed: deque[_DelayedPlan] = deque()
        self._executed = 0
        """Number of plans that have run and were not collected."""

    def start(self, progress: Progress) -> ExecutorInfo:
        rank = self._open = resolve_name(self.loader)(self.composition, progress, on_connect=self._keep)
        info: ExecutorInfo = rank.info
        self._runner = self._open = rank.bind(info.num_pages)
        return info

    def _keep(self, connection: Connection) -> None:
        self._open = connection

    def submit(self, plan: StepPlan, blobs: Blobs) -> None:
        if self._runner is None:
            raise RuntimeError("the executor is not running: call start() first (after shutdown, create a new one)")
        self._ledger.apply(plan)
        self._delayed.append(_DelayedPlan(plan, blobs))
        if len(self._delayed) > self.config.delay:
            self._execute_oldest()

    def complete(self, late: LateInputs) -> None:
        self._ledger.complete(late)
        if self._delayed:
            self._delayed[-1].late = late
        else:
            self._runner.complete(late)

    def drafted(self) -> Mapping[int, tuple[int, ...]]:
        self._ledger.check_drafted()
        while self._delayed:
            self._execute_oldest()
        found: Mapping[int, tuple[int, ...]] = self._runner.drafted()
        return found

    def _execute_oldest(self) -> None:
        delayed = self._delayed.popleft()
        self._runner.execute(delayed.plan, delayed.blobs)
        if delayed.late is not None:
            self._runner.complete(delayed.late)
        for key in delayed.unloads:
            self._runner.unload_adapter(key)
        self._executed += 1

    def collect(self) -> StepResult:
        self._ledger.check_collect(self.pending)
        if not self._executed:
            self._execute_oldest()
        result: StepResult = self._runner.collect()
        self._executed -= 1
        return result

    @property
    def pending(self) -> int:
        return len(self._delayed) + self._executed

    def load_adapter(self, key: str, folder: str) -> Future[None]:
        future: Future[None] = self._runner.load_adapter(key, folder)
        return future

    def unload_adapter(self, key: str) -> None:
        if self._delayed:
            self._delayed[-1].unloads.append(key)
        else:
            self._runner.unload_adapter(key)

    def shutdown(self) -> None:
        self._delayed.clear()
        self._executed = 0
        opened, self._open, self._runner = self._open, None, None
        if opened is not None:
            opened.close()
