"""Dovetail as an engine of compare.py. Settings: {"overrides": [...]}."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from protocol import Requests, Run, serve

from dovetail import __version__, compose
from dovetail.core.interfaces import SLO, TimedRequest
from dovetail.plugins.app.bench.inprocess import EngineTarget
from dovetail.plugins.app.bench.metrics import measure


@contextmanager
def load(settings: dict[str, Any]) -> Iterator[tuple[Run, dict[str, Any]]]:
    with closing(EngineTarget(compose(settings["overrides"], app="bench"))) as target:
        about = target.start(lambda phase, share: None)

        def run(requests: Requests) -> dict[str, Any]:
            timed = [TimedRequest(tuple(ids), output) for ids, output in requests]
            timelines, inside = target.run(timed, lambda done: None)
            return measure(timelines, SLO()) | inside

        yield run, {"engine": f"dovetail {__version__}", **about}


if __name__ == "__main__":
    serve(load)
