"""Engines shared by several processes: their owner and two users in one event loop, over real links to a scripted
engine."""

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
from dovetail.core.frontend import supervised as owned
from dovetail.core.frontend.attached import AttachedFleet, Sharing
from dovetail.core.frontend.fleet import Reports
from dovetail.core.frontend.messages import Command, EngineInfo, EngineStats, Reply, SampleUpdate
from dovetail.core.frontend.process_rpc import Peer
from dovetail.core.frontend.shared_counters import Board
from dovetail.core.frontend.supervised import OwnedFleet
from dovetail.core.frontend.zmq_link import EngineEnd
from dovetail.core.interfaces import SamplingParams
from dovetail.core.parallel.channel import Channel

INFO = EngineInfo(
    model="tiny", folder=None, vocab=100, max_len=64, max_seqs=8, device="cpu", start_seconds=0.1, notes=[],
    embedding=None, hidden=8, head=True, num_pages={0: 4},
)  # fmt: skip
GREEDY = SamplingParams(max_tokens=4)
SECONDS = 60


class FakeEngine:
    """Fake EngineProcess. Opens its end of each announced link; receives messages only on a call of the test."""

    lives: list[FakeEngine] = []

    def __init__(self, composition: Any, listener: Any, **options: Any) -> None:
        self.listener, self.hung_at_start = listener, False
        self.orders: list[Any] = []
        self.hung: list[float] = []
        self.links: dict[int, EngineEnd] = {}

    def start(self) -> None:
        self.lives.append(self)

    def stop(self) -> None:
        self.close()

    def close(self) -> None:
        for link in self.links.values():
            link.close()
        self.links.clear()

    def send(self, *commands: Command) -> None:
        for command in commands:
            self.listener.on_message(self, Reply(command.id, "done"))

    def order(self, message: dict[str, Any]) -> None:
        self.orders.append(message["op"])
        if message["op"] == "attach":
            addresses = {end: message[end] for end in ("commands", "outputs")}
            self.links[message["link"]] = EngineEnd(zmq.Context.instance(), **addresses)
            self.says(message["link"], stats=EngineStats(running=1))

    def end_hung(self, seconds: float) -> None:
        self.hung.append(seconds)

    def says(self, link: int, *updates: SampleUpdate, stats: EngineStats | None = None) -> None:
        self.links[link].updates += updates
        self.links[link].tell(stats)

    def heard(self, link: int) -> Any:
        assert self.links[link].commands.poll(SECONDS * 1000)
        return next(self.links[link].receive())

    def die(self) -> None:
        self.listener.on_death(self, "was killed")


class House:
    """An owner and two processes that share its engine."""

    def __init__(self, timeout: float) -> None:
        composition = compose(["+preset=tiny_cpu"], app="generate")
        self.board = Board(3, 1)
        self.owner = OwnedFleet(
            composition, max_restarts=1, board=self.board, reports=Reports(changed=lambda: self.sharing.publish())
        )
        self.sharing = Sharing(self.owner)
        self.users: dict[int, AttachedFleet] = {}
        self.sockets: dict[int, socket.socket] = {}
        self._composition, self._timeout = composition, timeout

    def join(self, number: int) -> AttachedFleet:
        loop = asyncio.get_running_loop()
        ends = socket.socketpair()
        ours, theirs = (Peer(Channel(end), loop) for end in ends)
        for peer in (ours, theirs):
            threading.Thread(target=peer.listen, daemon=True).start()
        board = Board(3, 1, own=number, fd=self.board.fd)
        user = AttachedFleet(self._composition, theirs, board, timeout=self._timeout, reports=Reports())
        user.start()
        self.sharing.join(number, ours)
        self.users[number], self.sockets[number] = user, ends[0]
        return user

    def leave(self, number: int) -> None:
        self.sockets.pop(number).shutdown(socket.SHUT_RDWR)
        self.sharing.leave(number)


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(FakeEngine, "lives", [])
    monkeypatch.setattr(owned, "EngineProcess", FakeEngine)
    yield
    for engine in FakeEngine.lives:
        engine.close()


def housed(test: Callable[[House, list[FakeEngine]], Awaitable[None]], timeout: float = SECONDS) -> None:
    async def run() -> None:
        house = House(timeout)
        house.owner.start()
        for number in (1, 2):
            house.join(number)
        await test(house, FakeEngine.lives)
        for fleet in (*house.users.values(), house.owner):
            await fleet.close()
        for number in list(house.sockets):
            house.leave(number)

    asyncio.run(run())


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.005)


async def all_ready(house: House, engine: FakeEngine) -> None:
    engine.listener.on_ready(engine, INFO)
    await until(lambda: all(user.state == "ready" for user in house.users.values()))


def test_each_has_its_own_requests_and_sees_the_load_of_all() -> None:
    async def test(house: House, lives: list[FakeEngine]) -> None:
        first, second = house.users.values()
        with pytest.raises(EngineDown, match="starting"):
            first.submit([1], GREEDY)
        lives[0].listener.on_progress(lives[0], "weights")
        await until(lambda: first.phase == second.phase == "weights")
        await all_ready(house, lives[0])
        assert first.info == INFO
        # The message takes another route than the one that the engine is ready.
        await until(lambda: first.stats.running == 1)
        streams = [first.submit([1, 2], GREEDY), second.submit([3], GREEDY), first.submit([4], GREEDY)]
        assert [stream.request.id for stream in streams] == [1, 2, 4], "no number comes twice"
        assert [fleet.samples for fleet in (first, second, house.owner)] == [3, 3, 3]
        assert first.clients[0].prompt_tokens == 4
        assert [(lives[0].heard(link).id, link) for link in (1, 2, 1)] == [(1, 1), (2, 2), (4, 1)]
        lives[0].says(2, SampleUpdate(2, 0, (7,), "length"))
        assert (await streams[1].take())[0].token_ids == (7,)
        assert first.samples == 2 and not streams[0].ended

    housed(test)


def test_a_dead_process_leaves_nothing_and_its_successor_goes_on_counting() -> None:
    async def test(house: House, lives: list[FakeEngine]) -> None:
        await all_ready(house, lives[0])
        gone = house.users[1]
        assert [gone.submit([1], GREEDY).request.id for _ in range(2)] == [1, 4]
        house.leave(1)
        assert lives[0].orders == ["attach", "attach", "detach"] and house.users[2].samples == 0
        again = house.join(1)
        await until(lambda: again.state == "ready")
        assert again.submit([1], GREEDY).request.id == 7
        await gone.close()

    housed(test)


def test_a_death_of_the_engine_is_one_for_all() -> None:
    async def test(house: House, lives: list[FakeEngine]) -> None:
        await all_ready(house, lives[0])
        streams = [user.submit([1], GREEDY) for user in house.users.values()]
        lives[0].die()
        for stream in streams:
            with pytest.raises(EngineDown, match="the engine was killed"):
                await stream.take()
        assert house.owner.samples == 0
        await until(lambda: all(user.state == "starting" for user in house.users.values()))
        await all_ready(house, lives[1])
        assert [user.submit([1], GREEDY).request.id for user in house.users.values()] == [4, 5]
        assert lives[1].heard(1).prompt_ids == [1]
        # One death more than allowed: the engine is not restarted, and all processes are notified.
        lives[1].die()
        await until(lambda: all(user.clients[0].state == "failed" for user in house.users.values()))
        assert house.owner.failed.is_set()

    housed(test)


def test_an_engine_that_hangs_is_reported_by_a_waiting_process() -> None:
    async def test(house: House, lives: list[FakeEngine]) -> None:
        await all_ready(house, lives[0])
        house.users[1].submit([1], GREEDY)
        await until(lambda: lives[0].hung)
        assert lives[0].hung[0] >= 0.3

    housed(test, timeout=0.3)


def test_adapters_are_known_to_all_when_the_answer_comes() -> None:
    async def test(house: House, lives: list[FakeEngine]) -> None:
        await all_ready(house, lives[0])
        first, second = house.users.values()
        await first.load_adapter("sql", "/sql")
        assert first.adapters == second.adapters == house.owner.adapters == {"sql": "/sql"}
        with pytest.raises(RequestError, match="'chat' is not loaded; there is sql") as refused:
            await second.unload_adapter("chat")
        assert refused.value.status == 404
        await second.unload_adapter("sql")
        assert first.adapters == {} == second.adapters
        lives[0].die()
        with pytest.raises(EngineDown, match="starting"):
            await first.load_adapter("sql", "/sql")

    housed(test)


def test_the_board() -> None:
    board = Board(3, 2, own=1)
    other = Board(3, 2, own=2, fd=board.fd)
    board.load(0).add(2, 100)
    other.load(0).add(1, 5)
    other.load(1).add(4, 0)
    assert [(board.load(i).samples, board.load(i).prompt_tokens) for i in (0, 1)] == [(3, 105), (4, 0)]
    numbers = board.numbers()
    assert [next(numbers) for _ in range(3)] == [1, 4, 7] and next(other.numbers()) == 2
    board.clear(2)
    assert [board.load(i).samples for i in (0, 1)] == [2, 0]
    other.turn()
    assert (board.turns(1), board.turns(2)) == (0, 1), "and no count of it is another's"
    assert [board.load(i).samples for i in (0, 1)] == [2, 0]
    board.clear(2)
    assert board.turns(2) == 0
    assert next(Board(3, 2, own=1, fd=board.fd).numbers()) == 10, (
        "a successor continues the counters of its predecessor"
    )
