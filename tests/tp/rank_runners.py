"""Stand-ins for a loaded rank and its runner: ranks that add numbers, and ranks that fail in every way a rank can."""

from __future__ import annotations

import os
import signal
import threading
import time
import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

from dovetail.core.compose import Composition
from dovetail.core.interfaces import Blobs, ExecutorInfo, ModelSpec, Progress, RowResult, StepPlan, StepResult
from dovetail.core.parallel.encoding import encode_blob, encode_plan
from dovetail.plugins.executor.config import MultiprocConfig
from dovetail.plugins.executor.multiproc import MultiprocExecutor

SPEC = ModelSpec("Sums", 10, 1, 1, 1, 1, 1, 1, 100, "float32")


class Runner:
    """Each step sums over ranks a checksum of the plan and blobs that the rank received. Uses no torch unless
    `connected`. The class is the loader: an instance is the loaded rank, and then the runner."""

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
    """A step's tokens are the threads that each rank computes with."""

    def execute(self, plan: StepPlan, blobs: Blobs) -> None:
        import torch

        mine = torch.zeros(self.size, dtype=torch.int64)
        mine[self.rank] = torch.get_num_threads()
        of_each = tuple(self.collective.all_reduce(mine).tolist())
        if self.rank == 0:
            self.results.append(StepResult(plan.step, (RowResult(0, 0, 0, of_each),)))


class SlowRankZero(Runner):
    """Rank 0 loads for a minute, telling its progress as it goes."""

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
    """Rank 0 waits for a rank that never comes."""

    def load(self, progress: Progress) -> ExecutorInfo:
        if self.rank == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().load(progress)


class StoppedBeforeConnecting(Connected):
    """As a machine that swaps, or a disk that does not answer, would stop it."""

    def load(self, progress: Progress) -> ExecutorInfo:
        if self.rank == 2:
            progress("weights", None)
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().load(progress)


class KilledInCapture(Connected):
    """Where the engine captures graphs, ranks 0 and 1 wait in a sum for rank 2."""

    def load(self, progress: Progress) -> ExecutorInfo:
        self.progress = progress
        return super().load(progress)

    def bind(self, num_pages: dict[int, int]) -> Runner:
        self.progress("capture graphs", None)
        if self.rank == 2:
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
    """Ranks 0 and 1 are in the sum, and complain of a closed connection; rank 2 is the cause."""

    def execute(self, plan: StepPlan, blobs: Blobs) -> None:
        if plan.step == 2 and self.rank == 2:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        super().execute(plan, blobs)


class RaisesInStep(Connected):
    def execute(self, plan: StepPlan, blobs: Blobs) -> None:
        if plan.step == 2 and self.rank == 2:
            raise ZeroDivisionError("third step")
        super().execute(plan, blobs)


class RankZeroRaisesInStep(Connected):
    def execute(self, plan: StepPlan, blobs: Blobs) -> None:
        if plan.step == 2 and self.rank == 0:
            raise ZeroDivisionError("third step")
        super().execute(plan, blobs)


class SlowToClose(Runner):
    """Rank 1 has ended long before the others have closed what they share."""

    def close(self) -> None:
        if self.rank != 1:
            time.sleep(1.0)


class WaitsInClose(Runner):
    """Rank 0 closes something together with the others, one of whom does not come."""

    def load(self, progress: Progress) -> ExecutorInfo:
        self.aborted = threading.Event()
        self.on_connect(SimpleNamespace(abort=self.aborted.set))
        return super().load(progress)

    def close(self) -> None:
        if self.rank == 0:
            assert self.aborted.wait(60)


class DeafInStep(Runner):
    """Workers never come back from the first step."""

    def execute(self, plan: StepPlan, blobs: Blobs) -> None:
        if self.rank > 0:
            time.sleep(600)
        super().execute(plan, blobs)


def executor(runner: type[Runner], composition: Composition, **options: Any) -> MultiprocExecutor:
    named = type("TestExecutor", (MultiprocExecutor,), {"loader": f"{__name__}:{runner.__name__}"})
    made: MultiprocExecutor = named(MultiprocConfig(**options), composition)
    return made
