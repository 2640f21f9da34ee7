"""Start and end of a server in the process that the user started, which answers HTTP or supervises: log lines,
signals and exit status."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.core.errors import DovetailError, EngineDown
from dovetail.core.frontend.fleet import Fleet, Reports
from dovetail.core.frontend.shared_counters import SharedCounters
from dovetail.core.frontend.supervised import SupervisedFleet
from dovetail.plugins.app.serve.config import ServeConfig
from dovetail.plugins.app.serve.http_server import seconds_or_inf
from dovetail.plugins.app.serve.monitor import Monitor

if TYPE_CHECKING:
    from dovetail.core.compose import Composition

log = logging.getLogger(__name__)

_FIRST_PHASE = "load libraries"
"""Phase of an engine process before its first progress message."""


class Phases:
    """Logs each phase of a starting engine, of several the first, and the duration of the previous phase."""

    def __init__(self) -> None:
        self._phase, self._since = _FIRST_PHASE, time.monotonic()
        """Current phase and its begin; an empty phase = no engine is starting."""

    def update(self, fleet: Fleet) -> None:
        """Log the phase if it has changed."""
        starts = any(client.state == "starting" for client in fleet.clients)
        phase = (fleet.phase or _FIRST_PHASE) if starts else ""
        if phase == self._phase:
            return
        now, previous = time.monotonic(), self._phase
        seconds = now - self._since
        self._phase, self._since = phase, now
        if not phase and fleet.state != "ready":
            return  # The start failed; the cause is logged elsewhere.
        text = f"starting: {phase}" if phase else "started"
        facts: dict[str, str | float] = {"phase": phase}
        if previous:
            text += f" ({previous} took {seconds:.1f} s)"
            facts |= {"previous": previous, "seconds": round(seconds, 3)}
        log.info(text, extra=facts)


def supervised_fleet(
    config: ServeConfig, composition: Composition, reports: Reports, counters: SharedCounters | None = None
) -> SupervisedFleet:
    restarts = config.max_restarts if config.on_engine_failure == "restart" else 0
    phases = Phases()

    def changed() -> None:
        phases.update(fleet)
        reports.changed()

    fleet = SupervisedFleet(
        composition,
        max_restarts=restarts,
        timeout=seconds_or_inf(config.engine_timeout),
        reports=replace(reports, changed=changed),
        counters=counters,
    )
    return fleet


def log_listening(sock: socket.socket) -> None:
    host, port = sock.getsockname()[:2]
    log.info("listening on http://%s:%d; the engine starts", f"[{host}]" if ":" in host else host, port)


def log_ready(fleet: Fleet) -> None:
    info, replicas = fleet.info, len(fleet.clients)
    engines = f"{replicas} replicas" if replicas > 1 else "engine"
    log.info("ready: %s on %s, %s started in %.1f s", info.model, info.device, engines, info.start_seconds)
    for note in info.notes:
        log.info("note: %s", note)


async def watch_engines(config: ServeConfig, fleet: Fleet, monitor: Monitor, on_ready: Callable[[], None]) -> None:
    """Create the metrics and call `on_ready` once the engines have started. Returns when they have failed for good."""
    try:
        info = await fleet.wait_ready()
    except EngineDown:
        return
    monitor.engine_ready((config.model_names or (info.model,))[0], len(fleet.clients))
    on_ready()
    await fleet.failed.wait()


def on_signals(config: ServeConfig, stop: Callable[[float], None]) -> None:
    """Call `stop` with the seconds for running requests: config.grace on SIGTERM, 0 on Ctrl-C."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop, config.grace)
    loop.add_signal_handler(signal.SIGINT, stop, 0.0)


def log_stopping(fleet: Fleet, grace: float) -> None:
    if grace:
        log.info("stopping: %d samples have %g s to finish", fleet.samples, grace)
    else:
        log.info("stopping: %d samples are cut off", fleet.samples)


def log_unfinished(fleet: Fleet, grace: float) -> None:
    if fleet.samples and grace:
        log.warning("%d samples did not finish within %g s", fleet.samples, grace)


def exit_status(fleet: Fleet, monitor: Monitor) -> int:
    """Return the exit status of a server that has ended. Raises DovetailError if its engine could not start."""
    if fleet.state != "failed":
        return 0
    if monitor.metrics is None:
        raise DovetailError(fleet.failure)
    return 1
