"""`app=serve`: listens, starts the engine, stops in order."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dovetail.core import logs
from dovetail.core.compose import Host
from dovetail.core.errors import ConfigError, EngineDown
from dovetail.core.frontend.fleet import Reports
from dovetail.core.interfaces import App
from dovetail.plugins.app.serve import keys, owner, ports
from dovetail.plugins.app.serve.config import ServeConfig
from dovetail.plugins.app.serve.front import Front, event_loop, settle
from dovetail.plugins.app.serve.monitor import Monitor
from dovetail.plugins.app.serve.service import Service
from dovetail.plugins.app.serve.supervisor import Supervisor

if TYPE_CHECKING:
    from dovetail.core.compose import Composition


class ServeApp(App):
    config: ServeConfig

    def run(self, composition: Composition, prompts: Sequence[str]) -> int:
        if sys.platform == "win32":
            raise ConfigError("app=serve needs Linux or macOS: its processes speak over Unix sockets")
        # What the model states is read from its folder without torch: one that is not there is reported at once.
        composition.part("model").capabilities(Host())
        logs.set_up(self.config.log_format)
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        accepted = keys.load(self.config.api_key_file)
        serve = self._alone if self.config.processes == 1 else self._supervise
        with ports.take(self.config) as sock, asyncio.Runner(loop_factory=event_loop()) as runner:
            return runner.run(serve(composition, accepted, sock))

    async def _supervise(self, composition: Composition, accepted: keys.Keys, sock: socket.socket) -> int:
        return await Supervisor(self.config, composition, accepted, sock).run()

    async def _alone(self, composition: Composition, accepted: keys.Keys, sock: socket.socket) -> int:
        """HTTP and the engine's life in one process."""
        monitor = Monitor()
        fleet = owner.owned_fleet(self.config, composition, Reports(monitor.stats, monitor.more, monitor.restarted))
        service = Service(self.config, composition, fleet, monitor, int(time.time()))
        front = Front(service, accepted, lambda: owner.tell_listening(sock))
        told: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        was_ready = asyncio.Event()

        def stop(grace: float) -> None:
            if front.stop():
                told.set_result(grace)
                owner.tell_stopping(fleet, grace)

        owner.on_signals(self.config, stop)

        async def end_of_grace() -> None:
            grace = await told
            await asyncio.sleep(grace)
            owner.tell_late(fleet, grace)
            await front.cut_off()

        async def end_of_engine() -> None:
            try:
                await fleet.wait_ready()
            except EngineDown:
                pass
            else:
                was_ready.set()
                monitor.engine_ready(service.model_names[0], len(fleet.clients))
                owner.tell_ready(fleet)
                settle()
                await fleet.failed.wait()
            front.should_exit = True

        await front.answer(sock, end_of_grace(), end_of_engine())
        return owner.exit_status(fleet, was_ready.is_set())
