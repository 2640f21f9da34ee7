"""Host time of one step without a device: schedule, submit, collect, update. Prints microseconds and judges nothing.

    python benchmarks/cpu_step.py
    python benchmarks/cpu_step.py --running 256 --cached 1000000 --profile
    python benchmarks/cpu_step.py --plan 1 64 256 --readers 1 7
    python benchmarks/cpu_step.py --logprobs 0 5 20
    python benchmarks/cpu_step.py --running 256 --cached 10000 --submit ranks --record

The engine, scheduler and allocator are the real ones; the device answers at once. Requests of 512 prompt tokens, half
of them in the prefix cache, enter as others leave, so that every step has decode rows and most have a new request.
`submit` and `collect` are one of two things:

    ranks   what several ranks cost rank 0: plan and prompts are encoded; answers are made up
    runner  what one rank does in this process: device state, the step's single copy, choice and input of graphs,
            results. Graphs do nothing when replayed, and tensors are on the CPU; on a GPU each operation costs a launch

`all CPU` is the processor time of this thread for the whole step; trust it on a busy machine. Each column shows the
tenth percentile over windows of eight steps: other programs can only make a step slower.

--logprobs times the results of a step on their way from the worker to the engine, with so many log-probabilities.

--plan times a plan of that many decode rows on its way to the ranks instead. No sequence joins, leaves or gets a page.
Encode, decode and check are the best of nine. The ring shows median (p99) of `send`, and of the time until the last
reader, each a process, has the plan. Readers poll without pause for a millisecond and then ever less often, so the time
between two plans matters (--gap).
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import os
import pstats
import random
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from array import array
from collections.abc import Iterator, Sequence
from contextlib import closing
from copy import copy
from dataclasses import dataclass

import torch
from step_devices import EXECUTORS, PAGE, InstantDevice, OneRank

from dovetail.core.compose import EngineConfig
from dovetail.core.engine.engine import start_engine
from dovetail.core.interfaces import (
    Join,
    KVAllocator,
    Row,
    RowFlag,
    SamplingParams,
    StepPlan,
)
from dovetail.core.parallel.encoding import decode_plan, encode_plan
from dovetail.core.parallel.ring import RingReader, RingWriter
from dovetail.core.parallel.slot_ledger import SlotLedger
from dovetail.core.testing.reference import build
from dovetail.core.testing.toy import VOCAB, ToyComposition
from dovetail.core.worker.batch import Rows
from dovetail.core.worker.result_copies import ResultCopies
from dovetail.core.worker.sampling import SampledRows
from dovetail.plugins.executor.config import MultiprocConfig

PROMPT, SHARED, OUTPUT = 512, 256, 256
"""Tokens of a prompt, its tokens in the prefix cache, and the most tokens of an output."""
BUDGET = 8192
"""Most tokens of a step."""
PARTS = ("schedule", "submit", "wait", "update")
WINDOW = 8
"""Steps."""


@dataclass
class _Written:
    """A sequence that exists for the allocator only."""

    uid: int
    tokens: list[int]
    salt: str = ""


class Load:
    """An engine that always has `running` sequences, over a prefix cache of at least `cached` pages."""

    def __init__(
        self,
        running: int,
        cached: int,
        depth: int = 2,
        executor: type[InstantDevice | OneRank] = InstantDevice,
        record: str | None = None,
    ) -> None:
        self.running, self._rng = running, random.Random(0)
        own = running * -(-(PROMPT + OUTPUT) // PAGE)
        device = executor(cached + own, PROMPT + OUTPUT, running)
        config = EngineConfig(token_budget=BUDGET, max_seqs=running, max_len=device.max_len, depth=depth, record=record)
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
            # Outputs end at different times, so the load is in a steady state from the start.
            self._add(self._rng.randrange(2, OUTPUT))

    def _fill(self, kv: KVAllocator, cached: int) -> None:
        """Fill the cache with long finished sequences, the last of which is the common prefix."""
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
        """Run one step of the engine and replace finished requests."""
        for event in self.engine.step():
            if event.reason is not None:
                self._add(OUTPUT)


def _cut(total: int, size: int) -> Iterator[int]:
    while total > 0:
        yield min(size, total)
        total -= size


def microseconds(load: Load, steps: int) -> dict[str, float]:
    """Host time of a step by part."""
    while load.engine.scheduler.stats().waiting:
        load.step()
    # As in a server, the garbage collector skips everything that was loaded.
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
    parser.add_argument("--running", type=int, nargs="+", default=[256, 1024], help="running sequences")
    parser.add_argument("--cached", type=int, nargs="+", default=[10_000, 1_000_000], help="cached pages")
    parser.add_argument("--submit", nargs="+", choices=EXECUTORS, default=[*EXECUTORS], help="what takes the plans")
    parser.add_argument("--steps", type=int, default=960)
    parser.add_argument("--record", action="store_true", help="also with engine.record, in turns, and the difference")
    parser.add_argument("--profile", action="store_true", help="also list the costliest functions")
    parser.add_argument("--plan", type=int, nargs="+", metavar="ROWS", help="time plans of ROWS decode rows instead")
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 7], help="--plan: other ranks")
    parser.add_argument("--plans", type=int, default=1000, help="--plan: plans through the ring for each line")
    parser.add_argument("--gap", type=float, nargs="+", default=[0.5, 5.0], help="--plan: ms between two plans")
    parser.add_argument(
        "--logprobs", type=int, nargs="+", metavar="N", help="time results with N log-probabilities instead"
    )
    parser.add_argument("--receive", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.receive is not None:
        receive(args.receive[0], args.readers[0], args.receive[1])
        return
    if args.logprobs:
        for running in args.running:
            for wanted in args.logprobs:
                print(
                    f"{running:8} rows, logprobs={wanted}: collect {time_results(running, wanted):7.1f} us", flush=True
                )
        return
    if args.record:
        for running in args.running:
            for cached in args.cached:
                time_recording(running, cached, EXECUTORS[args.submit[0]], args.steps)
        return
    if args.plan:
        for rows in args.plan:
            time_plan(rows, args.readers, args.plans, args.gap)
        return
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


def time_recording(running: int, cached: int, executor: type[InstantDevice | OneRank], steps: int) -> None:
    """Print the processor time of a step with and without engine.record. Windows of both alternate, since a machine's
    speed varies more than the recorder's cost."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "run.rec")
        loads = [Load(running, cached, executor=executor, record=record) for record in (None, path)]
        for load in loads:
            while load.engine.scheduler.stats().waiting:
                load.step()
        gc.collect()
        gc.freeze()
        taken = [[window(load, WINDOW)["cpu"] for load in loads] for _ in range(max(steps // WINDOW, 1))]
        writer = loads[1].engine._recorder._file.thread  # type: ignore[attr-defined]
        spent = time.clock_gettime(time.pthread_getcpuclockid(writer.ident)) / loads[1].engine.counters.steps * 1e6
        loads[1].engine.shutdown()
        size = os.path.getsize(path) / loads[1].engine.counters.steps
    plain, recorded = (sorted(each)[len(each) // 10] for each in zip(*taken, strict=True))
    print(
        f"{running:8} {cached:13} plain {plain:.1f} us, recorded {recorded:.1f} us, {recorded - plain:+.1f} us; "
        f"writer's thread {spent:.1f} us, {size:.0f} bytes",
        flush=True,
    )


def profile(load: Load, steps: int) -> None:
    """Print the costliest functions. Everything is slower under the profiler: read shares, not times."""
    recorder = cProfile.Profile()
    recorder.enable()
    for _ in range(2 * steps):
        load.step()
    recorder.disable()
    pstats.Stats(recorder).sort_stats("tottime").print_stats(24)


def time_results(rows: int, wanted: int) -> float:
    """Return the microseconds of processor time in which a step's results become records, best of 200."""
    listed = Rows([Row(slot, slot << 8, 1, 1, 9, 0, int(RowFlag.SAMPLE | RowFlag.DECODE)) for slot in range(rows)])
    zeros_R, results = torch.zeros(rows, dtype=torch.int64), ResultCopies(torch.device("cpu"))
    best = torch.zeros(rows, 1), torch.zeros(rows, 1, wanted), torch.zeros(rows, 1, wanted, dtype=torch.int64)
    sampled = SampledRows(zeros_R[:, None], zeros_R, zeros_R, zeros_R, zeros_R, best if wanted else None)
    taken = []
    for step in range(200):
        results.send(step, results.clock.mark(), listed, dict.fromkeys(range(rows), wanted), sampled, {}, None)
        began = time.thread_time()
        results.collect()
        taken.append(time.thread_time() - began)
    return min(taken) * 1e6


# A plan on its way to the ranks.

RING_WARM_UP = 50
"""Plans through the ring that are not counted."""


def time_plan(rows: int, readers: Sequence[int], plans: int, gaps: Sequence[float]) -> None:
    flags = int(RowFlag.SAMPLE | RowFlag.DECODE)
    plan = StepPlan(1, [Row(slot, (70_000 + slot) << 8, 1, 1, 900 + 17 * slot, 0, flags) for slot in range(rows)])
    data = encode_plan(plan)
    assert decode_plan(data) == (plan, 0)
    ledger = SlotLedger()
    ledger.apply(StepPlan(0, [], joins=[Join(row.slot, row.uid, row.epoch, 0) for row in plan.rows]))
    print(f"{rows} decode rows, {len(data)} bytes, us; ring: median (p99)")
    for name, call in {
        "encode": lambda: encode_plan(plan),
        "decode": lambda: decode_plan(data),
        "check": lambda: ledger._check_rows(plan),
    }.items():
        print(f"  {name:6}  {min(timeit.repeat(call, number=2000, repeat=9)) / 2000 * 1e6:7.1f}")
    for count in readers:
        for gap in gaps:
            sent, taken = (
                f"{statistics.median(seconds) * 1e6:.1f} ({statistics.quantiles(seconds, n=100)[-1] * 1e6:.1f})"
                for seconds in through_ring(data, count, plans, gap / 1e3)
            )
            print(f"  ring, readers: {count}, {gap:g} ms between plans: send {sent}, received {taken}")


def through_ring(data: bytes, readers: int, plans: int, gap: float) -> tuple[list[float], list[float]]:
    """Return two times of each plan in seconds: of `send`, and until every reader has it."""
    began, returned = array("d"), array("d")
    with closing(RingWriter(readers, MultiprocConfig().plan_bytes)) as ring:
        command = [sys.executable, __file__, "--receive", str(ring.fd), str(plans + RING_WARM_UP), "--readers"]
        processes = [
            subprocess.Popen([*command, str(reader)], stdout=subprocess.PIPE, pass_fds=[ring.fd])
            for reader in range(readers)
        ]
        pipes = [process.stdout for process in processes if process.stdout is not None]
        try:
            if not all(pipe.readline() for pipe in pipes):
                raise SystemExit("a reader did not start: see above")
            for _ in range(plans + RING_WARM_UP):
                time.sleep(gap)
                began.append(time.perf_counter())
                ring.send(data)
                returned.append(time.perf_counter())
            # All processes have the same clock: Linux's CLOCK_MONOTONIC.
            arrived = [array("d", pipe.read()) for pipe in pipes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
            for pipe in pipes:
                pipe.close()
    sent = [end - start for start, end in zip(began, returned, strict=True)]
    taken = [max(ends) - start for start, *ends in zip(began, *arrived, strict=True)]
    return sent[RING_WARM_UP:], taken[RING_WARM_UP:]


def receive(fd: int, reader: int, plans: int) -> None:
    """Run as a reader: print a line once attached, and at the end the times at which the plans arrived."""
    arrived = array("d")
    with closing(RingReader(fd, reader)) as ring:
        print(flush=True)
        for _ in range(plans):
            data = ring.recv()
            arrived.append(time.perf_counter())
    decode_plan(data)
    sys.stdout.buffer.write(arrived.tobytes())


if __name__ == "__main__":
    main()
