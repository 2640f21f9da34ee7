"""What the process that the user started does, whether it answers HTTP itself or others do."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.core.errors import DovetailError
from dovetail.core.frontend.fleet import Fleet, Reports
from dovetail.core.frontend.shared_counters import Board
from dovetail.core.frontend.supervised import OwnedFleet
from dovetail.plugins.app.serve.config import ServeConfig
from dovetail.plugins.app.serve.front import limit

if TYPE_CHECKING:
    from dovetail.core.compose import Composition

log = logging.getLogger(__name__)

_FIRST = "load libraries"
"""What an engine's process does before it says what it does."""


class Phases:
    """Logs what a starting engine does, as that begins, and how long it took. Of several that start, the first."""

    def __init__(self) -> None:
        self._phase, self._since = _FIRST, time.monotonic()
        """And when it began. Empty: none starts."""

    def told(self, fleet: Fleet) -> None:
        """Something of the fleet may have changed."""
        starts = any(client.state == "starting" for client in fleet.clients)
        phase = (fleet.phase or _FIRST) if starts else ""
        if phase == self._phase:
            return
        now, previous = time.monotonic(), self._phase
        seconds = now - self._since
        self._phase, self._since = phase, now
        if not phase and fleet.state != "ready":
            return  # What ended the start is told by whom it ended.
        text = f"starting: {phase}" if phase else "started"
        facts: dict[str, str | float] = {"phase": phase}
        if previous:
            text += f" ({previous} took {seconds:.1f} s)"
            facts |= {"previous": previous, "seconds": round(seconds, 3)}
        log.info(text, extra=facts)


def owned_fleet(
    config: ServeConfig, composition: Composition, reports: Reports, board: Board | None = None
) -> OwnedFleet:
    restarts = config.max_restarts if config.on_engine_failure == "restart" else 0
    phases = Phases()

    def changed() -> None:
        phases.told(fleet)
        reports.changed()

    fleet = OwnedFleet(
        composition,
        max_restarts=restarts,
        timeout=limit(config.engine_timeout),
        reports=replace(reports, changed=changed),
        board=board,
    )
    return fleet


def tell_listening(sock: socket.socket) -> None:
    host, port = sock.getsockname()[:2]
    log.info("listening on http://%s:%d; the engine starts", f"[{host}]" if ":" in host else host, port)


def tell_ready(fleet: Fleet) -> None:
    info, replicas = fleet.info, len(fleet.clients)
    engines = f"{replicas} replicas" if replicas > 1 else "engine"
    log.info("ready: %s on %s, %s started in %.1f s", info.model, info.device, engines, info.start_seconds)
    for note in info.notes:
        log.info("note: %s", note)


def on_signals(config: ServeConfig, stop: Callable[[float], None]) -> None:
    """`stop` is told the seconds for what runs: after SIGTERM, by which services are stopped, as many as the config
    says, after Ctrl-C none."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop, config.grace)
    loop.add_signal_handler(signal.SIGINT, stop, 0.0)


def tell_stopping(fleet: Fleet, grace: float) -> None:
    if grace:
        log.info("stopping: %d samples have %g s to finish", fleet.samples, grace)
    else:
        log.info("stopping: %d samples are cut off", fleet.samples)


def tell_late(fleet: Fleet, grace: float) -> None:
    if fleet.samples and grace:
        log.warning("%d samples did not finish within %g s", fleet.samples, grace)


def exit_status(fleet: Fleet, was_ready: bool) -> int:
    """Of a server that has ended. DovetailError where its engine could not start."""
    if fleet.state != "failed":
        return 0
    if not was_ready:
        raise DovetailError(fleet.failure)
    return 1
