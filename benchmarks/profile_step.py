"""Profile of a step: kernels by name, and how long the device idles between them.

    python benchmarks/profile_step.py 1 64 256 -- +preset=h200_bf16_tp1 engine.max_len=1024
    python benchmarks/profile_step.py 256 --prefill -- +preset=h200_bf16_tp1 engine.max_len=1024
    python benchmarks/profile_step.py 256 --mixed -- +preset=h200_bf16_tp1 engine.max_len=1024
    python benchmarks/profile_step.py 64 --sampling '{"top_p": 0.95}' -- +preset=h200_fp8_tp1 engine.max_len=1024
    python benchmarks/profile_step.py 256 --sampling '[{"top_p": 0.95}, {}]' -- +preset=h200_fp8_tp1 engine.max_len=1024
    python benchmarks/profile_step.py 1 64 256 --emulate -- +preset=h200_fp8_tp8 engine.max_len=1024
    python benchmarks/profile_step.py 64 -- +preset=h200_fp8_tp1 engine.max_len=2048 engine.drafts=always \
        spec_decode=eagle3_llama3_8b spec_decode.simulate_acceptance=3.3

Profiles decode steps of each number of sequences; with --prefill the steps that feed as many prompts; with --mixed the
steps in which half of the sequences decode while the prompts of the others are fed. Kernels overlap on two streams
(`engine.overlap_tokens`), and where one starts before its predecessor has ended (programmatic dependent launch; its
wait counts), so their sum may exceed the step's time. Allocations of device memory (cudaMalloc, and retries after
cudaFree, which wait for all work) are printed as well. --trace keeps the time and stream of each kernel. --layer attend
tells kernels of one name apart, by their place in a layer. --clock records nothing, since recording slows down a host
that the device waits for. --sampling sets SamplingParams; the last entry of a list serves all further rows, so that one
row of the example has top-p. Of drafts, a step has those that `engine.drafts` chooses. --emulate: two GPUs do what two
of engine.tp ranks do (emulated_ranks.py).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch.profiler import ProfilerActivity, profile

from dovetail import SamplingParams
from dovetail.core.compose import compose
from dovetail.core.engine.engine import Engine, start_engine
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import Sequence
from dovetail.core.interfaces.request_values import faults

Fields = dict[str, Any]
"""Fields of SamplingParams."""
Sampling = Fields | list[Fields]
"""Fields of all rows, or a list for the first rows, whose last entry serves all further rows."""
GREEDY: Sampling = {"temperature": 0.0}
MEASURED = ("max_tokens", "ignore_eos")
"""Fields that the measurement determines."""
STEPS = 40
WARM = 20
ROUNDS = 5
"""Parts of STEPS that decode_seconds times separately."""


def sampling_argument(text: str) -> Sampling:
    """Parse --sampling, or raise ArgumentTypeError."""
    try:
        sampling: Any = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is not JSON ({error})") from None
    each = sampling if isinstance(sampling, list) else [sampling]
    if not each or not all(isinstance(one, dict) for one in each):
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object of SamplingParams, or a list of them")
    for one in each:
        if given := [name for name in MEASURED if name in one]:
            raise argparse.ArgumentTypeError(f"{given[0]} is determined by the measurement; leave it out")
        try:
            SamplingParams(**one)
        except ValidationError as error:
            raise argparse.ArgumentTypeError(faults(error)) from None
    return sampling


Activity = tuple[str, float, float]
"""(name, start, duration) of an activity on the device, in microseconds."""


@dataclass(slots=True)
class Recording:
    activities: list[Activity] = field(default_factory=list)
    """Sorted by start."""
    memory: dict[str, int] = field(default_factory=dict)
    """Allocations and releases of device memory."""
    tokens: float = 0.0
    """Output tokens of a decode step."""
    drafted: float = 0.0
    """Drafts that a decode step verifies."""
    recorder: profile | None = None
    """Includes streams and driver calls."""


@contextmanager
def recording() -> Iterator[Recording]:
    """Record what the device does in the context. The recording is filled at the end."""
    found, before = Recording(), device_memory()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorder:
        found.recorder = recorder
        yield found
        torch.cuda.synchronize()
    found.memory = {name: count - before[name] for name, count in device_memory().items()}
    on_device = (e for e in recorder.events() if e.device_type == torch.autograd.DeviceType.CUDA)
    found.activities = [(e.name, e.time_range.start, e.time_range.elapsed_us()) for e in on_device]
    found.activities.sort(key=lambda activity: activity[1])


def device_memory() -> dict[str, int]:
    stats = torch.cuda.memory_stats()
    return {name: stats[name] for name in ("num_device_alloc", "num_device_free", "num_alloc_retries")}


def busy(activities: Iterable[Activity]) -> float:
    """Microseconds in which anything ran. Activities are sorted by start."""
    total, until = 0.0, float("-inf")
    for _, start, duration in activities:
        total += max(start + duration - max(start, until), 0.0)
        until = max(until, start + duration)
    return total


def by_place(activities: list[Activity], first: str) -> list[tuple[str, float]]:
    """Kernels in the order of a layer, each with the median microseconds from its predecessor's end to its own end. A
    layer begins where a name starts with `first`; of several kinds of layers, the most frequent is returned."""
    layers: dict[tuple[str, ...], list[list[float]]] = defaultdict(list)
    layer: list[tuple[str, float]] | None = None
    end = activities[0][1]
    for name, start, duration in activities:
        if name.startswith(first):
            if layer is not None:
                layers[tuple(name for name, _ in layer)].append([us for _, us in layer])
            layer = []
        if layer is not None:
            layer.append((name, start + duration - end))
        end = start + duration
    if not layers:
        return []
    names, found = max(layers.items(), key=lambda item: len(item[1]))
    return [(name, statistics.median(us)) for name, us in zip(names, zip(*found, strict=True), strict=True)]


def burst(engine: Engine, rows: int, context: int, output: int, sampling: Sampling) -> list[Sequence]:
    """Queue `rows` prompts of random ids."""
    vocab = engine.info.spec.vocab
    fields = sampling if isinstance(sampling, list) else [sampling]
    params = [SamplingParams(max_tokens=output, ignore_eos=True, **each) for each in fields]
    prompts = ([random.randrange(vocab) for _ in range(context)] for _ in range(rows))
    return [engine.add(prompt, params[min(i, len(params) - 1)])[0] for i, prompt in enumerate(prompts)]


def prefill(engine: Engine, rows: int, context: int, sampling: Sampling) -> tuple[Recording, int]:
    """Record the steps that feed `rows` prompts, after as many for warm-up. Also returns the number of steps."""
    for record in (nullcontext, recording):
        burst(engine, rows, context, 1, sampling)
        before = engine.counters.steps
        with record() as found:
            while engine.has_work:
                engine.step()
    return found, engine.counters.steps - before


def clocked(engine: Engine, rows: int, context: int, sampling: Sampling) -> tuple[float, int]:
    """Time the steps that feed `rows` prompts by the host's clock, after as many for warm-up: (seconds, steps)."""
    for _ in range(2):
        burst(engine, rows, context, 1, sampling)
        _settle()
        began, before = time.perf_counter(), engine.counters.steps
        while engine.has_work:
            engine.step()
        _settle()
        found = time.perf_counter() - began, engine.counters.steps - before
    return found


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def mixed(engine: Engine, rows: int, context: int, sampling: Sampling) -> tuple[Recording, int]:
    """Record the steps that feed the prompts of half of `rows` sequences while the others decode, after a warm-up."""
    for record in (nullcontext, recording):
        decoding = burst(engine, rows - rows // 2, context, 4 * (WARM + STEPS), sampling)
        while any(seq.known_len < seq.prompt_len + WARM for seq in decoding):
            engine.step()
        entering = burst(engine, rows // 2, context, 2, sampling)
        torch.cuda.synchronize()
        before = engine.counters.steps
        with record() as found:
            while any(seq.known_len == seq.prompt_len for seq in entering):
                engine.step()
        steps = engine.counters.steps - before
        while engine.has_work:
            engine.step()
    return found, steps


@contextmanager
def decoding(
    engine: Engine, rows: int, context: int, sampling: Sampling, steps: int = STEPS
) -> Iterator[Callable[[int], None]]:
    """Feed `rows` prompts of `context` tokens and run WARM decode steps. Yields a function that runs a number of decode
    steps of all rows, at most `steps` in total. The sequences end with the context. Raises ConfigError if a row left
    the batch earlier."""
    most_of_step = 1 + engine.info.lookahead
    output = 2 * (WARM + steps) * most_of_step + rows * context // engine.composition.engine.token_budget
    sequences = burst(engine, rows, context, output, sampling)
    ended, preempted = 0, engine.scheduler.stats().preemptions

    def step_while(more: Callable[[], bool]) -> None:
        nonlocal ended
        while engine.has_work and more():
            ended += sum(event.reason is not None for event in engine.step())

    def go(steps: int) -> None:
        target = engine.counters.steps + steps
        step_while(lambda: engine.counters.steps < target)

    step_while(lambda: any(seq.known_len == seq.prompt_len for seq in sequences))
    go(WARM)
    _settle()
    yield go
    early = ended + engine.scheduler.stats().preemptions - preempted
    step_while(lambda: True)
    if early:
        raise ConfigError(
            f"{rows} rows of {context} prompt tokens and {output} output tokens do not fit: {early} left the batch "
            "before the last measured step. Use fewer rows or a shorter --context, or raise engine.max_len or "
            "engine.kv_pages"
        )


def decode(engine: Engine, rows: int, context: int, sampling: Sampling) -> tuple[Recording, int]:
    """Record STEPS decode steps of `rows` sequences."""
    with decoding(engine, rows, context, sampling) as go, recording() as found:
        counters = engine.counters
        tokens, drafted = counters.output_tokens, counters.drafted
        go(STEPS)
        found.tokens = (counters.output_tokens - tokens) / STEPS
        found.drafted = (counters.drafted - drafted) / STEPS
    return found, STEPS


def decode_seconds(engine: Engine, rows: int, context: int, sampling: Sampling) -> float:
    """Return the seconds of a decode step of `rows` sequences by the host's clock, median over ROUNDS of consecutive
    steps. Nothing is recorded, and plans stay in flight as in a server."""
    rounds = []
    with decoding(engine, rows, context, sampling) as go:
        for _ in range(ROUNDS):
            began = time.perf_counter()
            go(STEPS // ROUNDS)
            rounds.append((time.perf_counter() - began) / (STEPS // ROUNDS))
    return statistics.median(rounds)


def main(argv: list[str]) -> None:
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=int, nargs="+")
    parser.add_argument("--context", type=int, default=512, help="prompt tokens of each sequence")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--prefill", action="store_true", help="steps that feed prompts instead of decode steps")
    kinds.add_argument("--mixed", action="store_true", help="steps with prompts and decode rows, half each")
    parser.add_argument(
        "--sampling",
        type=sampling_argument,
        action="append",
        metavar="JSON",
        help="SamplingParams or a list; repeatable",
    )
    parser.add_argument("--clock", action="store_true", help="with --prefill: time by the host's clock only")
    parser.add_argument("--kernels", type=int, default=24, help="kernels to list, longest first")
    parser.add_argument("--layer", metavar="KERNEL", help="time of each kernel of a layer, which begins with this one")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="write a trace there for each number of rows")
    parser.add_argument("--emulate", action="store_true", help="two GPUs emulate all ranks: only times are meaningful")
    args = parser.parse_args(argv[:cut])
    if args.clock and not args.prefill:
        parser.error("--clock times the steps that feed prompts: it needs --prefill")
    if args.trace is not None:
        args.trace.mkdir(parents=True, exist_ok=True)
    composition = compose([*argv[cut + 1 :], f"engine.max_seqs={max(args.rows)}"])
    if args.emulate:
        # It imports collective=symm_mem, which needs Triton.
        from emulated_ranks import emulate

        composition = emulate(composition)
    engine = start_engine(composition)
    for sampling, rows in product(args.sampling or [GREEDY], args.rows):
        words = f"{rows} rows{'' if sampling == GREEDY else f', {sampling}'}"
        if args.clock:
            seconds, steps = clocked(engine, rows, args.context, sampling)
            print(f"\n{words}: {1e3 * seconds / steps:.1f} ms a step by the host's clock, {steps} steps")
            continue
        measure = prefill if args.prefill else mixed if args.mixed else decode
        recorded, steps = measure(engine, rows, args.context, sampling)
        found = recorded.activities
        if args.trace is not None and recorded.recorder is not None:
            recorded.recorder.export_chrome_trace(str(args.trace / f"{rows}_rows.json.gz"))
        span = max(start + duration for _, start, duration in found) - found[0][1]
        work = busy(found)
        overlapped = sum(duration for _, _, duration in found) - work
        by_name: dict[str, list[float]] = defaultdict(list)
        for name, _, duration in found:
            by_name[name].append(duration)
        shares = f"{1 - work / span:.1%} idle, {overlapped / span:.1%} overlapped"
        kernels = f"{len(found) / steps:.0f} kernels, {steps} steps"
        print(f"\n{words}: {span / steps / 1e3:.3f} ms a step, {shares}, {kernels}")
        print("  ".join(f"{name} {count}" for name, count in recorded.memory.items()))
        if recorded.drafted:
            print(f"{recorded.drafted:.1f} drafts and {recorded.tokens:.1f} output tokens a step")
        for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[: args.kernels]:
            each, mean = len(times) / steps, sum(times) / len(times)
            print(f"{each * mean:9.1f} us {each:7.1f} x {mean:7.2f} us  {name[:90]}")
        if args.layer:
            print("kernels of a layer, from the end of one to the end of the next:")
            for name, us in by_place(found, args.layer):
                print(f"{us:9.2f} us  {name[:90]}")
    engine.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
