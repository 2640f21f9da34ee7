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


def rehearsed_steps(budget: int, most: int, longest: int) -> list[tuple[int, int, int, int]]:
    """(tokens, rows, decode rows, their length) of steps that are worth a rehearsal, where a step has at most `budget`
    tokens and `most` rows, and a sequence at most `longest` tokens.

    The most expensive first: all tokens in as few chunks as can hold them, and every slot sampling. Then mixed ones, so
    that no request waits for their kernels to be compiled: few and many decode rows, long and short ones, short and
    long chunks. Then single chunks: of one token, of 64, 128 and 256, up to which products have kernels of their own
    (core.ops.measured; graphs meet those of fewer), and as long as there can be."""
    tokens = min(budget, most * longest)
    longest = min(longest, tokens)
    chunks = -(-tokens // longest)
    few, short = min(longest, 512), min(longest, 2)
    mixed = [(few, 2, 1, short), (few, 2, 1, longest), (tokens, most, most - chunks, short)] if most > 1 else []
    counts = sorted({min(count, longest) for count in (1, 64, 128, 256, longest)})
    alone = [(count, 1, 0, 0) for count in counts if (count, 1) != (tokens, chunks)]
    return [(tokens, chunks, 0, 0), (tokens, most, 0, 0), *mixed, *alone]


def rehearsal(
    tokens: int,
    rows: int,
    groups: Sequence[KVGroup],
    decodes: int = 0,
    *,
    context: int = 2,
    embeds: bool = False,
    adapted: bool = False,
) -> tuple[StepPlan, dict[tuple[int, int], JoinBlob]]:
    """One step of `tokens` tokens over `rows` sequences, the first `decodes` of them decode rows of length `context`,
    the others prompts. All sample with top-p and log-probabilities, which cost most, and wait for their masks; or with
    `embeds`, all are embedded. With `adapted` they use the adapter that is in slot 0, be it none."""
    rows = min(rows, tokens)
    decodes = min(decodes, rows - 1)
    share, more = divmod(tokens - decodes, rows - decodes)
    params = SamplingParams(temperature=1.0, top_p=0.9, logprobs=1)
    plan = StepPlan(step=-1, rows=[])
    blobs = {}
    for slot in range(rows):
        decode = slot < decodes
        count = 1 if decode else share + (slot - decodes < more)
        length = context if decode else count
        flags = RowFlag(0) if embeds else RowFlag.SAMPLE | RowFlag.LATE
        flags |= RowFlag.DECODE if decode else RowFlag(0)
        request = Request(uid=slot, prompt_ids=(0,) * length, params=params, pooling="mean" if embeds else None)
        plan.joins.append(Join(slot, slot, EPOCH, length - count))
        plan.rows.append(Row(slot, slot, EPOCH, count, length, 0, int(flags)))
        blobs[slot, EPOCH] = JoinBlob(request.prompt_ids, request, 0, 0 if adapted else -1)
        for group in groups:
            # Rows may share pages here: only the cost counts.
            plan.pages += [PageDelta(group.id, slot, i, i + 1) for i in range(-(-length // group.page_tokens))]
    return plan, blobs


def rehearsed_masks(plan: StepPlan, vocab: int) -> LateInputs:
    """They allow everything."""
    masks = np.full((len(plan.rows), -(-vocab // 32)), 0xFFFFFFFF, np.uint32)
    return LateInputs(plan.step, tuple(range(len(plan.rows))), masks)
