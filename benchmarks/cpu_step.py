"""Host time of one step without a device: schedule, submit, collect, update. Prints microseconds; asserts nothing about
them.

    python benchmarks/cpu_step.py
    python benchmarks/cpu_step.py --running 256 --cached 1000000 --profile

The engine, scheduler and allocator are the real ones; the device answers at once. Requests of 512 prompt tokens, half
of them in the prefix cache, enter as others leave, so that every step has decode rows and most have a new request.
`submit` and `collect` are one of two things:

    ranks   what several ranks cost rank 0: plan and prompts as bytes; answers are made up
    runner  what one rank does in this process: device state, the step's one copy, choice and input of graphs, results.
            Graphs are replayed as nothing, and tensors are on the CPU: on a GPU each call on one costs a launch more

`all CPU` is the processor time of this thread for the whole step; on a busy machine it is the one to trust. Of windows
of eight steps the tenth of the fastest is shown, column by column: other programs can only make a step slower, and at
times they leave the machine alone.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch

from dovetail.core.compose import EngineConfig
from dovetail.core.engine.engine import start_engine
from dovetail.core.interfaces import (
    Blobs,
    Executor,
    ExecutorInfo,
    ForwardContext,
    Hidden,
    KVAllocator,
    KVGroup,
    LateInputs,
    Progress,
    RowFlag,
    RowResult,
    SamplingParams,
    StepPlan,
    StepResult,
)
from dovetail.core.parallel.encoding import encode_blob, encode_plan
from dovetail.core.parallel.slot_ledger import SlotLedger
from dovetail.core.testing.executor import small_composition
from dovetail.core.testing.reference import build
from dovetail.core.testing.toy import SPEC, VOCAB, ToyComposition
from dovetail.core.worker.graphs import StepGraphs
from dovetail.core.worker.runner import Runner

PAGE = 16
PROMPT, SHARED, OUTPUT = 512, 256, 256
"""Tokens: of a prompt, of those in the prefix cache, and of an output at most."""
BUDGET, MIXED = 8192, 1024
"""Tokens of a step, and of the largest mixed one that has a graph."""
PARTS = ("schedule", "submit", "wait", "update")
WINDOW = 8
"""Steps."""
SAMPLE = int(RowFlag.SAMPLE)


class InstantDevice(Executor):
    """Encodes each plan as for several ranks, and answers with a token for each row that samples."""

    def __init__(self, pages: int, max_len: int, running: int) -> None:
        self.pages, self.max_len, self.running = pages, max_len, running
        self._mirror = SlotLedger()
        self._plans: deque[StepPlan] = deque()

    def start(self, progress: Progress) -> ExecutorInfo:
        groups = (KVGroup(0, (0,), page_tokens=PAGE),)
        return ExecutorInfo(SPEC, groups, {0: self.pages}, self.max_len, 0, "instant", {})

    def submit(self, plan: StepPlan, blobs: Blobs) -> None:
        encode_plan(plan, self._mirror.digest)
        self._mirror.apply(plan)
        for key, blob in blobs.items():
            encode_blob(*key, blob)
        self._plans.append(plan)

    def complete(self, late: LateInputs) -> None:
        raise ValueError("no plan here waits for late inputs")

    def collect(self) -> StepResult:
        plan = self._plans.popleft()
        rows = (
            RowResult(i, row.uid, row.epoch, (1 + plan.step % (VOCAB - 1),) if row.flags & SAMPLE else ())
            for i, row in enumerate(plan.rows)
        )
        return StepResult(plan.step, tuple(rows))

    @property
    def pending(self) -> int:
        return len(self._plans)

    def shutdown(self) -> None:
        self._plans.clear()


class OneRank(Executor):
    """The runner as in a process with a GPU, but for the model: its layers and draws are graphs that do nothing."""

    def __init__(self, pages: int, max_len: int, running: int) -> None:
        self.pages, self.max_len, self.running = pages, max_len, running
        self._mirror = SlotLedger()
        self._in_flight = 0

    def start(self, progress: Progress) -> ExecutorInfo:
        torch.set_num_threads(1)
        words = f"engine.max_seqs={self.running} engine.max_len={self.max_len} model.hf.max_position_embeddings=4096"
        self._runner = runner = Runner(small_composition(*words.split()))
        info = runner.load(progress)
        runner.bind(info.num_pages)
        runner.model, runner.attention = _NoModel(runner.model.build), _NoAttention()  # type: ignore[assignment]
        runner.graphs = StepGraphs(
            runner.model,
            runner.state,
            runner.groups,
            runner.attention,
            taps=(),
            lookahead=0,
            most_rows=self.running,
            most_tokens=MIXED,
            max_len=self.max_len,
        )
        runner.graphs.capture(_nothing, progress)
        return replace(info, num_pages=dict.fromkeys(info.num_pages, self.pages))

    def submit(self, plan: StepPlan, blobs: Blobs) -> None:
        self._mirror.apply(plan)
        self._runner.execute(plan, blobs)
        self._in_flight += 1

    def complete(self, late: LateInputs) -> None:
        raise ValueError("no plan here waits for late inputs")

    def collect(self) -> StepResult:
        self._in_flight -= 1
        return self._runner.collect()

    @property
    def pending(self) -> int:
        return self._in_flight

    def shutdown(self) -> None:
        self._runner.close()


class _NoModel:
    def __init__(self, build: Any) -> None:
        self.build = build

    def embed(self, tokens_T: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(tokens_T), self.build.spec.hidden)

    def forward(self, embeds_TC: torch.Tensor, ctx: ForwardContext, taps: tuple[int, ...]) -> Hidden:
        return Hidden(embeds_TC, {})

    def logits(self, states_BC: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(states_BC), self.build.spec.vocab)

    def local_logits(self, states_BC: torch.Tensor) -> tuple[torch.Tensor, int]:
        return self.logits(states_BC), 0


class _NoAttention:
    def plan_host(self, host: object) -> None:
        """Nothing."""

    def plan_device(self, *given: object) -> None:
        """Nothing."""


def _nothing(call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """In place of a graph: its tensors as they were at first."""
    return lambda: None, call()


EXECUTORS: dict[str, type[InstantDevice | OneRank]] = {"ranks": InstantDevice, "runner": OneRank}


@dataclass
class _Written:
    """A sequence that only the allocator sees."""

    uid: int
    tokens: list[int]
    salt: str = ""


class Load:
    """An engine that always has `running` sequences, over a prefix cache of at least `cached` pages."""

    def __init__(
        self, running: int, cached: int, depth: int = 2, executor: type[InstantDevice | OneRank] = InstantDevice
    ) -> None:
        self.running, self._rng = running, random.Random(0)
        own = running * -(-(PROMPT + OUTPUT) // PAGE)
        device = executor(cached + own, PROMPT + OUTPUT, running)
        config = EngineConfig(token_budget=BUDGET, max_seqs=running, max_len=device.max_len, depth=depth)
        composition = ToyComposition(
            lambda limits, kv: build("scheduler", "fcfs", limits=limits, kv=kv),
            lambda groups, pages: build("kv_cache", "prefix_hash", groups=groups, num_pages=pages),
            device,
            config,
        )
        self.engine = start_engine(composition)  # type: ignore[arg-type]
        self._prefix = [self._rng.randrange(VOCAB) for _ in range(SHARED)]
        self._fill(self.engine.kv, cached)
        for _ in range(running):
            # Outputs that end at different times: a steady state from the start.
            self._add(self._rng.randrange(2, OUTPUT))

    def _fill(self, kv: KVAllocator, cached: int) -> None:
        """Some long sequences that have been here, the common prefix the last of them."""
        pages, rng = SHARED // PAGE, random.Random(1)
        for uid, size in enumerate(_cut(cached - pages, 1024)):
            self._leave_behind(kv, _Written(-1 - uid, rng.choices(range(VOCAB), k=size * PAGE)))
        self._leave_behind(kv, _Written(-1 - cached, list(self._prefix)))
        assert kv.stats().cached >= cached * 0.99, kv.stats()

    @staticmethod
    def _leave_behind(kv: KVAllocator, seq: _Written) -> None:
        kv.acquire(seq, reuse=False)
        assert kv.reserve(seq, len(seq.tokens)) is not None
        kv.publish(seq, len(seq.tokens))
        kv.release(seq)

    def _add(self, output: int) -> None:
        own = self._rng.choices(range(VOCAB), k=PROMPT - SHARED)
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        self.engine.add([*self._prefix, *own], params)

    def step(self) -> None:
        """One step of the engine; who has finished is replaced."""
        for event in self.engine.step():
            if event.reason is not None:
                self._add(OUTPUT)


def _cut(total: int, size: int) -> Iterator[int]:
    while total > 0:
        yield min(size, total)
        total -= size


def microseconds(load: Load, steps: int) -> dict[str, float]:
    """Per step, by part."""
    while load.engine.scheduler.stats().waiting:
        load.step()
    # As in a server: what was loaded stays, and the collector need not walk it again and again.
    gc.collect()
    gc.freeze()
    found = [window(load, WINDOW) for _ in range(max(steps // WINDOW, 1))]
    return {part: sorted(each[part] for each in found)[len(found) // 10] for part in found[0]}


def window(load: Load, steps: int) -> dict[str, float]:
    before, began = copy(load.engine.counters), time.thread_time()
    while load.engine.counters.steps < before.steps + steps:
        load.step()
    cpu, now = time.thread_time() - began, load.engine.counters
    spent = {part: getattr(now, f"{part}_seconds") - getattr(before, f"{part}_seconds") for part in PARTS}
    return {name: seconds / (now.steps - before.steps) * 1e6 for name, seconds in {**spent, "cpu": cpu}.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[256, 1024], help="sequences on the device")
    parser.add_argument("--cached", type=int, nargs="+", default=[10_000, 1_000_000], help="cached pages")
    parser.add_argument("--submit", nargs="+", choices=EXECUTORS, default=[*EXECUTORS], help="what plans are given to")
    parser.add_argument("--steps", type=int, default=960)
    parser.add_argument("--profile", action="store_true", help="list the costliest functions, too")
    args = parser.parse_args(argv)
    heads = ("schedule", "submit", "collect", "update", "all CPU")
    print(f"{'running':>8} {'cached pages':>13} {'to':>7} " + " ".join(f"{head:>9}" for head in heads) + "  us")
    for running in args.running:
        for cached in args.cached:
            for submit in args.submit:
                load = Load(running, cached, executor=EXECUTORS[submit])
                found = " ".join(f"{us:9.1f}" for us in microseconds(load, args.steps).values())
                print(f"{running:8} {cached:13} {submit:>7} {found}", flush=True)
                if args.profile:
                    profile(load, args.steps)


def profile(load: Load, steps: int) -> None:
    """Under the profiler everything is slower: shares, not times."""
    recorder = cProfile.Profile()
    recorder.enable()
    for _ in range(2 * steps):
        load.step()
    recorder.disable()
    pstats.Stats(recorder).sort_stats("tottime").print_stats(24)


if __name__ == "__main__":
    main()
