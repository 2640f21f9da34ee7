"""Engines shared by several processes: an owner and two users in one event loop, with real links to a fake engine."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import zmq

from dovetail.core.compose import compose
from dovetail.core.errors import EngineDown, RequestError
from dovetail.core.frontend import supervised
from dovetail.core.frontend.attached import AttachedFleet, EngineSharing
from dovetail.core.frontend.fleet import Reports
from dovetail.core.frontend.messages import Command, EngineInfo, EngineStats, Reply, SampleUpdate
from dovetail.core.frontend.process_rpc import ProcessRPC
from dovetail.core.frontend.shared_counters import SharedCounters
from dovetail.core.frontend.supervised import SupervisedFleet
from dovetail.core.frontend.zmq_link import EngineEnd
from dovetail.core.interfaces import SamplingParams
from dovetail.core.parallel.channel import Channel

INFO = EngineInfo(
    model="tiny", checkpoint=None, vocab=100, max_len=64, max_seqs=8, device="cpu", start_seconds=0.1, notes=[],
    embedding=None, hidden=8, head=True, num_pages={0: 4},
)  # fmt: skip
GREEDY = SamplingParams(max_tokens=4)
SECONDS = 60


class FakeEngine:
    """Fake EngineProcess. Opens its end of each announced link; receives commands when the test calls `received`."""

    engines: list[FakeEngine] = []

    def __init__(self, composition: Any, listener: Any, **options: Any) -> None:
        self.listener, self.hung_at_start, self.traceback = listener, False, ""
        self.orders: list[Any] = []
        self.hung: list[float] = []
        self.links: dict[int, EngineEnd] = {}

    def start(self) -> None:
        self.engines.append(self)

    def stop(self) -> None:
        self.close()

    def close(self) -> None:
        for link in self.links.values():
            link.close()
        self.links.clear()

    def send(self, *commands: Command) -> None:
        for command in commands:
            self.listener.on_message(self, Reply(command.id, "done"))

    def send_order(self, message: dict[str, Any]) -> None:
        self.orders.append(message["op"])
        if message["op"] == "attach":
            addresses = {end: message[end] for end in ("commands", "outputs")}
            self.links[message["link"]] = EngineEnd(zmq.Context.instance(), **addresses)
            self.send_step(message["link"], stats=EngineStats(running=1))

    def end_hung(self, seconds: float) -> None:
        self.hung.append(seconds)

    def send_step(self, link: int, *updates: SampleUpdate, stats: EngineStats | None = None) -> None:
        self.links[link].updates += updates
        self.links[link].send_step(stats)

    def received(self, link: int) -> Any:
        assert self.links[link].commands.poll(SECONDS * 1000)
        return next(self.links[link].receive())

    def die(self) -> None:
        self.listener.on_death(self, "was killed")


class Setup:
    """The owner of an engine and the processes that share it."""

    def __init__(self, timeout: float) -> None:
        composition = compose(["+preset=tiny_cpu"], app="generate")
        self.counters = SharedCounters(3, 1)
        self.owner = SupervisedFleet(
            composition, max_restarts=1, counters=self.counters, reports=Reports(changed=lambda: self.sharing.publish())
        )
        self.sharing = EngineSharing(self.owner)
        self.users: dict[int, AttachedFleet] = {}
        self.sockets: dict[int, socket.socket] = {}
        self._composition, self._timeout = composition, timeout

    def join(self, number: int) -> AttachedFleet:
        loop = asyncio.get_running_loop()
        ends = socket.socketpair()
        ours, theirs = (ProcessRPC(Channel(end), loop) for end in ends)
        for rpc in (ours, theirs):
            threading.Thread(target=rpc.listen, daemon=True).start()
        counters = SharedCounters(3, 1, own=number, fd=self.counters.fd)
        user = AttachedFleet(self._composition, theirs, counters, timeout=self._timeout, reports=Reports())
        user.start()
        self.sharing.join(number, ours)
        self.users[number], self.sockets[number] = user, ends[0]
        return user

    def leave(self, number: int) -> None:
        self.sockets.pop(number).shutdown(socket.SHUT_RDWR)
        self.sharing.leave(number)


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(FakeEngine, "engines", [])
    monkeypatch.setattr(supervised, "EngineProcess", FakeEngine)
    yield
    for engine in FakeEngine.engines:
        engine.close()


def run(test: Callable[[Setup, list[FakeEngine]], Awaitable[None]], timeout: float = SECONDS) -> None:
    async def main() -> None:
        setup = Setup(timeout)
        setup.owner.start()
        for number in (1, 2):
            setup.join(number)
        await test(setup, FakeEngine.engines)
        for fleet in (*setup.users.values(), setup.owner):
            await fleet.close()
        for number in list(setup.sockets):
            setup.leave(number)

    asyncio.run(main())


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.005)


async def all_ready(setup: Setup, engine: FakeEngine) -> None:
    engine.listener.on_ready(engine, INFO)
    await until(lambda: all(user.state == "ready" for user in setup.users.values()))


def test_each_process_has_its_own_requests_and_sees_the_load_of_all() -> None:
    async def test(setup: Setup, engines: list[FakeEngine]) -> None:
        first, second = setup.users.values()
        with pytest.raises(EngineDown, match="starting"):
            first.submit([1], GREEDY)
        engines[0].listener.on_progress(engines[0], "weights")
        await until(lambda: first.phase == second.phase == "weights")
        await all_ready(setup, engines[0])
        assert first.info == INFO
        # The engine sends its figures over another channel than the one that reports it as ready.
        await until(lambda: first.stats.running == 1)
        streams = [first.submit([1, 2], GREEDY), second.submit([3], GREEDY), first.submit([4], GREEDY)]
        assert [stream.request.id for stream in streams] == [1, 2, 4], "no number comes twice"
        assert [fleet.samples for fleet in (first, second, setup.owner)] == [3, 3, 3]
        assert first.clients[0].prompt_tokens == 4
        assert [(engines[0].received(link).id, link) for link in (1, 2, 1)] == [(1, 1), (2, 2), (4, 1)]
        engines[0].send_step(2, SampleUpdate(2, 0, (7,), "length"))
        assert (await streams[1].take())[0].token_ids == (7,)
        assert first.samples == 2 and not streams[0].ended

    run(test)


def test_requests_of_a_dead_process_are_aborted_and_its_successor_continues_the_numbers() -> None:
    async def test(setup: Setup, engines: list[FakeEngine]) -> None:
        await all_ready(setup, engines[0])
        gone = setup.users[1]
        assert [gone.submit([1], GREEDY).request.id for _ in range(2)] == [1, 4]
        setup.leave(1)
        assert engines[0].orders == ["attach", "attach", "detach"] and setup.users[2].samples == 0
        again = setup.join(1)
        await until(lambda: again.state == "ready")
        assert again.submit([1], GREEDY).request.id == 7
        await gone.close()

    run(test)


def test_a_death_of_the_engine_is_reported_to_all() -> None:
    async def test(setup: Setup, engines: list[FakeEngine]) -> None:
        await all_ready(setup, engines[0])
        streams = [user.submit([1], GREEDY) for user in setup.users.values()]
        engines[0].die()
        for stream in streams:
            with pytest.raises(EngineDown, match="the engine was killed"):
                await stream.take()
        assert setup.owner.samples == 0
        await until(lambda: all(user.state == "starting" for user in setup.users.values()))
        await all_ready(setup, engines[1])
        assert [user.submit([1], GREEDY).request.id for user in setup.users.values()] == [4, 5]
        assert engines[1].received(1).prompt_ids == [1]
        # One death more than allowed: the engine is not restarted, and all processes are notified.
        engines[1].die()
        await until(lambda: all(user.clients[0].state == "failed" for user in setup.users.values()))
        assert setup.owner.failed.is_set()

    run(test)


def test_an_error_of_a_receiving_thread_fails_its_requests_and_the_process_attaches_again() -> None:
    async def test(setup: Setup, engines: list[FakeEngine]) -> None:
        await all_ready(setup, engines[0])
        first, second = setup.users.values()
        streams = [user.submit([1], GREEDY) for user in (first, second)]
        receive, first._table.receive = first._table.receive, lambda *message: 1 / 0  # type: ignore[method-assign]
        engines[0].send_step(1, SampleUpdate(streams[0].request.id, 0, (7,)))
        async with asyncio.timeout(SECONDS):
            with pytest.raises(EngineDown, match="the engine cannot be reached any more: ZeroDivisionError"):
                await streams[0].take()
        first._table.receive = receive  # type: ignore[method-assign]
        await until(lambda: first.state == "ready")
        assert engines[0].orders == ["attach", "attach", "detach", "attach"]
        assert first.samples == 1 and not streams[1].ended, "the other process keeps its request"
        again = first.submit([1], GREEDY)
        engines[0].send_step(1, SampleUpdate(again.request.id, 0, (7,), "length"))
        assert (await again.take())[0].token_ids == (7,)

    run(test)


def test_an_engine_that_hangs_is_reported_by_a_waiting_process() -> None:
    async def test(setup: Setup, engines: list[FakeEngine]) -> None:
        await all_ready(setup, engines[0])
        setup.users[1].submit([1], GREEDY)
        await until(lambda: engines[0].hung)
        assert engines[0].hung[0] >= 0.3

    run(test, timeout=0.3)


def test_all_processes_have_an_adapter_when_the_call_returns() -> None:
    async def test(setup: Setup, engines: list[FakeEngine]) -> None:
        await all_ready(setup, engines[0])
        first, second = setup.users.values()
        await first.load_adapter("sql", "/sql")
        assert first.adapters == second.adapters == setup.owner.adapters == {"sql": "/sql"}
        with pytest.raises(RequestError, match="'chat' is not loaded; there is sql") as refused:
            await second.unload_adapter("chat")
        assert refused.value.status == 404
        await second.unload_adapter("sql")
        assert first.adapters == {} == second.adapters
        engines[0].die()
        with pytest.raises(EngineDown, match="starting"):
            await first.load_adapter("sql", "/sql")

    run(test)


def test_shared_counters() -> None:
    one = SharedCounters(3, 2, own=1)
    other = SharedCounters(3, 2, own=2, fd=one.fd)
    one.load(0).add(2, 100)
    other.load(0).add(1, 5)
    other.load(1).add(4, 0)
    assert [(one.load(i).samples, one.load(i).prompt_tokens) for i in (0, 1)] == [(3, 105), (4, 0)]
    assert [one.next_number() for _ in range(3)] == [1, 4, 7] and other.next_number() == 2
    one.clear(2)
    assert [one.load(i).samples for i in (0, 1)] == [2, 0]
    other.heartbeat()
    assert (one.heartbeats(1), one.heartbeats(2)) == (0, 1)
    assert [one.load(i).samples for i in (0, 1)] == [2, 0]
    one.clear(2)
    assert one.heartbeats(2) == 0
    successor = SharedCounters(3, 2, own=1, fd=one.fd)
    assert successor.next_number() == 10, "a successor continues the numbers of its predecessor"
