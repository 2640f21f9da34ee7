"""Figures of one side of a replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dovetail.plugins.app.replay.simulate import Outcome

FIGURES = {
    "requests": "samples of requests",
    "steps": "steps",
    "tokens_per_step": "tokens fed per step",
    "output_tokens_per_s": "output tokens/s",
    "hit_rate": "prefix hits, share of prompt tokens",
    "wait_ms_p50": "wait for a slot p50, ms",
    "wait_ms_p95": "wait for a slot p95, ms",
    "ttft_ms_p50": "TTFT p50, ms",
    "ttft_ms_p95": "TTFT p95, ms",
    "tpot_ms_p50": "TPOT p50, ms",
    "preemptions": "preemptions",
    "evictions": "evictions of cached pages",
    "rejected": "rejected",
    "unfinished": "unfinished or aborted",
}


def figures(outcome: Outcome) -> dict[str, Any]:
    lives = outcome.lives
    entered = [life for life in lives if life.scheduled is not None]
    prompts = [len(life.request.prompt) // 4 for life in entered]
    waits = [life.scheduled - life.request.arrival for life in entered if life.scheduled is not None]
    firsts = [life.first_token - life.request.arrival for life in lives if life.first_token is not None]
    gaps = [
        (life.ended.clock - life.first_token) / (len(life.tokens) - 1)
        for life in lives
        if life.first_token is not None and life.ended is not None and len(life.tokens) > 1
    ]
    return {
        "requests": len(lives),
        "steps": outcome.steps,
        "tokens_per_step": outcome.fed / outcome.steps if outcome.steps else None,
        "output_tokens_per_s": sum(life.output for life in lives) / outcome.seconds if outcome.seconds else None,
        "hit_rate": sum(life.cached for life in entered) / sum(prompts) if prompts else None,
        "wait_ms_p50": _quantile(waits, 0.5),
        "wait_ms_p95": _quantile(waits, 0.95),
        "ttft_ms_p50": _quantile(firsts, 0.5),
        "ttft_ms_p95": _quantile(firsts, 0.95),
        "tpot_ms_p50": _quantile(gaps, 0.5),
        "preemptions": sum(life.preemptions for life in lives),
        "evictions": outcome.evictions,
        "rejected": outcome.rejected,
        "unfinished": sum(life.ended is None or life.ended.reason == "abort" for life in lives),
    }


def _quantile(seconds: Sequence[float], q: float) -> float | None:
    """Return a quantile in milliseconds."""
    return float(np.quantile(seconds, q)) * 1e3 if seconds else None
