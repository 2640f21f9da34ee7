"""Dovetail as an engine of compare.py. Settings: {"overrides": [...]}."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from protocol import Request, Requests, Run, serve

from dovetail import SamplingParams, __version__, compose
from dovetail.core.interfaces import SLO, Grammar, TimedRequest
from dovetail.plugins.app.bench.inprocess import EngineTarget
from dovetail.plugins.app.bench.metrics import measure


@contextmanager
def load(settings: dict[str, Any]) -> Iterator[tuple[Run, dict[str, Any]]]:
    with closing(EngineTarget(compose(settings["overrides"], app="bench"))) as target:
        about = target.start(lambda phase, share: None)

        def run(requests: Requests) -> dict[str, Any]:
            timelines, inside = target.run([timed(request) for request in requests], lambda done: None)
            if failures := [line.failure for line in timelines if line.failure]:
                raise RuntimeError(f"{len(failures)} of {len(requests)} requests failed; the first: {failures[0]}")
            return measure(timelines, SLO()) | inside

        yield run, {"engine": f"dovetail {__version__}", **about}


def timed(request: Request) -> TimedRequest:
    schema = request.json_schema
    grammar = None if schema is None else Grammar(kind="json_schema", value=schema)
    return TimedRequest(
        tuple(request.prompt_ids),
        request.output_tokens,
        sampling=SamplingParams(**request.sampling, grammar=grammar),
        continues=request.continues,
    )


if __name__ == "__main__":
    serve(load)
