"""Processes of an ablation: one checks all variants on this host, each other one measures one start of a variant."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dovetail.core.errors import CapabilityError, CapacityError, DovetailError
from dovetail.core.interfaces import SLO, Workload
from dovetail.core.parallel.channel import Channel, ChannelClosed
from dovetail.core.parallel.process import enter, recompose, report
from dovetail.plugins.app.ablate.config import QualityConfig
from dovetail.plugins.app.ablate.probe import plan, probe
from dovetail.plugins.app.bench.config import RunsConfig
from dovetail.plugins.app.bench.runs import Runs, hash_of
from dovetail.plugins.app.bench.target import OnDone

if TYPE_CHECKING:
    from dovetail.core.compose import Composition

PROGRESS_SECONDS = 0.5
"""Minimum interval between progress messages, each of which costs the run a few microseconds."""


def check(control_fd: int, parent: int) -> None:
    """Process entry point. Report for each order whether this host can run the composition, and its requests."""
    _serve(control_fd, parent, _check)


def measure(control_fd: int, parent: int) -> None:
    """Process entry point. Run one start of one variant: its runs, and its answers for the quality check."""
    _serve(control_fd, parent, _measure)


def _serve(control_fd: int, parent: int, work: Callable[[Mapping[str, Any], Channel], dict[str, Any]]) -> None:
    control = enter(control_fd, parent)
    # The parent passes Ctrl-C on as SIGINT. A background job inherits SIGINT ignored, so set the handler.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        while True:
            order, _ = control.recv()
            control.send({"op": "result", "value": work(order, control)})
    except ChannelClosed:
        return
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseException as error:
        report(control, error)
        sys.exit(1)


def check_replicas(composition: Composition) -> None:
    """Raise an error if this host cannot run a replica, or a lane, of the composition."""
    from dovetail.core.compose.composition import Lane
    from dovetail.core.engine.checks import check_fit
    from dovetail.core.frontend.replicas import replica_compositions

    count = composition.engine.lanes
    for number, replica in enumerate(replica_compositions(composition)):
        check_fit(replica if count == 1 else replace(replica, lane=Lane(number, count, "")))


def _check(order: Mapping[str, Any], control: Channel) -> dict[str, Any]:
    from dovetail.plugins.app.bench.record import machine

    if order.get("machine"):
        return machine()
    try:
        composition = recompose(order)
        check_replicas(composition)
        runs = _runs(composition, order, control)
        name, workload = order["workload"], composition.part("workload").build()
        runs.check(name, workload)
        lists = [runs.requests(name, workload, 1, rate) for rate in workload.rates()]
        requests = [hash_of(of_rate) for of_rate in lists]
        aimed = runs.slo != SLO() or any(request.slo for of_rate in lists for request in of_rate)
        if order["primary"].startswith("goodput.") and not aimed:
            return {"mistake": f"ablate.primary={order['primary']} needs ablate.slo.ttft or ablate.slo.tpot"}
        quality = plan(QualityConfig(**order["ask"]), runs.target, runs, name, workload)
    except CapabilityError as error:
        return {"unfit": "; ".join(error.conflicts)}
    except CapacityError as error:
        return {"unfit": str(error)}
    except DovetailError as error:
        return {"mistake": str(error)}
    return {"requests": requests, "quality": quality}


def _measure(order: Mapping[str, Any], control: Channel) -> dict[str, Any]:
    composition = recompose(order)
    runs = _runs(composition, order, control)
    target: Any = runs.target
    with closing(target):
        startup = target.start(_progress(control))
        name, workload = order["workload"], composition.part("workload").build()
        loads = [_load(runs, name, workload, rate, order["first"]) for rate in workload.rates()]
        answers = None
        if order["quality"] is not None and computes(composition):
            control.send({"op": "phase", "name": "quality", "share": None})
            answers = probe(target, order["quality"], composition.engine.seed)
    return {"startup": startup, "loads": loads, "quality": answers}


def _runs(composition: Composition, order: Mapping[str, Any], control: Channel) -> Runs:
    from dovetail.plugins.app.bench.inprocess import EngineTarget

    progress = _progress(control)

    @contextmanager
    def bar(title: str, requests: int) -> Iterator[OnDone]:
        progress(title, 0.0)
        yield lambda done: progress(title, done / requests)

    return Runs(RunsConfig(**order["config"]), EngineTarget(composition), bar, lambda text: None)


def _load(runs: Runs, name: str, workload: Workload, rate: float | None, first: int) -> dict[str, Any]:
    found, _ = runs.measure(name, workload, rate, first=first)
    return {"rate": rate, "runs": found}


def computes(composition: Composition) -> bool:
    """Whether the device computes tokens; answers of a simulated one cannot be compared."""
    from dovetail.core.host import detect_host

    host = detect_host(composition.engine.device)
    return bool(composition.part("executor").capabilities(host).provides.get("holds_weights", True))


def _progress(control: Channel) -> Callable[[str, float | None], None]:
    last, last_name = 0.0, ""

    def report_phase(name: str, share: float | None) -> None:
        nonlocal last, last_name
        now = time.monotonic()
        if name != last_name or now - last >= PROGRESS_SECONDS:
            last, last_name = now, name
            control.send({"op": "phase", "name": name, "share": share})

    return report_phase
