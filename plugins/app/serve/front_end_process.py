"""Front-end process, one of serve.processes: answers HTTP; another process owns the engines."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from dovetail.core import logs
from dovetail.core.frontend.attached import AttachedFleet
from dovetail.core.frontend.fleet import Reports
from dovetail.core.frontend.process_rpc import ProcessRPC
from dovetail.core.frontend.shared_counters import SharedCounters
from dovetail.core.heap import freeze_heap
from dovetail.core.parallel.channel import Channel, ChannelClosed
from dovetail.core.parallel.process import enter, recompose, report
from dovetail.plugins.app.serve import ports
from dovetail.plugins.app.serve.config import ServeConfig
from dovetail.plugins.app.serve.http_server import HttpServer, event_loop, seconds_or_inf
from dovetail.plugins.app.serve.keys import Keys
from dovetail.plugins.app.serve.monitor import Reporter
from dovetail.plugins.app.serve.service import Service
from dovetail.plugins.app.serve.watchdog import heartbeat

if TYPE_CHECKING:
    from dovetail.core.compose import Composition


def main(control_fd: int, parent: int) -> None:
    """Process entry point. Runs until the supervisor sends "stop" or ends."""
    channel = enter(control_fd, parent, signal.SIGINT, signal.SIGTERM)
    try:
        order, _ = channel.recv()
        composition = recompose(order)
        config = composition.app_part.config
        assert isinstance(config, ServeConfig)
        logs.set_up(config.log_format)
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        with asyncio.Runner(loop_factory=event_loop()) as runner:
            runner.run(_answer(config, composition, channel, order))
    except ChannelClosed:
        # The supervisor has ended, so the error cannot be reported.
        os._exit(1)
    except BaseException as error:
        report(channel, error)
        os._exit(1)
    sys.stderr.flush()
    # Skip waiting for the text threads, which are idle.
    os._exit(0)


async def _answer(config: ServeConfig, composition: Composition, channel: Channel, order: dict[str, Any]) -> None:
    owner = ProcessRPC(channel, asyncio.get_running_loop())
    monitor = Reporter(owner)
    counters = SharedCounters(config.processes + 1, composition.engine.dp, own=order["number"], fd=order["counters"])
    reports = Reports(inter_token=monitor.token_gaps)
    fleet = AttachedFleet(composition, owner, counters, timeout=seconds_or_inf(config.engine_timeout), reports=reports)
    service = Service(config, composition, fleet, monitor, order["started"])
    accepted = Keys({bytes.fromhex(digest): name for digest, name in order["keys"].items()})
    server = HttpServer(service, accepted, lambda: owner.notify("listening"), report=order["number"] == 1)
    cutting: list[asyncio.Future[None]] = []
    owner.handlers |= {"stop": server.stop, "cut_off": lambda: cutting.append(asyncio.ensure_future(server.cut_off()))}

    async def ready() -> None:
        await fleet.wait_ready()
        freeze_heap(collect=True)
        owner.notify("ready")

    threading.Thread(target=_listen, args=(owner,), name="dovetail-owner", daemon=True).start()
    await server.answer(
        ports.bind_shared(order["address"]), ready(), heartbeat(counters, seconds_or_inf(config.front_end_timeout))
    )
    monitor.report()


def _listen(owner: ProcessRPC) -> None:
    """Receive messages of the owner of the engines; exit when it ends."""
    owner.listen()
    os._exit(1)
