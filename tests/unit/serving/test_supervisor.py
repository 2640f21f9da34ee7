"""The supervisor of front-end processes: restarts and shutdown. The processes and the engine are fakes."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from dovetail.core.compose import compose
from dovetail.core.errors import ConfigError, DovetailError
from dovetail.core.frontend import supervised
from dovetail.core.frontend.shared_counters import SharedCounters
from dovetail.plugins.app.serve import ports, supervisor
from dovetail.plugins.app.serve.config import ServeConfig
from dovetail.plugins.app.serve.keys import Keys
from dovetail.plugins.app.serve.supervisor import Supervisor


class FakeEngine:
    def __init__(self, *arguments: Any, **options: Any) -> None: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def send_order(self, message: Any) -> None: ...


class FakeFrontEnd:
    """Fake front-end process. Ends on "stop" and when reported as hung; process `stuck` has a single heartbeat."""

    processes: list[FakeFrontEnd] = []
    stuck = 0

    def __init__(self, number: int, order: Any, inherited: Any, *, on_start: Any, on_end: Any) -> None:
        self.number, self.rpc, self.failed, self._on_end = number, None, False, on_end
        self._loop, self._hung = asyncio.get_running_loop(), False
        self.processes.append(self)
        if number == self.stuck:
            SharedCounters(3, 1, own=number, fd=inherited[0]).heartbeat()

    def hangs(self, seconds: float) -> None:
        if not self._hung:
            self._hung = True
            self._loop.call_soon_threadsafe(self.end, -9, "hangs")

    def notify(self, op: str) -> None:
        if op == "stop":
            asyncio.get_running_loop().call_soon(self.end, 0, "")

    def end(self, status: int, cause: str) -> None:
        self._on_end(self, status, cause)


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeFrontEnd, "processes", [])
    monkeypatch.setattr(supervisor, "FrontEndProcess", FakeFrontEnd)
    monkeypatch.setattr(supervised, "EngineProcess", FakeEngine)


def run(test: Callable[[list[FakeFrontEnd]], Awaitable[None]], *words: str) -> int:
    composition = compose(["app=serve", "+preset=tiny_cpu", "serve.processes=2", "serve.max_restarts=2", *words])
    config = composition.app_part.config
    assert isinstance(config, ServeConfig)

    async def main() -> int:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            running = asyncio.ensure_future(Supervisor(config, composition, Keys({}), sock).run())
            await asyncio.sleep(0)
            await test(FakeFrontEnd.processes)
            async with asyncio.timeout(60):
                return await running

    return asyncio.run(main())


def test_a_front_end_that_dies_is_restarted_until_too_many_have(caplog: pytest.LogCaptureFixture) -> None:
    async def test(processes: list[FakeFrontEnd]) -> None:
        assert [one.number for one in processes] == [1, 2]
        processes[1].end(-9, "was killed")
        processes[0].end(-9, "was killed")
        assert [one.number for one in processes] == [1, 2, 2, 1]
        processes[2].end(-9, "was killed")
        assert len(processes) == 4

    assert run(test) == 1
    messages = [record.getMessage() for record in caplog.records if "front-end" in record.getMessage()]
    assert messages == [
        "front-end 2 was killed; it is started again",
        "front-end 1 was killed; it is started again",
        "front-end 2 was killed",
    ]


def test_a_front_end_that_hangs_is_restarted(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async def test(processes: list[FakeFrontEnd]) -> None:
        """Do nothing: the watchdog acts on its own."""

    monkeypatch.setattr(FakeFrontEnd, "stuck", 2)
    assert run(test, "serve.front_end_timeout=0.02") == 1
    assert [one.number for one in FakeFrontEnd.processes] == [1, 2, 2, 2]
    messages = [record.getMessage() for record in caplog.records if "front-end" in record.getMessage()]
    assert messages == ["front-end 2 hangs; it is started again"] * 2 + ["front-end 2 hangs"]


def test_a_front_end_that_cannot_start_ends_the_server_with_its_reason() -> None:
    async def test(processes: list[FakeFrontEnd]) -> None:
        processes[0].failed = True
        processes[0].end(1, "failed: no such template")

    with pytest.raises(DovetailError, match="front-end 1 failed: no such template"):
        run(test)


def test_shutdown_waits_for_all_front_ends() -> None:
    async def test(processes: list[FakeFrontEnd]) -> None:
        signal.raise_signal(signal.SIGTERM)

    assert run(test) == 0
    assert len(FakeFrontEnd.processes) == 2


def test_a_port_belongs_to_one_server_and_its_processes() -> None:
    with ports.bind(ServeConfig(processes=2, port=0)) as taken:
        address = taken.getsockname()
        with ports.bind_shared(address) as one, ports.bind_shared(address) as other:
            one.listen()
            other.listen()
            with pytest.raises(ConfigError, match="cannot listen there"):
                ports.bind(ServeConfig(processes=2, port=address[1]))
