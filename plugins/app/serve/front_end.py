"""A process that answers HTTP and does not own the engines: one of serve.processes."""

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
from dovetail.core.frontend.process_rpc import Peer
from dovetail.core.frontend.shared_counters import Board
from dovetail.core.parallel.channel import Channel, ChannelClosed
from dovetail.core.parallel.process import enter, recompose, report
from dovetail.plugins.app.serve import ports
from dovetail.plugins.app.serve.config import ServeConfig
from dovetail.plugins.app.serve.front import Front, event_loop, limit, settle
from dovetail.plugins.app.serve.keys import Keys
from dovetail.plugins.app.serve.monitor import Reporter
from dovetail.plugins.app.serve.service import Service
from dovetail.plugins.app.serve.watch import turn

if TYPE_CHECKING:
    from dovetail.core.compose import Composition


def main(control_fd: int, parent: int) -> None:
    """Entry of the process, which runs until it is told to stop, or the supervisor is gone."""
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
        # Nobody is left to tell.
        os._exit(1)
    except BaseException as error:
        report(channel, error)
        os._exit(1)
    sys.stderr.flush()
    # Threads that make text have nothing left to do.
    os._exit(0)


async def _answer(config: ServeConfig, composition: Composition, channel: Channel, order: dict[str, Any]) -> None:
    owner = Peer(channel, asyncio.get_running_loop())
    monitor = Reporter(owner)
    board = Board(config.processes + 1, composition.engine.dp, own=order["number"], fd=order["board"])
    reports = Reports(more=monitor.more)
    fleet = AttachedFleet(composition, owner, board, timeout=limit(config.engine_timeout), reports=reports)
    service = Service(config, composition, fleet, monitor, order["started"])
    accepted = Keys({bytes.fromhex(digest): name for digest, name in order["keys"].items()})
    front = Front(service, accepted, lambda: owner.tell("listening"))
    cutting: list[asyncio.Future[None]] = []
    owner.handlers |= {
        "stop": front.stop,
        "cut_off": lambda: cutting.append(asyncio.ensure_future(front.cut_off())),
    }

    async def ready() -> None:
        await fleet.wait_ready()
        settle()
        owner.tell("ready")

    threading.Thread(target=_listen, args=(owner,), name="dovetail-owner", daemon=True).start()
    await front.answer(ports.join(order["address"]), ready(), turn(board, limit(config.front_end_timeout)))
    monitor.close()


def _listen(owner: Peer) -> None:
    """Without the one that owns the engines there is nothing to answer."""
    owner.listen()
    os._exit(1)
