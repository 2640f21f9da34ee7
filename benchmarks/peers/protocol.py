"""How compare.py talks to an engine in a separate process: JSON lines, orders on stdin, answers on stdout.

Standard library only: a peer runs under another Python, without Dovetail.

    argv[1]   settings, a JSON object
    answer    {"ready": {...}}                            once the engine is loaded
    order     {"requests": "file.jsonl"}                  a Request a line
    answer    {"seconds": s, "output_tokens": n, ...}     from the first request's arrival to the last token
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Request:
    """One request. It ignores end-of-sequence. All that continue no other arrive at once."""

    prompt_ids: list[int]
    output_tokens: int
    sampling: dict[str, Any]
    """Temperature and the other parameters that are not defaults, under the names that Dovetail and vLLM share."""
    json_schema: str | None = None
    """JSON Schema of the output, which may end before `output_tokens` where it is complete."""
    continues: int | None = None
    """Index of an earlier request: this one is sent when that one ends, and its prompt is that one's prompt and output,
    then `prompt_ids`."""


Requests = list[Request]
Run = Callable[[Requests], dict[str, Any]]


def serve(load: Callable[[dict[str, Any]], AbstractContextManager[tuple[Run, dict[str, Any]]]]) -> None:
    """Answer orders until stdin ends. `load(settings)` yields a function that runs requests, and a description of the
    engine."""
    # Whatever libraries print goes to stderr; stdout is for answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    began = time.perf_counter()
    with load(json.loads(sys.argv[1])) as (run, about):
        answer({"ready": {**about, "startup_s": round(time.perf_counter() - began, 2)}})
        for line in sys.stdin:
            requests = read(json.loads(line)["requests"])
            result = run(requests)
            check(requests, result["output_tokens"])
            answer(result)


def check(requests: Requests, tokens: int) -> None:
    """Raise RuntimeError if an engine did not produce the tokens that were asked for."""
    most = sum(request.output_tokens for request in requests)
    exact = all(request.json_schema is None for request in requests)
    if tokens > most or (exact and tokens < most):
        raise RuntimeError(f"{tokens} tokens instead of {most}")


def read(path: str) -> Requests:
    with open(path, encoding="utf-8") as file:
        return [Request(**json.loads(line)) for line in file]
