"""Stand-ins for a loaded rank and its runner: ranks that add numbers, and ranks that fail in every possible way."""

from __future__ import annotations

import os
import signal
import threading
import time
import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from dovetail.core.compose import Composition
from dovetail.core.interfaces import Blobs, ExecutorInfo, ModelSpec, Progress, RowResult, StepPlan, StepResult
from dovetail.core.parallel.encoding import encode_blob, encode_plan

if TYPE_CHECKING:
    from dovetail.plugins.executor.multiproc import MultiprocExecutor

SPEC = ModelSpec("Sums", 10, 1, 1, 1, 1, 1, 1, 100, "float32")


class Runner:
    """Each step sums a checksum of the rank's inputs over all ranks; without torch if `connected` is false. The class
    is its own loader: an instance is the loaded rank, and then the runner."""

    connected: ClassVar[bool] = False

    def __init__(
        self,
        composition: Composition,
        progress: Progress,
        *,
        rank: int = 0,
        size: int,
        address: str,
        on_connect: Callable[[Any], None] = lambda connection: None,
    ) -> None:
        self.composition, self.rank, self.size, self.address = composition, rank, size, address
        self.on_connect = on_connect
        self.results: list[StepResult] = []
        self.collective: Any = None
        self.info = self.load(progress)

    def load(self, progress: Progress) -> ExecutorInfo:
        progress("weights", None)
        if self.connected:
            import torch

            self.collective = self.composition.build("collective")
            self.on_connect(self.collective)
            self.collective.connect(self.rank, self.size, self.address, torch.device("cpu"))
        pages = {0: 50 - self.rank, 3: 20 + self.rank}
        return ExecutorInfo(SPEC, (), pages, 100, 0, "cpu", {})

    def bind(self, num_pages: dict[int, int]) -> Runner:
        assert num_pages == {0: 50 - (self.size - 1), 3: 20}
        return self

    def execute(self, plan: StepPlan, blobs: Blobs) -> None:
        total = checksum(plan, blobs)
        if self.connected:
            import torch

            total = int(self.collective.all_reduce(torch.tensor(total)))
        if self.rank == 0:
            self.results.append(StepResult(plan.step, (RowResult(0, 0, 0, (total,)),)))

    def collect(self) -> StepResult:
        assert self.rank == 0
        return self.results.pop(0)

    def close(self) -> None:
        if self.collective is not None:
            self.collective.close()


def checksum(plan: StepPlan, blobs: Blobs) -> int:
    data = encode_plan(plan) + b"".join(encode_blob(*key, blob) for key, blob in sorted(blobs.items()))
    return zlib.crc32(data)


class Connected(Runner):
    connected = True


class Threads(Connected):
    """The tokens of a step are the numbers of threads that each rank computes with."""

    def execute(self, plan: StepPlan, blobs: Blobs) -> None:
        import torch

        mine = torch.zeros(self.size, dtype=torch.int64)
        mine[self.rank] = torch.get_num_threads()
        of_each = tuple(self.collective.all_reduce(mine).tolist())
        if self.rank == 0:
            self.results.append(StepResult(plan.step, (RowResult(0, 0, 0, of_each),)))


class SlowRankZero(Runner):
    """Rank 0 loads for a minute and reports progress."""

    def load(self, progress: Progress) -> ExecutorInfo:
        if self.rank == 0:
            for i in range(600):
                progress("weights", i / 600)
                time.sleep(0.1)
        return super().load(progress)


class SlowRankOne(Runner):
    def load(self, progress: Progress) -> ExecutorInfo:
        if self.rank == 1:
            for i in range(12):
                progress("weights", i / 12)
                time.sleep(0.1)
        return super().load(progress)


class KilledInLoad(SlowRankZero):
    def load(self, progress: Progress) -> ExecutorInfo:
        if self.rank == 2:
            progress("weights", None)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().load(progress)


class RaisesInLoad(SlowRankZero):
    def load(self, progress: Progress) -> ExecutorInfo:
        if self.rank == 1:
            raise FileNotFoundError("model-00002.safetensors")
        return super().load(progress)


class KilledBeforeConnecting(Connected):
    """Rank 0 waits for a rank that never connects."""

    def load(self, progress: Progress) -> ExecutorInfo:
        if self.rank == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().load(progress)


class StoppedBeforeConnecting(Connected):
    """Stops like a rank whose machine swaps or whose disk hangs."""

    def load(self, progress: Progress) -> ExecutorInfo:
        if self.rank == 2:
            progress("weights", None)
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().load(progress)


class KilledInCapture(Connected):
    """The other ranks wait for the last one in a sum, in the phase that captures graphs."""

    def load(self, progress: Progress) -> ExecutorInfo:
        self.progress = progress
        return super().load(progress)

    def bind(self, num_pages: dict[int, int]) -> Runner:
        self.progress("capture graphs", None)
        if self.rank == self.size - 1:
            self.end()
        self.collective.barrier()
        return super().bind(num_pages)

    def end(self) -> None:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)


class RaisesInCapture(KilledInCapture):
    def end(self) -> None:
        raise MemoryError("no room for graphs")


class KilledInStep(Connected):
    """Rank 2 dies while ranks 0 and 1 are in the sum; they report a closed connection."""

    def execute(self, plan: StepPlan, blobs: Blobs) -> None:
        if plan.step == 2 and self.rank == 2:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        super().execute(plan, blobs)


class RaisesInStep(Connected):
    def execute(self, plan: StepPlan, blobs: Blobs) -> None:
        if plan.step == 2 and self.rank == self.size - 1:
            raise ZeroDivisionError("third step")
        super().execute(plan, blobs)


class RankZeroRaisesInStep(Connected):
    def execute(self, plan: StepPlan, blobs: Blobs) -> None:
        if plan.step == 2 and self.rank == 0:
            raise ZeroDivisionError("third step")
        super().execute(plan, blobs)


class SlowToClose(Runner):
    """Rank 1 ends long before the other ranks have closed their shared resources."""

    def close(self) -> None:
        if self.rank != 1:
            time.sleep(1.0)


class WaitsInClose(Runner):
    """Rank 0 waits in close for another rank, which never takes part."""

    def load(self, progress: Progress) -> ExecutorInfo:
        self.aborted = threading.Event()
        self.on_connect(SimpleNamespace(abort=self.aborted.set))
        return super().load(progress)

    def close(self) -> None:
        if self.rank == 0:
            assert self.aborted.wait(60)


class DeafInStep(Runner):
    """Workers never return from the first step."""

    def execute(self, plan: StepPlan, blobs: Blobs) -> None:
        if self.rank > 0:
            time.sleep(600)
        super().execute(plan, blobs)


def executor(runner: type[Runner], composition: Composition, **options: Any) -> MultiprocExecutor:
    # Imports torch, which workers that are not connected do without.
    from dovetail.plugins.executor.config import MultiprocConfig
    from dovetail.plugins.executor.multiproc import MultiprocExecutor

    named = type("TestExecutor", (MultiprocExecutor,), {"loader": f"{__name__}:{runner.__name__}"})
    made: MultiprocExecutor = named(MultiprocConfig(**options), composition)
    return made
