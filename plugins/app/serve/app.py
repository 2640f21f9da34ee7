"""`app=serve`: listen, start the engine, shut down gracefully."""

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
from dovetail.core.engine.checks import check_clock
from dovetail.core.errors import ConfigError
from dovetail.core.frontend.fleet import Reports
from dovetail.core.heap import freeze_heap
from dovetail.core.interfaces import App
from dovetail.plugins.app.serve import hosts, keys, lifecycle, output_parsing, ports
from dovetail.plugins.app.serve.config import ServeConfig
from dovetail.plugins.app.serve.http_server import HttpServer, event_loop
from dovetail.plugins.app.serve.monitor import Monitor
from dovetail.plugins.app.serve.service import Service
from dovetail.plugins.app.serve.supervisor import Supervisor

if TYPE_CHECKING:
    from dovetail.core.compose import Composition


class ServeApp(App):
    config: ServeConfig

    def run(self, composition: Composition, prompts: Sequence[str]) -> int:
        if sys.platform == "win32":
            raise ConfigError("app=serve needs Linux or macOS: its processes communicate over Unix sockets")
        # Reads the model's folder without importing torch, so that a missing one is reported at once.
        composition.part("model").capabilities(Host())
        check_clock(composition, Host())
        output_parsing.check_chosen(self.config, composition)
        drafter = composition.part("spec_decode")
        if drafter.capabilities(Host()).provides.get("simulated_acceptance"):
            raise ConfigError(
                "spec_decode.simulate_acceptance makes text without meaning, so app=serve refuses it. Would work: "
                "app=bench, or spec_decode.simulate_acceptance=null"
            )
        logs.set_up(self.config.log_format)
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        accepted = keys.load(self.config.api_key_file)
        serve = self._run_single if self.config.processes == 1 else self._run_supervised
        with ports.bind(self.config) as sock:
            hosts.refuse_open(self.config, sock.getsockname()[0], keys=bool(accepted))
            with asyncio.Runner(loop_factory=event_loop()) as runner:
                return runner.run(serve(composition, accepted, sock))

    async def _run_supervised(self, composition: Composition, accepted: keys.Keys, sock: socket.socket) -> int:
        return await Supervisor(self.config, composition, accepted, sock).run()

    async def _run_single(self, composition: Composition, accepted: keys.Keys, sock: socket.socket) -> int:
        """Answer HTTP and supervise the engine in one process."""
        monitor = Monitor()
        fleet = lifecycle.supervised_fleet(
            self.config, composition, Reports(monitor.stats, monitor.token_gaps, monitor.restarted)
        )
        service = Service(self.config, composition, fleet, monitor, int(time.time()))
        server = HttpServer(service, accepted, lambda: lifecycle.log_listening(sock))
        grace_given: asyncio.Future[float] = asyncio.get_running_loop().create_future()

        def stop(grace: float) -> None:
            if server.stop():
                grace_given.set_result(grace)
                lifecycle.log_stopping(fleet, grace)

        lifecycle.on_signals(self.config, stop)

        async def end_of_grace() -> None:
            grace = await grace_given
            await asyncio.sleep(grace)
            lifecycle.log_unfinished(fleet, grace)
            await server.cut_off()

        def ready() -> None:
            lifecycle.log_ready(fleet)
            freeze_heap(collect=True)

        async def end_of_engine() -> None:
            await lifecycle.watch_engines(self.config, fleet, monitor, ready)
            server.should_exit = True

        await server.answer(sock, end_of_grace(), end_of_engine())
        return lifecycle.exit_status(fleet, monitor)
