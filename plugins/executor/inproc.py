"""One rank in the calling process."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar

from dovetail.core.engine.mirror import PlanMirror
from dovetail.core.interfaces import Blobs, Executor, ExecutorInfo, Progress, StepPlan, StepResult
from dovetail.core.parallel.worker import load_class
from dovetail.plugins.executor.config import InprocConfig

if TYPE_CHECKING:
    from dovetail.core.compose import Composition


class InprocExecutor(Executor):
    """Runs each plan when it is submitted, or `delay` plans later. Submitted plans and blobs must not change."""

    runner_class: ClassVar[str] = "dovetail.core.engine.runner:Runner"

    def __init__(self, config: InprocConfig, composition: Composition) -> None:
        self.config, self.composition = config, composition
        self._runner: Any = None
        self._mirror = PlanMirror()
        self._held: deque[tuple[StepPlan, Blobs]] = deque()
        self._executed = 0
        """Plans that ran and whose results were not collected."""

    def start(self, progress: Progress) -> ExecutorInfo:
        self._runner = load_class(self.runner_class)(self.composition, rank=0, size=1, address="")
        info: ExecutorInfo = self._runner.load(progress)
        self._runner.bind(info.num_pages)
        return info

    def submit(self, plan: StepPlan, blobs: Blobs) -> None:
        if self._runner is None:
            raise RuntimeError("the executor does not run: start it first (after shutdown, make another)")
        self._mirror.apply(plan)
        self._held.append((plan, blobs))
        if len(self._held) > self.config.delay:
            self._execute_oldest()

    def _execute_oldest(self) -> None:
        self._runner.execute(*self._held.popleft())
        self._executed += 1

    def collect(self) -> StepResult:
        if not self.pending:
            raise ValueError("nothing to collect: every submitted plan's result was taken")
        if not self._executed:
            self._execute_oldest()
        result: StepResult = self._runner.collect()
        self._executed -= 1
        return result

    @property
    def pending(self) -> int:
        return len(self._held) + self._executed

    def shutdown(self) -> None:
        self._held.clear()
        self._executed = 0
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()
