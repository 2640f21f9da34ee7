"""Workloads whose requests all arrive at once, on Dovetail and a peer, for compare.py.

Each engine is a separate process (protocol.py) that reads files of token ids.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail import Composition, ConfigError, DovetailError, compose
from dovetail.core.host import detect_host
from dovetail.core.interfaces import ModelSpec, WorkloadContext
from dovetail.plugins.app.bench.metrics import per_token_of_run
from dovetail.plugins.app.plan.memory import CONTEXT_BYTES, make_plan

WARMUP_REQUESTS, WARMUP_TOKENS = 64, 4
FIGURES = {
    "tpot_ms": "TPOT, ms",
    "one_token_s": "first token of all, s",
    "output_tokens_per_s": "output tokens/s",
}
"""Key of a figure -> its heading in a table."""


# Requests.


@dataclass(frozen=True)
class Job:
    """One run: a file of requests."""

    workload: str
    purpose: str
    """warm-up, one token or whole."""
    round: int
    path: Path


def make_jobs(
    workloads: dict[str, list[str]], rounds: int, folder: Path, whole_only: Sequence[str] = ()
) -> dict[str, list[Job]]:
    """Write the requests of every run of each workload (name -> overrides). Each run has its own prompts, so that none
    is found in a prefix cache. `whole_only`: workloads without the run of one token."""
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
    # Seeds differ between workloads: two that differ only in their number of requests would share the first ones.
    seeds = itertools.count(zlib.crc32(name.encode()))

    def write(purpose: str, number: int, tokens: int | None = None, most: int | None = None) -> Job:
        requests = workload.requests(WorkloadContext(spec.vocab, max_len, next(seeds), workload.rates()[0]))
        lengths = {request.output_tokens for request in requests}
        if any(request.arrival for request in requests) or len(lengths) > 1 or lengths == {1}:
            raise ConfigError(
                f"workload={name}: without rates only requests that all arrive at once, with equal outputs of more "
                "than one token, are compared here; for others run app=bench bench.url=... on both servers"
            )
        path = folder / f"{name}-{purpose.replace(' ', '_')}-{number}.jsonl"
        lines = [{"prompt_ids": r.prompt_ids, "output_tokens": tokens or r.output_tokens} for r in requests[:most]]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return Job(name, purpose, number, path)

    yield write("warm-up", 0, WARMUP_TOKENS, WARMUP_REQUESTS)
    for number in range(rounds):
        if one_token:
            yield write("one token", number, 1)
        yield write("whole", number)


def both_fit(composition: Composition, jobs: dict[str, list[Job]]) -> bool:
    """Whether half of the memory holds weights, activations and the KV cache of the largest workload. Always so on a
    CPU, never without a cost model."""
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
    """An engine did not start, or ended before its last answer."""


class Engine:
    """An engine in a separate process, which runs while the context is open."""

    about: dict[str, Any] | None = None
    """Description that the engine reports once it is loaded."""

    def __init__(self, name: str, command: Sequence[str], env: dict[str, str]) -> None:
        """`env`: added to our own environment."""
        self.name, self._command, self._env = name, command, os.environ | env

    def __enter__(self) -> Engine:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self._env
        )
        try:
            self.about = self._answer()["ready"]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # an order that the engine did not take
            self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def run(self, job: Job) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"requests": str(job.path)}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the missing answer gives the better error
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"{self.name} ended with exit code {self._process.wait()}; its output is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


Measured = dict[str, dict[str, list[tuple[Job, dict[str, Any]]]]]
"""Engine -> workload -> every counted run."""


def measure(ours: Engine, peer: Engine, jobs: dict[str, list[Job]], interleaved: bool) -> Iterator[Measured]:
    """Run every job on both engines. Yields all results so far after each counted run."""
    groups = [[ours, peer]] if interleaved else [[ours], [peer]]
    found: Measured = {engine.name: {workload: [] for workload in jobs} for engine in (ours, peer)}
    for group in groups:
        with ExitStack() as stack:
            engines = [stack.enter_context(engine) for engine in group]
            for job, engine in itertools.product(itertools.chain(*jobs.values()), engines):
                result = engine.run(job)
                seconds = f"{result['seconds']:.3f} s"
                log(f"{engine.name:12} {job.workload}, {job.purpose}, round {job.round + 1}: {seconds}")
                if job.purpose != "warm-up":
                    found[engine.name][job.workload].append((job, result))
                    yield found


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# Figures.


def figures(runs: Sequence[tuple[Job, dict[str, Any]]], requests: int, output_tokens: int) -> dict[str, float]:
    """Figures of one engine and workload, from medians over the rounds."""
    seconds: dict[str, list[float]] = {}
    for job, result in runs:
        seconds.setdefault(job.purpose, []).append(result["seconds"])
    whole = statistics.median(seconds["whole"])
    found = {"seconds": round(whole, 4), "output_tokens_per_s": round(requests * output_tokens / whole, 1)}
    if "one token" in seconds:
        one = statistics.median(seconds["one token"])
        found |= {"tpot_ms": round(per_token_of_run(whole, one, output_tokens), 4), "one_token_s": round(one, 4)}
    return found


def compared(measured: Measured, jobs: dict[str, list[Job]], ours: str, peer: str) -> list[dict[str, Any]]:
    """One row for each workload of which both engines have finished all runs."""
    rows = []
    for workload, runs in jobs.items():
        counted = sum(job.purpose != "warm-up" for job in runs)
        if any(len(measured[name][workload]) < counted for name in (ours, peer)):
            continue
        first, *rest = runs[-1].path.read_text(encoding="utf-8").splitlines()
        requests, output = 1 + len(rest), json.loads(first)["output_tokens"]
        mine, theirs = (figures(measured[name][workload], requests, output) for name in (ours, peer))
        sizes = {"requests": requests, "prompt_tokens": len(json.loads(first)["prompt_ids"]), "output_tokens": output}
        ratios = {name: round(mine[name] / theirs[name], 4) for name in FIGURES if theirs.get(name)}
        rows.append({"workload": workload, **sizes, ours: mine, peer: theirs, "ratio": ratios})
    return rows


def raw(measured: Measured) -> dict[str, list[dict[str, Any]]]:
    """Every counted run of each engine, for the result file."""
    return {
        engine: [
            {"workload": job.workload, "purpose": job.purpose, "round": job.round, **result}
            for runs in by_workload.values()
            for job, result in runs
        ]
        for engine, by_workload in measured.items()
    }


def markdown(rows: Sequence[dict[str, Any]], ours: str, peer: str) -> str:
    named = {
        f"{row['workload']}, {row['requests']} x {row['prompt_tokens']}/{row['output_tokens']}": row for row in rows
    }
    return ratio_table("workload", FIGURES, named, ours, peer)


def ratio_table(title: str, figures: dict[str, str], rows: dict[str, dict[str, Any]], ours: str, peer: str) -> str:
    """Markdown table. Ratios are ours over the peer's: below 1 is faster where the figure is a time."""
    head = [title, *(f"{text}: {ours} / {peer} (ratio)" for text in figures.values())]
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
    """Three digits, or all digits before the point."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
