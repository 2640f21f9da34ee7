"""Gain of drafts under whole loads, simulated: output tokens per second over those without drafts.

    python benchmarks/draft_loads.py --acceptance 0 0.3 0.6 0.79 0.9 -- +preset=h200_fp8_tp1 \
        spec_decode=eagle3_llama3_8b quant@spec_decode.quant=fp8 engine.max_len=2048 engine.max_seqs=256
    python benchmarks/draft_loads.py --loads 64x512/256 20/s:150x150/400 -- +preset=h200_fp8_tp1 spec_decode=ngram

A load is REQUESTSxPROMPT/OUTPUT, all at once, or RATE/s:REQUESTSxPROMPT/OUTPUT, a Poisson process; with ~ in front,
lengths are drawn from half to one and a half times the stated ones. Devices and time are simulated (docs/simulator.md),
and drafts are accepted with a fixed probability each, so results have no noise and need no GPU. The first run of a load
also measures acceptance and times; with `--runs N` it is run N times in a row, with other prompts, and the last run
counts. Overrides after `--` choose model, drafter and GPU.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from dovetail.core.compose import compose
from dovetail.core.engine.engine import Engine, start_engine
from dovetail.core.errors import ConfigError, DovetailError
from dovetail.core.interfaces import SamplingParams
from dovetail.plugins.app.tables import console

LOADS = (
    *("1x512/256", "16x150/400", "64x512/256", "64x1000/100", "190x150/400", "256x512/256", "256x1000/100"),
    *("~256x150/400", "~64x512/256", "~20/s:150x150/400", "~60/s:300x150/400", "~15/s:120x1000/100"),
)
SIMULATED = ("executor=simulated", "executor.clock=virtual", "engine.device=cuda", "attention=sdpa", "model.load=dummy")
WARM_UP = "4x128/64"
"""Load that is not counted, in which a drafter's acceptance is first measured."""


@dataclass(frozen=True, slots=True)
class Request:
    arrival: float
    """Seconds after the load begins."""
    prompt: int
    output: int


def read_load(text: str, seed: int = 1) -> list[Request]:
    """Raises ValueError with what a load is."""
    found = re.fullmatch(r"(~?)(?:(\d+(?:\.\d+)?)/s:)?(\d+)x(\d+)/(\d+)", text)
    if found is None or not all(int(number) for number in found.groups()[2:]):
        raise ValueError(f"{text!r} is no load: REQUESTSxPROMPT/OUTPUT, perhaps after ~ and RATE/s:")
    drawn, rate, (count, prompt, output) = found[1], found[2], map(int, found.groups()[2:])
    source, at, requests = random.Random(seed), 0.0, []

    def length(mean: int) -> int:
        return source.randint(max(1, mean // 2), mean + mean // 2) if drawn else mean

    for _ in range(count):
        at += source.expovariate(float(rate)) if rate else 0.0
        requests.append(Request(at, length(prompt), max(2, length(output))))
    return requests


def tokens_per_second(overrides: Sequence[str], load: str, runs: int = 1) -> float:
    engine = start_engine(compose([*overrides, *SIMULATED], app="generate"))
    try:
        _run(engine, read_load(WARM_UP), 0)
        requests = read_load(load)
        seconds = [_run(engine, requests, run) for run in range(1, runs + 1)][-1]
        if not seconds:
            raise ConfigError("steps take no time: set cost=, for instance cost=h200")
        return sum(request.output for request in requests) / seconds
    finally:
        engine.shutdown()


def _run(engine: Engine, requests: Sequence[Request], run: int) -> float:
    """Return the virtual seconds until the last request has ended. Prompts share no prefix, with those of another `run`
    neither."""
    clock = engine.executor.clock
    start, waiting = clock.now(), list(reversed(requests))
    while waiting or engine.has_work:
        while waiting and (start + waiting[-1].arrival <= clock.now() or not engine.has_work):
            clock.wait_until(max(clock.now(), start + waiting[-1].arrival))
            request = waiting.pop()
            prompt = [run + 1, *([len(waiting) % 1000 + 1] * request.prompt)][: request.prompt]
            engine.add(prompt, SamplingParams(max_tokens=request.output, ignore_eos=True))
        engine.step()
    return clock.now() - start


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", nargs="+", default=LOADS)
    parser.add_argument("--acceptance", nargs="+", type=float, default=[0.0, 0.6, 0.79], help="of each draft")
    parser.add_argument("--runs", type=int, default=1, help="of a load on one engine, of which the last one counts")
    parser.add_argument("overrides", nargs="+", help="overrides of the engine, after --")
    args = parser.parse_args(argv)
    try:
        for load in args.loads:
            read_load(load)
    except ValueError as error:
        parser.error(str(error))
    if args.runs < 1:
        parser.error(f"--runs is {args.runs}; at least one is needed")
    table = Table("load", "no drafts, tokens/s", *(f"at {acceptance:g}" for acceptance in args.acceptance))
    try:
        for load in args.loads:
            plain = tokens_per_second([one for one in args.overrides if "spec_decode" not in one], load, args.runs)
            with_drafts = [
                tokens_per_second([*args.overrides, f"executor.acceptance={acceptance}"], load, args.runs)
                for acceptance in args.acceptance
            ]
            table.add_row(load, f"{plain:.0f}", *(f"{each / plain:.3f}" for each in with_drafts))
    except DovetailError as error:
        print(f"draft_loads.py: {error}", file=sys.stderr)
        return 2
    console(120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
