"""Engines beside each other, for compare.py: workloads whose requests are all there at once.

Each engine is a process of its own (peers/protocol.py), which is given files of token ids.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dovetail import Composition, ConfigError, DovetailError, compose
from dovetail.core.host import detect_host
from dovetail.core.interfaces import ModelSpec, TimedRequest, WorkloadContext
from dovetail.plugins.app.bench.metrics import per_token_of_run
from dovetail.plugins.app.plan.memory import CONTEXT_BYTES, make_plan

WARMUP_REQUESTS, WARMUP_TOKENS = 64, 4
FIGURES = {
    "tpot_ms": ("TPOT, ms", False),
    "one_token_s": ("first token of all, s", False),
    "output_tokens_per_s": ("output tokens/s", True),
}
"""Figure -> what it is called, and whether more is better."""


# Requests.


@dataclass(frozen=True)
class Job:
    """One file of requests."""

    workload: str
    purpose: str
    """warm-up, one token or whole."""
    round: int
    path: Path


def make_jobs(
    workloads: dict[str, list[str]], rounds: int, folder: Path, whole_only: Sequence[str] = ()
) -> dict[str, list[Job]]:
    """Every run of each workload has prompts of its own, so that nobody finds them in a prefix cache. `whole_only`:
    workloads without the run of one token."""
    if unknown := set(whole_only) - set(workloads):
        raise ConfigError(f"--whole-only {','.join(sorted(unknown))}: none of {','.join(workloads) or 'nothing'}")
    return {
        name: list(_jobs(compose(overrides, app="bench"), name, rounds, folder, name not in whole_only))
        for name, overrides in workloads.items()
    }


def _jobs(composition: Composition, name: str, rounds: int, folder: Path, one_token: bool) -> Iterator[Job]:
    workload = composition.build("workload")
    model = composition.part("model")
    spec: ModelSpec = model.facts() or model.target().spec(model.config)
    max_len = min(composition.engine.max_len or spec.max_len, spec.max_len)
    # Of the workload's own: two that differ in their number of requests alone would share the first ones.
    seeds = itertools.count(zlib.crc32(name.encode()))

    def requests() -> Sequence[TimedRequest]:
        ctx = WorkloadContext(spec.vocab, max_len, next(seeds), workload.rates()[0])
        found = workload.requests(ctx)
        lengths = {request.output_tokens for request in found}
        if any(request.arrival for request in found) or len(lengths) > 1 or lengths == {1}:
            raise ConfigError(
                f"workload={name}: without rates only requests that all arrive at once, with equal outputs of more "
                "than one token, are compared here; for others run app=bench bench.url=... on both servers"
            )
        return found

    warm = [replace(request, output_tokens=WARMUP_TOKENS) for request in requests()[:WARMUP_REQUESTS]]
    yield write(folder, Job(name, "warm-up", 0, folder), warm)
    for number in range(rounds):
        if one_token:
            one = [replace(request, output_tokens=1) for request in requests()]
            yield write(folder, Job(name, "one token", number, folder), one)
        yield write(folder, Job(name, "whole", number, folder), requests())


def write(folder: Path, job: Job, requests: Sequence[TimedRequest]) -> Job:
    path = folder / f"{job.workload}-{job.purpose.replace(' ', '_')}-{job.round}.jsonl"
    lines = ({"prompt_ids": r.prompt_ids, "output_tokens": r.output_tokens} for r in requests)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return replace(job, path=path)


def both_fit(composition: Composition, jobs: dict[str, list[Job]]) -> bool:
    """Whether half of the memory holds weights, activations and the KV cache of the largest workload. A CPU's does;
    without a cost model nobody can tell, and the answer is no."""
    if detect_host(composition.engine.device).device == "cpu":
        return True
    try:
        plan = make_plan(composition)
    except ConfigError:
        return False
    tokens = 0
    for runs in jobs.values():
        lines = [json.loads(line) for line in runs[-1].path.read_text(encoding="utf-8").splitlines()]
        lengths = sorted(len(line["prompt_ids"]) + line["output_tokens"] for line in lines)
        tokens = max(tokens, sum(lengths[-composition.engine.max_seqs :]))
    need = plan.weights + plan.activations + CONTEXT_BYTES + plan.cost.kv_bytes(tokens)
    return need <= plan.budget / 2


# Engines.


class PeerError(DovetailError):
    """An engine did not start, or ended in the middle."""


class Engine:
    """One engine in a process of its own."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name, self._process = name, process
        self.about: dict[str, Any] = self._answer()["ready"]

    def run(self, job: Job) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"requests": str(job.path)}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # The answer, which does not come, says more.
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"{self.name} ended with exit code {self._process.wait()}; what it printed is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass(frozen=True)
class Launch:
    """How an engine's process is started."""

    name: str
    command: Sequence[str]
    env: dict[str, str]
    """Over our own environment."""


@contextmanager
def running(launch: Launch) -> Iterator[Engine]:
    process = subprocess.Popen(
        launch.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | launch.env
    )
    try:
        yield Engine(launch.name, process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


Measured = dict[str, dict[str, list[tuple[Job, dict[str, Any]]]]]
"""Engine -> workload -> every counted run."""


def measure(
    ours: Launch,
    peer: Launch,
    jobs: dict[str, list[Job]],
    interleave: bool,
    after_each: Callable[[Measured, dict[str, dict[str, Any]]], None],
) -> None:
    """`after_each` is told after every counted run what there is so far, and what the engines say of themselves."""
    groups = [[ours, peer]] if interleave else [[ours], [peer]]
    found: Measured = {engine.name: {workload: [] for workload in jobs} for engine in (ours, peer)}
    about: dict[str, dict[str, Any]] = {}
    for group in groups:
        with ExitStack() as stack:
            engines = [stack.enter_context(running(engine)) for engine in group]
            about.update({engine.name: engine.about for engine in engines})
            for workload, runs in jobs.items():
                for job in runs:
                    for engine in engines:
                        told = engine.run(job)
                        what = f"{engine.name:12} {workload}, {job.purpose}, round {job.round + 1}"
                        say(f"{what}: {told['seconds']:.3f} s")
                        if job.purpose != "warm-up":
                            found[engine.name][workload].append((job, told))
                            after_each(found, about)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# Figures.


def figures(runs: Sequence[tuple[Job, dict[str, Any]]], requests: int, output_tokens: int) -> dict[str, float]:
    """Of one engine and workload: medians over the rounds, then what follows from them."""
    seconds: dict[str, list[float]] = {}
    for job, told in runs:
        seconds.setdefault(job.purpose, []).append(told["seconds"])
    whole = statistics.median(seconds["whole"])
    found = {"seconds": round(whole, 4), "output_tokens_per_s": round(requests * output_tokens / whole, 1)}
    if "one token" in seconds:
        one = statistics.median(seconds["one token"])
        found |= {"tpot_ms": round(per_token_of_run(whole, one, output_tokens), 4), "one_token_s": round(one, 4)}
    return found


def compared(measured: Measured, jobs: dict[str, list[Job]], ours: str, peer: str) -> list[dict[str, Any]]:
    """Of workloads that both engines have had all runs of."""
    rows = []
    for workload, runs in jobs.items():
        counted = sum(job.purpose != "warm-up" for job in runs)
        if any(len(measured[name][workload]) < counted for name in (ours, peer)):
            continue
        lines = runs[-1].path.read_text(encoding="utf-8").splitlines()
        requests, output = len(lines), json.loads(lines[0])["output_tokens"]
        prompt = len(json.loads(lines[0])["prompt_ids"])
        mine, theirs = (figures(measured[name][workload], requests, output) for name in (ours, peer))
        ratios = {name: round(mine[name] / theirs[name], 4) for name in FIGURES if theirs.get(name)}
        rows.append(
            {
                "workload": workload,
                "requests": requests,
                "prompt_tokens": prompt,
                "output_tokens": output,
                ours: mine,
                peer: theirs,
                "ratio": ratios,
            }
        )
    return rows


def markdown(rows: Sequence[dict[str, Any]], ours: str, peer: str) -> str:
    named = {
        f"{row['workload']}, {row['requests']} x {row['prompt_tokens']}/{row['output_tokens']}": row for row in rows
    }
    return ratio_table("workload", FIGURES, named, ours, peer)


def ratio_table(
    title: str, figures: dict[str, tuple[str, bool]], rows: dict[str, dict[str, Any]], ours: str, peer: str
) -> str:
    """Ratios are ours over the peer's: below 1 is faster where the figure is a time."""
    head = [title, *(f"{text}: {ours} / {peer} (ratio)" for text, _ in figures.values())]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name, row in rows.items():
        cells = [
            f"{_short(row[ours][figure])} / {_short(row[peer][figure])} ({row['ratio'][figure]:.2f})"
            if figure in row["ratio"]
            else "-"
            for figure in figures
        ]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


def _short(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def raw(measured: Measured) -> dict[str, list[dict[str, Any]]]:
    """Every counted run."""
    return {
        engine: [
            {"workload": job.workload, "purpose": job.purpose, "round": job.round, **told}
            for runs in by_workload.values()
            for job, told in runs
        ]
        for engine, by_workload in measured.items()
    }
