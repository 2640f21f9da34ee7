"""Plans that make a rank do its most expensive work before anybody waits for it: to measure memory, and to warm up
kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dovetail.core.interfaces import (
    Join,
    JoinBlob,
    KVGroup,
    LateInputs,
    PageDelta,
    Request,
    Row,
    RowFlag,
    SamplingParams,
    StepPlan,
)

EPOCH = -1


def rehearsal(tokens: int, rows: int, groups: Sequence[KVGroup]) -> tuple[StepPlan, dict[tuple[int, int], JoinBlob]]:
    """One step of `tokens` prompt tokens over `rows` sequences that all sample with top-p (the sort is the costly part)
    and wait for their masks."""
    rows = min(rows, tokens)
    share = tokens // rows
    params = SamplingParams(temperature=1.0, top_p=0.9, logprobs=1)
    plan = StepPlan(step=-1, rows=[])
    blobs = {}
    for slot in range(rows):
        count = share + (tokens - share * rows if slot == 0 else 0)
        request = Request(uid=slot, prompt_ids=(0,) * count, params=params)
        plan.joins.append(Join(slot, slot, EPOCH, 0))
        plan.rows.append(Row(slot, slot, EPOCH, count, count, 0, int(RowFlag.SAMPLE | RowFlag.LATE)))
        blobs[slot, EPOCH] = JoinBlob(request.prompt_ids, request, 0)
        for group in groups:
            # Rows may share pages here: only the cost counts.
            plan.pages += [PageDelta(group.id, slot, i, i + 1) for i in range(-(-count // group.page_tokens))]
    return plan, blobs


def rehearsed_masks(plan: StepPlan, vocab: int) -> LateInputs:
    """They allow everything."""
    masks = np.full((len(plan.rows), -(-vocab // 32)), 0xFFFFFFFF, np.uint32)
    return LateInputs(plan.step, tuple(range(len(plan.rows))), masks)
