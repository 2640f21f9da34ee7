"""Warm-up of a rank: its most expensive steps, run ahead of requests to compile kernels and measure memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces import (
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
from dovetail.core.ops.tuned_tiles import tuned_rows
from dovetail.core.worker.runner import RankParts, Runner, make_graphs
from dovetail.core.worker.sampler import warm_up_float32
from dovetail.core.worker.sampling import warm_up_processors

EPOCH = -1


class WarmupStep(NamedTuple):
    """Shape of one warm-up step: decode rows come first, the other rows are prompts."""

    tokens: int
    rows: int
    decodes: int = 0
    context: int = 0
    """Length of each decode row."""


def warmup_steps(budget: int, most: int, longest: int) -> list[WarmupStep]:
    """Return the warm-up steps of a rank whose steps have at most `budget` tokens and `most` rows, and whose sequences
    have at most `longest` tokens. The most expensive come first: all tokens in as few chunks as can hold them, then
    every slot sampling. Then come mixed steps, to compile their kernels: few and many decode rows, long and short ones,
    short and long chunks. Last are single chunks: of 1 token, of as many as the tuned tiles of matmuls serve
    (core.ops.tuned_tiles; smaller ones than 64 run in graphs), and of the longest length."""
    tokens = min(budget, most * longest)
    longest = min(longest, tokens)
    chunks = ceil_div(tokens, longest)
    few, short = min(longest, 512), min(longest, 2)
    mixed = [(few, 2, 1, short), (few, 2, 1, longest), (tokens, most, most - chunks, short)] if most > 1 else []
    counts = sorted({min(count, longest) for count in (1, *tuned_rows(64), longest)})
    alone = [(count, 1) for count in counts if (count, 1) != (tokens, chunks)]
    return [WarmupStep(*step) for step in ((tokens, chunks), (tokens, most), *mixed, *alone)]


def warmup_plan(
    step: WarmupStep, groups: Sequence[KVGroup], *, embeds: bool = False, adapted: bool = False
) -> tuple[StepPlan, dict[tuple[int, int], JoinBlob]]:
    """Return the step as a plan. Each row is a sequence. All rows sample with top-p and log-probabilities, which cost
    most, and wait for masks (`warmup_masks`). With `embeds` all rows are embedded instead. With `adapted` all use
    adapter slot 0, even if it is empty."""
    rows = min(step.rows, step.tokens)
    decodes = min(step.decodes, rows - 1)
    share, more = divmod(step.tokens - decodes, rows - decodes)
    params = SamplingParams(temperature=1.0, top_p=0.9, logprobs=1)
    plan = StepPlan(step=-1, rows=[])
    blobs = {}
    for slot in range(rows):
        decode = slot < decodes
        count = 1 if decode else share + (slot - decodes < more)
        length = step.context if decode else count
        flags = (0 if embeds else SAMPLE | LATE) | (DECODE if decode else 0)
        request = Request(uid=slot, prompt_ids=(0,) * length, params=params, pooling="mean" if embeds else None)
        plan.joins.append(Join(slot, slot, EPOCH, length - count))
        plan.rows.append(Row(slot, slot, EPOCH, count, length, 0, flags))
        blobs[slot, EPOCH] = JoinBlob(request.prompt_ids, request, 0, 0 if adapted else -1)
        for group in groups:
            # Rows may share pages here, since only the cost matters.
            plan.pages += [PageDelta(group.id, slot, i, i + 1) for i in range(ceil_div(length, group.page_tokens))]
    return plan, blobs


def warmup_masks(plan: StepPlan, vocab: int) -> LateInputs:
    """Return masks that allow every token."""
    masks = np.full((len(plan.rows), ceil_div(vocab, 32)), 0xFFFFFFFF, np.uint32)
    return LateInputs(plan.step, tuple(range(len(plan.rows))), masks)


log = logging.getLogger(__name__)

MOST_WORKERS = 32


@contextmanager
def _trial(parts: RankParts, tokens: int) -> Iterator[Runner]:
    """A runner with KV pages for `tokens` tokens, which is dropped afterwards."""
    runner = Runner(parts, {group.id: page_count(group, tokens) for group in parts.groups})
    try:
        yield runner
    finally:
        runner.release()
        parts.attention.bind({})


def run_warmup_steps(parts: RankParts) -> None:
    engine, spec = parts.engine, parts.model.build.spec
    for step in warmup_steps(engine.token_budget, engine.max_seqs, parts.max_len - 1):
        with _trial(parts, max(step.tokens, step.context)) as runner:
            plan, blobs = warmup_plan(step, parts.groups, embeds=not spec.head, adapted=parts.adapters is not None)
            runner.execute(plan, blobs)
            if plan.late:
                runner.complete(warmup_masks(plan, spec.vocab))
            runner.propose()


def compile_kernels(parts: RankParts) -> None:
    """Compile the kernels that warm-up steps and graphs launch."""
    with compile_ahead(compile_workers(parts.connection.size)), torch.inference_mode():
        run_warmup_steps(parts)
        with _trial(parts, parts.engine.page_size) as runner:
            make_graphs(parts, runner.state).warm_up()
            if parts.processors:
                warm_up_float32(runner.state, parts.model.build.spec.vocab)
                warm_up_processors(parts.processors, runner.state, parts.model.build.spec.vocab)


def compile_workers(ranks: int) -> int:
    """Return the number of compiler threads for each of `ranks` ranks on this host."""
    return max(1, min(MOST_WORKERS, (os.cpu_count() or 1) // ranks))


@contextmanager
def compile_ahead(workers: int) -> Iterator[None]:
    """Make each launch of a Triton kernel compile it instead of running it; all are compiled when the block ends. Their
    output reads as zeros, which other work in the block must accept, for example as indices."""
    import triton
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(kernel, *args, grid=grid, warmup=True, **options)

    def each_config(tuner: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        # Autotuning would time kernels that do not run, and keep the result.
        return tuner.warmup(*args, grid=grid, **options)

    def once(kernel: Any, key: Any, signature: Any, device: Any, *more: Any) -> Any:
        # Triton 3.6 does not remember pending compilations: each launch would prepare them again, in 0.3 ms.
        made = start(kernel, key, signature, device, *more)
        if made is not None:
            kernel.device_caches[device][0].setdefault(key, made)
        return made

    start, tune = JITFunction._do_compile, Autotuner.run
    with _Pool(workers) as pool, triton.AsyncCompileMode(pool):
        # Triton's own way to compile in a pool takes one kernel by name, and plugins' kernels are not known here.
        JITFunction.run, JITFunction._do_compile, Autotuner.run = compile_only, once, each_config
        try:
            with _NewIsZero():
                yield
        finally:
            JITFunction.run, JITFunction._do_compile, Autotuner.run = launch, start, tune


class _Pool(ThreadPoolExecutor):
    """Compiles kernels and prepares their launch on the device that is current where the pool is created."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers, thread_name_prefix="compile")
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(self._ready, call, *args, **kwargs)

    def _ready(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kernel = call(*args, **kwargs)
        if self._device is not None:
            torch.cuda.set_device(self._device)
            # Compiles the C code that passes the arguments and loads the kernel, so that the first launch need not.
            with suppress(Exception):  # A launch raises it again. Some kernels are never launched.
                _ = kernel.run
        return kernel


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


class _NewIsZero(TorchFunctionMode):
    """Fills new memory with zeros, in place of the kernels that would write it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in _NEW else made


_NEW = {torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty}
