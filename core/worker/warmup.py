"""Plans that make a rank do its most expensive work before anybody waits for it: to measure memory, and to warm up
kernels."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

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
    chunks = ceil_div(tokens, longest)
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
        flags = (0 if embeds else SAMPLE | LATE) | (DECODE if decode else 0)
        request = Request(uid=slot, prompt_ids=(0,) * length, params=params, pooling="mean" if embeds else None)
        plan.joins.append(Join(slot, slot, EPOCH, length - count))
        plan.rows.append(Row(slot, slot, EPOCH, count, length, 0, flags))
        blobs[slot, EPOCH] = JoinBlob(request.prompt_ids, request, 0, 0 if adapted else -1)
        for group in groups:
            # Rows may share pages here: only the cost counts.
            plan.pages += [PageDelta(group.id, slot, i, i + 1) for i in range(ceil_div(length, group.page_tokens))]
    return plan, blobs


def rehearsed_masks(plan: StepPlan, vocab: int) -> LateInputs:
    """They allow everything."""
    masks = np.full((len(plan.rows), ceil_div(vocab, 32)), 0xFFFFFFFF, np.uint32)
    return LateInputs(plan.step, tuple(range(len(plan.rows))), masks)


log = logging.getLogger(__name__)

MOST_WORKERS = 32


def compile_workers(ranks: int) -> int:
    """Threads for each of so many ranks on this host."""
    return max(1, min(MOST_WORKERS, (os.cpu_count() or 1) // ranks))


@contextmanager
def compile_ahead(workers: int) -> Iterator[None]:
    """Within, launching a Triton kernel compiles it for these arguments, and nothing runs; all are compiled when the
    block ends. What a kernel would have written reads as zeros, so whatever else the block does on the device must
    take zeros: they are valid indices."""
    import triton
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(kernel, *args, grid=grid, warmup=True, **options)

    def each_config(tuner: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        # It would time kernels that do not run, and keep the verdict.
        return tuner.warmup(*args, grid=grid, **options)

    def once(kernel: Any, key: Any, signature: Any, device: Any, *more: Any) -> Any:
        # Triton 3.6 forgets what is being compiled: each launch would prepare it again, which takes 0.3 ms.
        made = start(kernel, key, signature, device, *more)
        if made is not None:
            kernel.device_caches[device][0].setdefault(key, made)
        return made

    start, tune = JITFunction._do_compile, Autotuner.run
    with _Pool(workers) as pool, triton.AsyncCompileMode(pool):
        # Triton compiles in a pool for those who ask kernel by kernel; the plugins' kernels nobody here knows by name.
        JITFunction.run, JITFunction._do_compile, Autotuner.run = compile_only, once, each_config
        try:
            with _NewIsZero():
                yield
        finally:
            JITFunction.run, JITFunction._do_compile, Autotuner.run = launch, start, tune


class _Pool(ThreadPoolExecutor):
    """Compiles kernels, and makes them ready to be launched on the device of the thread that made the pool."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers, thread_name_prefix="compile")
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(self._ready, call, *args, **kwargs)

    def _ready(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kernel = call(*args, **kwargs)
        if self._device is not None:
            torch.cuda.set_device(self._device)
            # At its first launch Triton has C code compiled that passes the arguments, and loads the kernel.
            with suppress(Exception):  # What is wrong is told again by the launch: some are never launched.
                _ = kernel.run
        return kernel


def report_late_kernels(on: bool) -> None:
    """While on, each kernel that this process still has to compile is reported: a step and all its requests wait for
    it. Whoever listens to Triton's compilations already is left in his place."""
    from triton import knobs

    if knobs.compilation.listener in (None, _report):
        knobs.compilation.listener = _report if on else None


def _report(*, src: Any, times: Any, cache_hit: bool, **more: Any) -> None:
    taken = "read from Triton's cache" if cache_hit else "compiled"
    log.warning(
        "a step waited %.2f s until kernel %s was %s: start-up did not meet it", times.total / 1e6, src.name, taken
    )


class _NewIsZero(TorchFunctionMode):
    """Memory that a kernel was to fill holds zeros."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in _NEW else made


_NEW = {torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty}
