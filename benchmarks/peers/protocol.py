"""How compare.py talks to an engine in a separate process: JSON lines, orders on stdin, answers on stdout.

Standard library only: a peer runs under another Python, without Dovetail.

    argv[1]   settings, a JSON object
    answer    {"ready": {...}}                            once the engine is loaded
    order     {"requests": "file.jsonl"}                  {"prompt_ids": [...], "output_tokens": n} a line
    answer    {"seconds": s, "output_tokens": n, ...}     from the first request's arrival to the last token
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

Requests = list[tuple[list[int], int]]
"""(prompt ids, output tokens) each; all arrive at once."""
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
            expected = sum(output for _, output in requests)
            if result["output_tokens"] != expected:
                raise RuntimeError(f"{result['output_tokens']} tokens instead of {expected}")
            answer(result)


def read(path: str) -> Requests:
    with open(path, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    return [(line["prompt_ids"], line["output_tokens"]) for line in lines]
