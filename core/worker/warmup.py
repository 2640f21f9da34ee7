"""Warm-up of a rank: its most expensive steps, run ahead of requests to compile kernels and measure memory."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from dovetail.core.arithmetic import ceil_div
from dovetail.core.errors import shown
from dovetail.core.interfaces import (
    CatchUp,
    Join,
    JoinBlob,
    KVGroup,
    LateInputs,
    PageDelta,
    Request,
    Row,
    SamplingParams,
    StepPlan,
)
from dovetail.core.interfaces.plan import DECODE, LATE, SAMPLE
from dovetail.core.memory.sizing import page_count
from dovetail.core.ops.choices import installed
from dovetail.core.ops.compile_ahead import compile_ahead, compile_workers
from dovetail.core.ops.compile_server import CompileServer
from dovetail.core.ops.rehearsal import Rehearsal, StepLimits, WarmupStep, rehearsal, running
from dovetail.core.worker.connection import Connection
from dovetail.core.worker.graphs import Record
from dovetail.core.worker.rank_parts import RankParts
from dovetail.core.worker.runner import Runner, make_graphs
from dovetail.core.worker.sampler import warm_up_float32
from dovetail.core.worker.sampling import warm_up_processors

EPOCH = -1
MOST_ROUNDS = 3
MOST_STEPS = 256
"""Steps that a rank can give the others at a time."""


def warmup_steps(budget: int, most: int, longest: int, lookahead: int = 0) -> list[WarmupStep]:
    """Return the warm-up steps of a rank whose steps have at most `budget` tokens and `most` rows, and whose sequences
    have at most `longest` tokens. The most expensive come first: all tokens in as few chunks as can hold them, then
    every slot sampling, then, with a drafter, every slot sampling after each of `lookahead` drafts, and few rows after
    fewer drafts, each number of which has kernels of its own. Then come mixed steps, to compile their kernels: few and
    many decode rows, long and short ones, short and long chunks. Last are single chunks: of 1 token, of as many as the
    installed choices of operations serve (core.ops.choices; smaller ones than 64 run in graphs), and of the longest
    length."""
    tokens = min(budget, most * longest)
    longest = min(longest, tokens)
    chunks = ceil_div(tokens, longest)
    few, short = min(longest, 512), min(longest, 2)
    mixed = [(few, 2, 1, short), (few, 2, 1, longest), (tokens, most, most - chunks, short)] if most > 1 else []
    between = [count for count in installed().turns() if 1 < count < min(most - chunks, tokens - 1)]
    mixed += [(min(tokens, few + count), count + 1, count, short) for count in between]
    counts = sorted({min(count, longest) for count in (1, *tuned_rows(), longest)})
    alone = [(count, 1) for count in counts if (count, 1) != (tokens, chunks)]
    drafts = min(lookahead, budget - 1, longest - short)
    rows = min(most, budget // (1 + drafts))
    drafted = [(rows * (1 + drafts), rows, rows, short, drafts)] if drafts > 0 else []
    few_rows = [(count, fewer) for fewer in range(1, drafts + 1) for count in (1, 2) if count < rows]
    drafted += [(count * (1 + fewer), count, count, short, fewer) for count, fewer in few_rows]
    return [WarmupStep(*step) for step in ((tokens, chunks), (tokens, most), *drafted, *mixed, *alone)]


def tuned_rows(least: int = 64) -> list[int]:
    """Return the numbers of rows, from `least` on, up to which a tuned operation runs one kernel."""
    return sorted({least, *(most for most in installed().turns() if most >= least)})


def warmup_plan(
    step: WarmupStep, groups: Sequence[KVGroup], *, embeds: bool = False, adapted: bool = False, chunk: int = 0
) -> tuple[StepPlan, dict[tuple[int, int], JoinBlob]]:
    """Return the step as a plan. Each row is a sequence. All rows sample with top-p and log-probabilities, which cost
    most, and wait for masks (`warmup_masks`) if they verify no drafts. With `embeds` all rows are embedded instead.
    With `adapted` all use adapter slot 0, even if it is empty. `chunk`: most tokens with which the drafter catches up
    in the first decode row, if there is one."""
    rows = min(step.rows, step.tokens)
    decodes = rows if step.drafts else min(step.decodes, rows - 1)
    share, more = divmod(step.tokens - decodes, max(rows - decodes, 1))
    late = 0 if step.drafts else LATE
    params = SamplingParams(temperature=1.0, top_p=0.9, logprobs=1)
    plan = StepPlan(step=-1, rows=[])
    blobs = {}
    for slot in range(rows):
        decode = slot < decodes
        count = 1 if decode else share + (slot - decodes < more)
        length = step.context if decode else step.cached + count
        bound = length + step.drafts
        flags = (0 if embeds else SAMPLE | late) | (DECODE if decode else 0)
        request = Request(uid=slot, prompt_ids=(0,) * length, params=params, pooling="mean" if embeds else None)
        plan.joins.append(Join(slot, slot, EPOCH, length - count))
        plan.rows.append(Row(slot, slot, EPOCH, count + step.drafts, bound, step.drafts, flags))
        blobs[slot, EPOCH] = JoinBlob(request.prompt_ids, request, 0, 0 if adapted else -1)
        for group in groups:
            # Rows may share pages here, since only the cost matters. So may cached tokens.
            own = ceil_div(_kept_tokens(step), group.page_tokens)
            pages = range(ceil_div(bound, group.page_tokens))
            plan.pages += [PageDelta(group.id, slot, i, i % own + 1) for i in pages]
    if (count := min(chunk, step.context)) > 0 and decodes:
        plan.catch_up.append(CatchUp(0, 0, count))
    return plan, blobs


def _kept_tokens(step: WarmupStep) -> int:
    """Return the number of tokens for which a step needs pages."""
    return max(step.tokens, step.context + step.drafts)


def warmup_masks(plan: StepPlan, vocab: int) -> LateInputs:
    """Return masks that allow every token."""
    masks = np.full((len(plan.rows), ceil_div(vocab, 32)), 0xFFFFFFFF, np.uint32)
    return LateInputs(plan.step, tuple(range(len(plan.rows))), masks)


log = logging.getLogger(__name__)


@contextmanager
def _trial(parts: RankParts, tokens: int) -> Iterator[Runner]:
    """A runner with KV pages for `tokens` tokens, which is dropped afterwards."""
    runner = Runner(parts, {group.id: page_count(group, tokens) for group in parts.groups})
    try:
        yield runner
    finally:
        runner.release()
        parts.attention.bind({})


def run_warmup_steps(parts: RankParts, adapted: bool = True) -> None:
    """`adapted`: whether rows have adapters, if there are any."""
    engine = parts.engine
    lookahead = parts.drafter.lookahead if parts.model.build.spec.head else 0
    _run_steps(parts, warmup_steps(engine.token_budget, engine.max_seqs, parts.max_len - 1, lookahead), adapted)


def _run_steps(parts: RankParts, steps: Iterable[WarmupStep], adapted: bool = True) -> None:
    engine, spec = parts.engine, parts.model.build.spec
    kinds = {"embeds": not spec.head, "adapted": adapted and parts.adapters is not None}
    for step in steps:
        if (now := running()) is not None:
            now.begin(step)
        with _trial(parts, _kept_tokens(step)) as runner:
            chunk = engine.token_budget - step.tokens if spec.head and parts.drafter.catches_up else 0
            plan, blobs = warmup_plan(step, parts.groups, **kinds, chunk=chunk)
            runner.execute(plan, blobs)
            if plan.late:
                runner.complete(warmup_masks(plan, spec.vocab))


def compile_kernels(parts: RankParts, server: CompileServer | None) -> None:
    """Compile the kernels that warm-up steps and graphs launch, and those that any other step may launch: parts report
    which numbers of rows bring further kernels (core.ops.rehearsal)."""
    engine, workers = parts.engine, compile_workers(parts.connection.size) if server is None else server.workers
    limits = StepLimits(engine.token_budget, engine.max_seqs, parts.max_len - 1, parts.drafter.lookahead)
    with rehearsal(limits) as found, compile_ahead(workers, server=server), torch.inference_mode():
        run_warmup_steps(parts)
        if parts.adapters is not None:
            # Operations before and after layers without adapters are fused.
            run_warmup_steps(parts, adapted=False)
        found.begin(None)
        with _trial(parts, parts.engine.page_size) as runner:
            make_graphs(parts, runner.state, runner.drafts).warm_up()
            if parts.processors:
                warm_up_float32(runner.state, parts.model.build.spec.vocab)
                warm_up_processors(parts.processors, runner.state, parts.model.build.spec.vocab)
        _rehearse_others(parts, found)


def _rehearse_others(parts: RankParts, found: Rehearsal) -> None:
    """Run the steps that bring further kernels. Numbers of rows are predicted, so each round corrects the last one."""
    for _ in range(MOST_ROUNDS):
        if not (steps := agreed_steps(found.missing(), parts.connection)):
            break
        _run_steps(parts, steps)
        if parts.adapters is not None:
            _run_steps(parts, steps, adapted=False)
    spec, device = parts.model.build.spec, parts.connection.device
    if not spec.head:
        return
    found.begin(None)
    for (rows,) in agreed([(rows,) for rows in found.missing_samples()], parts.connection):
        parts.model.logits(torch.zeros(rows, spec.hidden, dtype=parts.model.build.dtype, device=device))


def agreed_steps(steps: Sequence[WarmupStep], connection: Connection) -> list[WarmupStep]:
    return [WarmupStep(*step) for step in agreed(steps, connection)]


def agreed(mine: Sequence[tuple[int, ...]], connection: Connection) -> list[tuple[int, ...]]:
    """Return what any rank has given, in one order on all ranks: steps make collective calls. Ranks differ where they
    have unlike numbers of experts."""
    ranks = connection.lane_ranks or connection.collective
    if ranks.size == 1:
        return list(mine)
    table = torch.zeros(MOST_STEPS, 1 + len(WarmupStep._fields), dtype=torch.int64)
    for line, step in zip(table, mine, strict=False):
        line[0] = len(step)
        line[1 : 1 + len(step)] = torch.tensor(step)
    (gathered,) = ranks.gather_rows([table.to(connection.device)])
    lines = gathered.cpu().tolist()
    return list(dict.fromkeys(tuple(values[:count]) for count, *values in lines if count))


def failed_capture(parts: RankParts, record: Record) -> str | None:
    """Capture the layers of the smallest steps on trial. Return what broke it, or None if it works."""
    with _trial(parts, parts.engine.page_size) as runner:
        try:
            make_graphs(parts, runner.state, runner.drafts).capture_smallest(record)
        except RuntimeError as error:
            first: BaseException = error
            while first.__context__ is not None:  # The end of a broken capture raises another error.
                first = first.__context__
            return shown(first, 200)
    return None


def report_unwarmed_kernels(on: bool) -> None:
    """While on, warn of each kernel compiled: a step waits for it. Keeps other listeners to Triton's compilations."""
    from triton import knobs

    if knobs.compilation.listener in (None, _report):
        knobs.compilation.listener = _report if on else None


def _report(*, src: Any, times: Any, cache_hit: bool, **more: Any) -> None:
    taken = "read from Triton's cache" if cache_hit else "compiled"
    log.warning(
        "a step waited %.2f s until kernel %s was %s: start-up did not launch it", times.total / 1e6, src.name, taken
    )
