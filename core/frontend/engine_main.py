"""Entry point of the engine process."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time

import msgspec

from dovetail.core.engine.checks import check_clock
from dovetail.core.engine.counters import Counters
from dovetail.core.engine.engine import Engine, start_engine
from dovetail.core.errors import RequestError
from dovetail.core.frontend.engine_loop import EngineLoop, describe_engine
from dovetail.core.frontend.zmq_link import ZmqCommands
from dovetail.core.heap import freeze_heap
from dovetail.core.interfaces import RequestOptions, SamplingParams
from dovetail.core.parallel.channel import ChannelClosed
from dovetail.core.parallel.lanes import Lanes
from dovetail.core.parallel.process import enter, recompose, report

log = logging.getLogger(__name__)


def main(control_fd: int, parent: int) -> None:
    """Run an engine until the front-end sends "stop" or ends."""
    control = enter(control_fd, parent, signal.SIGINT, signal.SIGTERM)
    engine = composition = None
    try:
        order, _ = control.recv()
        composition = recompose(order)
        check_clock(composition)
        began = time.perf_counter()

        def progress(phase: str, share: float | None = None) -> None:
            control.send({"op": "progress", "phase": phase, "share": share})

        lanes = None if order["lanes"] is None else Lanes(**order["lanes"])
        engine = start_engine(composition, progress, again=order["again"], lanes=lanes)
        if order["adapters"] is not None:
            _restore_adapters(engine, order["adapters"])
        progress("warm up")
        _warm_up(engine)
        loop = EngineLoop(engine, ZmqCommands(control, **order["link"], lanes=lanes))
        info = describe_engine(composition, engine, time.perf_counter() - began)
        control.send({"op": "ready", "info": msgspec.to_builtins(info)})
        freeze_heap(collect=True)
        loop.run()
    except ChannelClosed:
        # The front-end has ended, so the error cannot be reported.
        _end(engine, 1)
    except BaseException as error:
        report(control, error, composition)
        _end(engine, 1)
    _end(engine, 0)


def _end(engine: Engine | None, status: int) -> None:
    try:
        if engine is not None:
            engine.shutdown()
        sys.stdout.flush()
    finally:
        # Skip waiting for the idle threads of collectives and allocators, some of which take seconds to end.
        os._exit(status)


def _restore_adapters(engine: Engine, wanted: dict[str, str]) -> None:
    """Load and unload adapters until the engine has those of its predecessor. One that cannot be loaded is skipped."""
    for name, folder in dict(engine.adapters).items():
        if wanted.get(name) != folder:
            engine.unload_adapter(name)
    for name, folder in wanted.items():
        if name not in engine.adapters:
            try:
                engine.load_adapter(name, folder).result()
            except RequestError as error:
                log.error("adapter %s was not loaded again: %s", name, error)


def _warm_up(engine: Engine) -> None:
    """Run a short request, since kernels and libraries are loaded at their first use."""
    spec = engine.info.spec
    token = next(iter(spec.eos_ids), 0)
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    engine.add([token] * 2, params, RequestOptions(pooling=None if spec.head else "last"))
    while engine.has_work:
        engine.step()
    engine.counters = Counters()
