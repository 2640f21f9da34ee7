"""A fleet over fake engines: distribution of requests, and the effect of a death on other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from dovetail.core.compose import compose
from dovetail.core.errors import EngineDown, PluginError, RequestError
from dovetail.core.frontend import supervised
from dovetail.core.frontend.fleet import Reports
from dovetail.core.frontend.messages import (
    Abort,
    Command,
    Control,
    EngineInfo,
    EngineStats,
    Reply,
    SampleUpdate,
    StepMessage,
    total,
)
from dovetail.core.frontend.replicas import replica_compositions
from dovetail.core.frontend.supervised import SupervisedFleet as Fleet
from dovetail.core.interfaces import RequestOptions, SamplingParams
from dovetail.plugins.app.serve import meta
from dovetail.plugins.app.serve.config import ServeConfig
from dovetail.plugins.app.serve.errors import body_of

INFO = EngineInfo(
    model="tiny", checkpoint=None, vocab=100, max_len=64, max_seqs=8, device="cpu", start_seconds=0.1, notes=[],
    embedding=None, hidden=8, head=True,
)  # fmt: skip
GREEDY = SamplingParams(max_tokens=4)


class FakeProcess:
    """Fake engine process: answers control messages and records the others."""

    processes: list[FakeProcess] = []

    def __init__(
        self,
        composition: Any,
        listener: Any,
        *,
        timeout: float,
        environment: Any,
        adapters: Any,
        again: bool,
        lanes: Any,
    ) -> None:
        self.composition, self.listener, self.environment = composition, listener, environment
        self.adapters = None if adapters is None else dict(adapters)
        self.again, self.lanes = again, lanes
        self.received: list[Any] = []
        self.refuses = ""
        """Operation that it answers with an error."""
        self.pid, self.stopped, self.hung_at_start, self.traceback = 1, False, False, ""

    def start(self) -> None:
        self.processes.append(self)

    def stop(self) -> None:
        self.stopped = True

    def send(self, *commands: Command) -> None:
        for command in commands:
            self.received.append(command)
            if isinstance(command, Control):
                value = f"{command.op} {self.composition.engine.first_gpu}"
                error = "no room" if command.op == self.refuses else ""
                self.listener.on_message(self, Reply(command.id, value, error, 409))

    def ready(self, lost: str = "") -> None:
        """`lost`: adapter of its predecessor that it could not load again."""
        adapters = {name: folder for name, folder in (self.adapters or {}).items() if name != lost}
        self.listener.on_ready(self, msgspec.structs.replace(INFO, adapters=adapters))

    def die(self) -> None:
        self.listener.on_death(self, "was killed")

    def hang_at_start(self) -> None:
        self.hung_at_start = True
        self.listener.on_death(self, "hangs")

    def send_step(self, id: int, tokens: list[int], reason: str | None = None) -> None:
        self.listener.on_message(
            self,
            StepMessage([SampleUpdate(id, 0, tuple(tokens), reason)], EngineStats(running=1, pages=4, pages_owned=1)),
        )


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeProcess, "processes", [])
    monkeypatch.setattr(supervised, "EngineProcess", FakeProcess)


def with_fleet(test: Callable[[Fleet, list[FakeProcess]], Awaitable[None]], *overrides: str, **options: Any) -> None:
    async def run() -> None:
        words = ["+preset=tiny_cpu", "engine.dp=3", "engine.first_gpu=1", "router=least_loaded", *overrides]
        fleet = Fleet(compose(words, app="generate"), **options)
        fleet.start()
        await test(fleet, FakeProcess.processes)
        await fleet.close()
        assert all(process.stopped for process in FakeProcess.processes if process.listener._process is process)

    asyncio.run(run())


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def all_ready(fleet: Fleet, processes: list[FakeProcess]) -> None:
    for process in processes:
        process.ready()
    await fleet.wait_ready()


def test_a_start_that_hung_is_repeated_and_one_that_failed_is_not() -> None:
    async def test(fleet: Fleet, processes: list[FakeProcess]) -> None:
        processes[0].hang_at_start()
        await settle()
        assert len(processes) == 4 and fleet.state == "starting"
        processes[3].hang_at_start()
        await settle()
        assert fleet.state == "failed" and fleet.failure == "replica 0 hangs"

    async def failing(fleet: Fleet, processes: list[FakeProcess]) -> None:
        processes[0].die()
        await settle()
        assert len(processes) == 3 and fleet.state == "failed"

    with_fleet(test, max_restarts=1)
    FakeProcess.processes.clear()
    with_fleet(failing, max_restarts=1)


def test_it_takes_requests_once_all_are_ready() -> None:
    async def test(fleet: Fleet, processes: list[FakeProcess]) -> None:
        for process in processes[:2]:
            process.ready()
        await settle()
        assert fleet.state == "starting"
        with pytest.raises(EngineDown, match="starting"):
            fleet.submit([1, 2], GREEDY)
        processes[2].ready()
        assert (await fleet.wait_ready()).max_seqs == 8
        assert (fleet.state, fleet.max_seqs, fleet.failure) == ("ready", 24, "")
        assert [process.composition.engine.first_gpu for process in processes] == [1, 2, 3]
        assert all(process.composition.engine.dp == 1 for process in processes)
        assert all(int(process.environment["OMP_NUM_THREADS"]) >= 1 for process in processes)

    with_fleet(test)


def test_requests_are_distributed_by_load() -> None:
    async def test(fleet: Fleet, processes: list[FakeProcess]) -> None:
        await all_ready(fleet, processes)
        streams = [fleet.submit([5] * 10, GREEDY) for _ in range(6)]
        assert [stream.replica for stream in streams] == [0, 1, 2, 0, 1, 2]
        assert [command.id for process in processes for command in process.received] == [0, 3, 1, 4, 2, 5], (
            "one sequence of numbers for all replicas"
        )
        assert fleet.samples == 6 and [one.prompt_tokens for one in fleet.clients] == [20, 20, 20]
        fleet.abort(streams[4])
        fleet.abort(streams[4])
        assert processes[1].received[2:] == [Abort(4)]
        processes[2].send_step(2, [7])
        await settle()
        assert [one.prompt_tokens for one in fleet.clients] == [20, 10, 10], (
            "a request with output needs no more prefill"
        )
        # Each sample counts as 512 tokens: replica 1 has one, the others two.
        assert fleet.submit([5], GREEDY).replica == 1
        processes[2].send_step(2, [8], "length")
        await settle()
        assert (await streams[2].take())[-1].finish_reason == "length"
        assert [one.samples for one in fleet.clients] == [2, 2, 1]
        assert fleet.stats.running == 1 and fleet.stats.kv_usage == 0.25

    with_fleet(test)


def test_a_death_fails_only_the_requests_of_that_replica() -> None:
    restarted: list[int] = []

    async def test(fleet: Fleet, processes: list[FakeProcess]) -> None:
        await all_ready(fleet, processes)
        streams = [fleet.submit([1], GREEDY) for _ in range(3)]
        processes[1].die()
        await settle()
        with pytest.raises(EngineDown, match="replica 1 was killed") as death:
            await streams[1].take()
        # Proxies send a 503 to the next server, and this request may be the cause.
        assert (body_of(death.value)[0], body_of(EngineDown("the engine is starting"))[0]) == (500, 503)
        assert not streams[0].ended and fleet.state == "ready" and fleet.max_seqs == 16
        assert len(processes) == 4 and [one["state"] for one in fleet.health()] == ["ready", "starting", "ready"]
        assert [fleet.submit([1], GREEDY).replica for _ in range(4)] == [0, 2, 0, 2]
        processes[3].ready()
        await settle()
        assert restarted == [1] and fleet.submit([1], GREEDY).replica == 1
        # One death more than allowed: no restart. When the last replica has failed, the fleet has failed.
        processes[3].die()
        await settle()
        assert len(processes) == 4 and fleet.state == "ready" and fleet.health()[1]["state"] == "failed"
        for process in (processes[0], processes[2]):
            process.die()
            await settle()
        assert fleet.state == "starting" and not fleet.failed.is_set()
        with pytest.raises(EngineDown, match="replica 2 was killed"):
            fleet.submit([1], GREEDY)
        with pytest.raises(EngineDown, match="replica 2 was killed"):
            _ = fleet.max_seqs
        for process in processes[4:]:
            process.die()
        await settle()
        assert fleet.failed.is_set() and fleet.state == "failed"

    with_fleet(test, max_restarts=1, reports=Reports(restarted=restarted.append))


@pytest.mark.parametrize("ready", [0, 2, 3])
def test_a_death_that_ends_the_fleet(ready: int) -> None:
    """A replica dies before it was ever ready, even if restarts are left, or dies with no other replica left."""

    async def test(fleet: Fleet, processes: list[FakeProcess]) -> None:
        for process in processes[:ready]:
            process.ready()
        await settle()
        processes[2].die()
        await settle()
        assert fleet.failed.is_set() and fleet.failure == "replica 2 was killed"
        if ready < 3:
            with pytest.raises(EngineDown, match="replica 2"):
                await fleet.wait_ready()

    with_fleet(test, max_restarts=0 if ready == 3 else 5)


def test_control_reaches_every_ready_replica_and_the_router() -> None:
    async def test(fleet: Fleet, processes: list[FakeProcess]) -> None:
        await all_ready(fleet, processes)
        forgotten: list[int] = []
        fleet._router._router.forget = forgotten.append  # type: ignore[union-attr, method-assign]
        assert await fleet.control("check") == ["check 1", "check 2", "check 3"]
        assert forgotten == []
        await fleet.control("reset_cache")
        assert forgotten == [0, 1, 2]
        processes[0].die()
        await settle()
        assert forgotten == [0, 1, 2, 0]
        assert await fleet.control("check") == ["check 2", "check 3"]

    with_fleet(test, max_restarts=1)


def test_adapters_are_on_every_replica_or_on_none() -> None:
    async def test(fleet: Fleet, processes: list[FakeProcess]) -> None:
        with pytest.raises(EngineDown, match="starting"):
            await fleet.load_adapter("sql", "/sql")
        await all_ready(fleet, processes)
        assert [process.adapters for process in processes] == [None] * 3
        await fleet.load_adapter("sql", "/sql")
        await fleet.load_adapter("chat", "/chat")
        assert fleet.adapters == {"sql": "/sql", "chat": "/chat"}
        processes[1].refuses = "load_adapter"
        with pytest.raises(RequestError, match="no room") as refused:
            await fleet.load_adapter("third", "/third")
        processes[1].refuses = ""
        assert refused.value.status == 409 and "third" not in fleet.adapters
        operations = [[(c.op, c.arguments["name"]) for c in process.received] for process in processes]
        loads = [("load_adapter", name) for name in ("sql", "chat", "third")]
        assert operations == [[*loads, ("unload_adapter", "third")]] * 3
        await fleet.unload_adapter("sql")
        with pytest.raises(RequestError, match="'sql' is not loaded; there is chat") as refused:
            await fleet.unload_adapter("sql")
        assert refused.value.status == 404
        # A restarted replica gets the current adapters; until then nothing changes.
        processes[0].die()
        await settle()
        assert processes[3].adapters == {"chat": "/chat"}
        assert [process.again for process in processes] == [False] * 3 + [True]
        for change in (fleet.load_adapter("sql", "/sql"), fleet.unload_adapter("chat")):
            with pytest.raises(EngineDown, match="replica 0 is starting"):
                await change
        processes[3].ready()
        await settle()
        await fleet.load_adapter("sql", "/sql")
        assert fleet.submit([1], GREEDY, RequestOptions(adapter="sql")).replica == 0
        assert processes[3].received[-1].options.adapter == "sql"

    with_fleet(test, max_restarts=1)


def test_an_adapter_that_a_restarted_replica_could_not_load_is_unloaded() -> None:
    async def test(fleet: Fleet, processes: list[FakeProcess]) -> None:
        await all_ready(fleet, processes)
        for name in ("sql", "chat"):
            await fleet.load_adapter(name, f"/{name}")
        processes[0].die()
        await settle()
        processes[3].ready(lost="sql")
        await settle()
        assert fleet.adapters == {"chat": "/chat"}
        unload = [(c.op, c.arguments["name"]) for c in processes[1].received][-1]
        assert unload == ("unload_adapter", "sql")
        await fleet.load_adapter("sql", "/sql")
        assert fleet.adapters == {"chat": "/chat", "sql": "/sql"}

    with_fleet(test, max_restarts=1)


@pytest.mark.parametrize("chosen", [3, -1, None])
def test_a_router_that_chooses_no_replica_fails_only_that_request(chosen: int | None) -> None:
    async def test(fleet: Fleet, processes: list[FakeProcess]) -> None:
        await all_ready(fleet, processes)
        right = fleet._router._router.route  # type: ignore[union-attr]
        fleet._router._router.route = lambda arrival, loads: chosen  # type: ignore[union-attr, method-assign]
        with pytest.raises(PluginError, match=f"router=least_loaded chose replica {chosen}; there are 0, 1, 2"):
            fleet.submit([1], GREEDY)
        fleet._router._router.route = right  # type: ignore[union-attr, method-assign]
        assert fleet.submit([1], GREEDY).replica == 0

    with_fleet(test)


def test_one_replica_needs_no_router() -> None:
    async def test(fleet: Fleet, processes: list[FakeProcess]) -> None:
        await all_ready(fleet, processes)
        assert fleet._router._router is None and fleet.submit([1], GREEDY).replica == 0
        processes[0].die()
        await settle()
        assert fleet.failure == "the engine was killed"

    with_fleet(test, "engine.dp=1")


def test_the_traceback_of_a_death_is_in_the_log_and_not_in_what_clients_get(caplog: pytest.LogCaptureFixture) -> None:
    async def test(fleet: Fleet, processes: list[FakeProcess]) -> None:
        await all_ready(fleet, processes)
        stream = fleet.submit([1], GREEDY)
        processes[0].traceback = 'Traceback (most recent call last):\n  File "/opt/acme.py", line 3'
        cause = "failed: package acme 1.0: scheduler=boom failed: OSError: [Errno 2] No such file: '/data/x'"
        processes[0].listener.on_death(processes[0], cause)
        with pytest.raises(EngineDown) as ended:
            await stream.take()
        with pytest.raises(EngineDown) as refused:
            fleet.submit([1], GREEDY)
        app = FastAPI()
        meta.install(app, SimpleNamespace(client=fleet, ready=False, draining=False, config=ServeConfig()))  # type: ignore
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here")
        probes = [(await http.get(path)).text for path in ("/ready", "/health")]
        for text in (str(ended.value), str(refused.value), *probes):
            assert "scheduler=boom failed: OSError" in text and "acme 1.0" in text
            assert "Traceback" not in text and "/data" not in text and "/opt" not in text
        assert "/opt/acme.py" in caplog.text and "/data/x" in caplog.text

    with_fleet(test, "engine.dp=1")


def test_replicas_have_consecutive_gpus() -> None:
    found = replica_compositions(compose(["engine.dp=2", "executor=multiproc", "engine.tp=4"], app="generate"))
    assert [(one.engine.dp, one.engine.tp, one.engine.first_gpu) for one in found] == [(1, 4, 0), (1, 4, 4)]


def test_stats_add_up() -> None:
    both = total([EngineStats(running=1, pages=8, pages_owned=2), EngineStats(running=2, pages=8, evictions=3)])
    assert both == EngineStats(running=3, pages=16, pages_owned=2, evictions=3) and both.kv_usage == 0.125
    assert total([]) == EngineStats()
