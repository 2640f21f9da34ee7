"""One variant's answers on the windows: scores of every position, and greedy outputs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.core.errors import DovetailError
from dovetail.core.interfaces import SamplingParams
from dovetail.plugins.app.bench.inprocess import EngineTarget

if TYPE_CHECKING:
    from dovetail.core.compose import Composition
    from dovetail.plugins.app.quality.rows import Rows
    from dovetail.plugins.app.quality.text import Ids

Phase = Callable[[str, float | None], None]


@dataclass(frozen=True, slots=True)
class Answers:
    startup: dict[str, Any]
    rows: Rows
    greedy: list[list[int]]
    """Output of each window's beginning; empty without greedy outputs."""


def measure(
    composition: Composition, windows: Sequence[Ids], tokens: int, reference: Rows | None, most_bytes: int, phase: Phase
) -> Answers:
    """Start the engine, and read all windows. Every variant gets the same requests at once, in the same order."""
    from dovetail.core.worker.prompt_logits import receiving
    from dovetail.plugins.app.quality.rows import Rows

    received = 0

    def on_rows(count: int) -> None:
        nonlocal received
        received += count
        phase("read windows", received / rows.nll_WP.size)

    rows = Rows(windows, reference=reference, most_bytes=most_bytes, on_rows=on_rows)
    target = EngineTarget(composition)
    try:
        with closing(target):
            startup = target.start(phase)
            if (longest := len(windows[0]) + 1) > target.max_len:
                raise DovetailError(
                    f"the context of {target.max_len} tokens is too short for windows that need {longest}: lower "
                    "quality.length, or raise engine.max_len"
                )
            phase("read windows", 0.0)
            reading = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
            with receiving(rows.receive):
                target.complete(windows, [reading] * len(windows))
            rows.check()
            return Answers(startup, rows, _greedy(target, windows, tokens, composition.engine.max_seqs, phase))
    finally:
        # EngineTarget froze this engine's objects, which the collector would never free.
        gc.unfreeze()
        gc.collect()


def _greedy(target: EngineTarget, windows: Sequence[Ids], tokens: int, at_once: int, phase: Phase) -> list[list[int]]:
    found: list[list[int]] = []
    if tokens:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        for first in range(0, len(windows), at_once):
            phase("greedy outputs", first / len(windows))
            prompts = [ids[:-tokens] for ids in windows[first : first + at_once]]
            found += [out for out, _ in target.complete(prompts, [params] * len(prompts))]
    return found
