"""engine.tp ranks on one machine. Rank 0 is the calling process; plans reach the others through shared memory."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from dovetail.core.errors import RequestError
from dovetail.core.interfaces import (
    Blobs,
    Executor,
    ExecutorInfo,
    LateInputs,
    Progress,
    StepPlan,
    StepResult,
)
from dovetail.core.parallel.address import free_address
from dovetail.core.parallel.channel import ChannelClosed
from dovetail.core.parallel.encoding import encode_blob, encode_late, encode_plan
from dovetail.core.parallel.failure import RankError
from dovetail.core.parallel.process import order_for
from dovetail.core.parallel.ring import RingWriter
from dovetail.core.parallel.slot_ledger import SlotLedger
from dovetail.core.parallel.worker import CONTROL, answer
from dovetail.core.parallel.workers import Workers, threads_of_a_rank
from dovetail.core.worker.dtypes import resolve_device
from dovetail.plugins.executor.config import MultiprocConfig

if TYPE_CHECKING:
    from dovetail.core.compose import Composition
    from dovetail.core.worker.connection import Connection

log = logging.getLogger(__name__)

_ABORT_SECONDS = 1.0
"""Seconds for an abort to end this rank's calls, before it closes the memory shared with other ranks."""


@dataclass(slots=True)
class _AdapterLoad:
    """An adapter that is being loaded by the ranks."""

    future: Future[None]
    left: int
    """Number of ranks that have not answered."""
    error: str = ""
    """Error of the first rank that refused."""


class MultiprocExecutor(Executor):
    """A step costs rank 0 one encoding and one copy, whatever the number of ranks. When a rank dies, the next call
    raises RankError, which names the first dead rank; only `shutdown` may follow."""

    loader: ClassVar[str] = "dovetail.core.worker.loader:load_rank"

    def __init__(self, config: MultiprocConfig, composition: Composition) -> None:
        self.config, self.composition = config, composition
        self._runner: Any = None
        self._connection: Connection | None = None
        self._open: Any = None
        """The furthest stage of start, closed by shutdown: connection, loaded rank, runner."""
        self._workers: Workers | None = None
        self._ledger = SlotLedger()
        self._pending = 0
        self._loading: dict[str, _AdapterLoad] = {}
        self._answering = threading.Lock()
        self._threads: int | None = None
        """Threads of torch in this process before `start` lowered them; None if unchanged."""

    @property
    def size(self) -> int:
        """Number of ranks; each is a process."""
        return self.composition.engine.tp

    def start(self, progress: Progress) -> ExecutorInfo:
        with free_address() as address:
            return self._start(address, progress)

    def _start(self, address: str, progress: Progress) -> ExecutorInfo:
        engine, size = self.composition.engine, self.size
        last: tuple[str, float | None] = ("start ranks", None)
        progress(*last)
        # Resolves the last rank's device, so that a missing one is an error before processes start and load torch.
        device = resolve_device(engine.device, size - 1, engine.first_gpu)
        self._plans = RingWriter(size - 1, self.config.plan_bytes)
        self._blobs = RingWriter(size - 1, self.config.blob_bytes)
        order = {
            "size": size,
            "address": address,
            "loader": self.loader,
            **order_for(self.composition),
            "plan_fd": self._plans.fd,
            "blob_fd": self._blobs.fd,
        }
        try:
            workers = Workers(
                size,
                order,
                inherited=(self._plans.fd, self._blobs.fd),
                on_failure=self._abort,
                on_answer=self._adapter_read,
                on_progress=lambda: progress(*last),
                start_timeout=math.inf if engine.start_timeout is None else engine.start_timeout,
            )
        except BaseException:
            self._plans.close()
            self._blobs.close()
            raise
        self._workers = workers

        def guarded(phase: str, share: float | None) -> None:
            nonlocal last
            workers.check()
            workers.told(phase)
            last = phase, share
            progress(phase, share)

        if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            self._share_cores()
        with workers.blamed():
            # The workers import and compose concurrently.
            load = resolve_name(self.loader)
            workers.gather("ready")
            workers.post({"op": "load"})
            rank = self._open = load(self.composition, guarded, size=size, address=address, on_connect=self._keep)
            info: ExecutorInfo = rank.info
            loaded = [dict(message["pages"]) for message in workers.gather("loaded")]
            pages = {group: min([n, *(other[group] for other in loaded)]) for group, n in info.num_pages.items()}
            workers.post({"op": "bind", "pages": sorted(pages.items())})
            self._runner = self._open = rank.bind(pages)
            workers.gather("bound")
            workers.started()
        return replace(info, num_pages=pages)

    def _share_cores(self) -> None:
        """Lower torch's threads in this process. For workers OMP_NUM_THREADS does this."""
        before, share = torch.get_num_threads(), threads_of_a_rank(self.size)
        if share < before:
            self._threads = before
            torch.set_num_threads(share)

    def _keep(self, connection: Connection) -> None:
        self._connection = self._open = connection

    def _abort(self) -> None:
        """End calls that wait for a dead rank."""
        if (connection := self._connection) is not None:
            connection.abort()

    def submit(self, plan: StepPlan, blobs: Blobs) -> None:
        workers = self._workers
        assert workers is not None, "start comes first"
        data = encode_plan(plan, self._ledger.digest)
        self._ledger.apply(plan)
        with workers.blamed():
            self._plans.send(data, workers.idle)
            # After the plan: workers read blobs when they reach its joins, so a long prompt may be sent in pieces.
            for join in plan.joins:
                key = join.uid, join.epoch
                self._blobs.send(encode_blob(*key, blobs[key]), workers.idle)
            self._runner.execute(plan, blobs)
        self._pending += 1

    def complete(self, late: LateInputs) -> None:
        assert self._workers is not None
        self._complete(self._workers, late)

    def _complete(self, workers: Workers, late: LateInputs) -> None:
        self._ledger.complete(late)
        with workers.blamed():
            self._blobs.send(encode_late(late), workers.idle)
            self._runner.complete(late)

    def drafted(self) -> Mapping[int, tuple[int, ...]]:
        self._ledger.check_drafted()
        assert self._workers is not None
        with self._workers.blamed():
            found: Mapping[int, tuple[int, ...]] = self._runner.drafted()
        return found

    def collect(self) -> StepResult:
        self._ledger.check_collect(self._pending)
        assert self._workers is not None
        with self._workers.blamed():
            result: StepResult = self._runner.collect()
        self._pending -= 1
        return result

    def load_adapter(self, key: str, folder: str) -> Future[None]:
        assert self._workers is not None
        loading = self._loading[key] = _AdapterLoad(Future(), self.size)
        with self._workers.blamed():
            self._send_control(self._workers, {"op": "load_adapter", "key": key, "folder": folder})
            read: Future[None] = self._runner.load_adapter(key, folder)
        read.add_done_callback(lambda done: self._adapter_read(answer(key, done)))
        return loading.future

    def _adapter_read(self, message: Mapping[str, str]) -> None:
        """Record one rank's answer. May run in any thread."""
        key = message["key"]
        with self._answering:
            loading = self._loading[key]
            loading.left -= 1
            loading.error = loading.error or message["error"]
            if loading.left or not loading.future.set_running_or_notify_cancel():
                return
            del self._loading[key]
        if loading.error:
            loading.future.set_exception(RequestError(loading.error))
        else:
            loading.future.set_result(None)

    def unload_adapter(self, key: str) -> None:
        assert self._workers is not None
        with self._workers.blamed():
            self._send_control(self._workers, {"op": "unload_adapter", "key": key})
            self._runner.unload_adapter(key)

    def _send_control(self, workers: Workers, message: Mapping[str, str]) -> None:
        """Send a control message, in order with the plans."""
        self._plans.send(CONTROL, workers.idle)
        workers.post(message)

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of ranks 1, 2, ... while they are running."""
        return self._workers.pids if self._workers is not None else ()

    @property
    def pending(self) -> int:
        return self._pending

    def interrupt(self) -> None:
        workers = self._workers
        if workers is not None:
            workers.interrupt()

    def shutdown(self) -> None:
        workers, self._workers = self._workers, None
        self._pending = 0
        for loading in self._loading.values():
            loading.future.cancel()
        if workers is None:
            return
        try:
            if not workers.broken:
                if (waiting := self._ledger.waiting) is not None:
                    # The workers wait for this plan's late inputs and would not read the message.
                    self._complete(workers, LateInputs(waiting.step, (), np.zeros((0, 0), np.uint32)))
                workers.dismiss()
                self._send_control(workers, {"op": "shutdown"})
        except (RankError, ChannelClosed) as error:
            log.info("ending the workers by force: %s", error)
        finally:
            broken = workers.broken
            if broken:
                workers.stop(0.0)
            # In another thread: with NCCL calls in CUDA graphs an abort blocks until the graphs are released below.
            abort = threading.Timer(0.0 if broken else self.config.stop_timeout, self._abort)
            abort.daemon = True
            abort.start()
            if broken:
                abort.join(_ABORT_SECONDS)
            try:
                if self._open is not None:
                    self._open.close()
            finally:
                abort.cancel()
                self._runner = self._connection = self._open = None
                workers.stop(self.config.stop_timeout)
                self._plans.close()
                self._blobs.close()
                if self._threads is not None:
                    torch.set_num_threads(self._threads)
                    self._threads = None
