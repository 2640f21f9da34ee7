"""Workloads whose requests all arrive at once, on Dovetail and a peer, for compare.py.

Each engine is a separate process (protocol.py) that reads files of requests (jobs.py), or a result file of an earlier
run.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.jobs import Job

from dovetail import Composition, ConfigError, DovetailError
from dovetail.core.host import detect_host
from dovetail.plugins.app.bench.metrics import per_token_of_run
from dovetail.plugins.app.plan.memory import CONTEXT_BYTES, Plan, make_plan

FIGURES = {
    "tpot_ms": "TPOT, ms",
    "one_token_s": "first token of all, s",
    "output_tokens_per_s": "output tokens/s",
}
"""Key of a figure -> its heading in a table."""
LEAST_TOKENS = 3
"""With fewer output tokens a request has no TPOT: the difference of the two runs is within their noise."""


@dataclass(frozen=True, slots=True)
class Share:
    """Memory of a GPU that one engine needs for its jobs."""

    bytes: float
    """Weights, activations, CUDA context and KV cache."""
    kv_bytes: float
    tokens: int
    """Tokens in the KV cache."""
    plan: Plan

    @property
    def fraction(self) -> float:
        """Share of the GPU's memory."""
        return round(min(self.plan.engine.memory_fraction, (self.bytes + MORE_BYTES) / self.plan.device_bytes), 3)

    @property
    def pages(self) -> int:
        """The last page of each sequence may be nearly empty."""
        return -(-self.tokens // self.plan.engine.page_size) + self.plan.engine.max_seqs


MORE_BYTES = 5e9
"""Memory that peers take besides: workspaces, CUDA graphs and steps of more tokens than ours."""


def share_of(composition: Composition, jobs: dict[str, list[Job]]) -> Share:
    """Return what the largest of the jobs needs, or all that the GPU has. Raises ConfigError without a cost model."""
    plan, tokens = make_plan(composition), 0
    for runs in jobs.values():
        lengths = sorted(len(request.prompt_ids) + request.output_tokens for request in runs[-1].requests)
        tokens = max(tokens, sum(lengths[-composition.engine.max_seqs :]))
    # Requests for which there is no room wait, and those with a common prefix take less.
    room = (plan.budget - plan.weights - plan.activations - CONTEXT_BYTES - MORE_BYTES) / plan.cost.kv_bytes(1)
    tokens = min(tokens, int(room) - plan.engine.max_seqs * plan.engine.page_size)
    kv = plan.cost.kv_bytes(tokens)
    return Share(plan.weights + plan.activations + CONTEXT_BYTES + kv, kv, tokens, plan)


def both_fit(composition: Composition, jobs: dict[str, list[Job]]) -> bool:
    """Whether half of the memory holds weights, activations and the KV cache of the largest workload. Always so on a
    CPU, never without a cost model."""
    if detect_host(composition.engine.device).device == "cpu":
        return True
    try:
        share = share_of(composition, jobs)
    except ConfigError:
        return False
    return share.bytes <= share.plan.budget / 2


# Engines.


class PeerError(DovetailError):
    """An engine did not start, or ended before its last answer."""


@contextmanager
def gpu_of_many(lock: Path | None, *, alone: bool) -> Iterator[None]:
    """Share a GPU with other comparisons that name the same file: their engines may start together, and `alone` waits
    until none of them starts or runs requests."""
    if lock is None:
        yield
        return
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


class Engine:
    """An engine in a separate process, which runs while the context is open."""

    about: dict[str, Any] | None = None
    """Description that the engine reports once it is loaded."""

    def __init__(self, name: str, command: Sequence[str], env: dict[str, str], lock: Path | None = None) -> None:
        """`env`: added to our own environment. `lock`: of comparisons that share the GPU."""
        self.name, self._command, self._env, self._lock = name, command, os.environ | env, lock

    def __enter__(self) -> Engine:
        with gpu_of_many(self._lock, alone=False):
            return self._start()

    def _start(self) -> Engine:
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
        with gpu_of_many(self._lock, alone=True):
            return self._run(job)

    def _run(self, job: Job) -> dict[str, Any]:
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


class Recorded:
    """The runs of an engine in the result file of an earlier run, in place of the engine."""

    def __init__(self, name: str, path: Path, about: dict[str, Any], runs: Sequence[dict[str, Any]]) -> None:
        self.name, self.about, self._path = name, about, path
        self._runs = {(run["workload"], run["purpose"], run["requests_hash"]): run for run in runs}

    def __enter__(self) -> Recorded:
        return self

    def __exit__(self, *_: object) -> None: ...

    def run(self, job: Job) -> dict[str, Any]:
        """Return the recorded run of the same requests. Raises ConfigError if there is none."""
        if job.purpose == "warm-up":
            return {"seconds": 0.0}
        found = self._runs.get((job.workload, job.purpose, job.requests_hash))
        if found is None:
            raise ConfigError(
                f"--reuse {self._path}: has no run of {job.workload}, {job.purpose}, round {job.round + 1} with the "
                f"same requests; it has {', '.join(dict.fromkeys(workload for workload, *_ in self._runs))}"
            )
        return found


def read_recorded(path: Path, settings: dict[str, Any], jobs: dict[str, list[Job]]) -> dict[str, Recorded]:
    """Return the engines in a result file by name. Raises ConfigError if they ran with other `settings`, or lack a
    job."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--reuse {path}: cannot be read ({error})") from None
    if not isinstance(found, dict) or not found.get("runs") or "settings" not in found:
        raise ConfigError(f"--reuse {path}: has no runs of engines; compare.py writes such a file with --out")
    for name, wanted in settings.items():
        if (had := found["settings"].get(name)) != wanted:
            raise ConfigError(f"--reuse {path}: was measured with {name}={had}, this run has {name}={wanted}")
    recorded = {name: Recorded(name, path, found["engines"][name], runs) for name, runs in found["runs"].items()}
    for engine, job in itertools.product(recorded.values(), itertools.chain(*jobs.values())):
        engine.run(job)
    return recorded


Measured = dict[str, dict[str, list[tuple[Job, dict[str, Any]]]]]
"""Engine -> workload -> every counted run."""


def measure(groups: Sequence[Sequence[Engine | Recorded]], jobs: dict[str, list[Job]]) -> Iterator[Measured]:
    """Run every job on all engines; those of one group take turns. Yields all results so far after each counted run."""
    found: Measured = {engine.name: {workload: [] for workload in jobs} for group in groups for engine in group}
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


def figures(runs: Sequence[tuple[Job, dict[str, Any]]]) -> dict[str, float]:
    """Figures of one engine and workload: medians over the rounds."""

    def median(figure: str, purpose: str) -> float:
        return statistics.median(result[figure] for job, result in runs if job.purpose == purpose)

    whole = median("seconds", "whole")
    rates = [result["output_tokens"] / result["seconds"] for job, result in runs if job.purpose == "whole"]
    found = {"seconds": round(whole, 4), "output_tokens_per_s": round(statistics.median(rates), 1)}
    if any(job.purpose == "one token" for job, _ in runs):
        one, output = median("seconds", "one token"), runs[-1][0].sizes["output_tokens"]
        found["one_token_s"] = round(one, 4)
        if output >= LEAST_TOKENS:
            found["tpot_ms"] = round(per_token_of_run(whole, one, output), 4)
    return found


def compared(measured: Measured, jobs: dict[str, list[Job]]) -> list[dict[str, Any]]:
    """One row for each workload of which all engines have finished all runs, with ratios if there are two: the first
    over the second."""
    rows = []
    for workload, runs in jobs.items():
        counted = sum(job.purpose != "warm-up" for job in runs)
        if any(len(found[workload]) < counted for found in measured.values()):
            continue
        by_engine = {name: figures(found[workload]) for name, found in measured.items()}
        row = {"workload": workload, **runs[-1].sizes, **by_engine}
        if len(by_engine) == 2:
            ours, peer = by_engine.values()
            row["ratio"] = {name: round(ours[name] / peer[name], 4) for name in FIGURES if peer.get(name)}
        rows.append(row)
    return rows


def raw(measured: Measured) -> dict[str, list[dict[str, Any]]]:
    """Every counted run of each engine, for the result file."""
    return {
        engine: [
            result
            | {"workload": job.workload, "purpose": job.purpose, "round": job.round}
            | {"requests_hash": job.requests_hash}
            for runs in by_workload.values()
            for job, result in runs
        ]
        for engine, by_workload in measured.items()
    }


def markdown(rows: Sequence[dict[str, Any]], engines: Sequence[str]) -> str:
    return ratio_table("workload", FIGURES, {label(row): row for row in rows}, engines)


def label(row: dict[str, Any]) -> str:
    """Name and sizes of a row's workload; the name alone where it is the sizes."""
    sizes = f"{row['requests']} x {row['prompt_tokens']}/{row['output_tokens']}"
    name: str = row["workload"]
    plain = name.startswith(sizes.replace(" ", ""))
    return name.replace("x", " x ", 1).replace("-", ", ") if plain else f"{name}, {sizes}"


def ratio_table(title: str, figures: dict[str, str], rows: dict[str, dict[str, Any]], engines: Sequence[str]) -> str:
    """Markdown table. Ratios are those of the first engine over the second: below 1 is faster where the figure is a
    time."""
    head = [title, *(f"{text}: {' / '.join(engines)}{' (ratio)' * (len(engines) == 2)}" for text in figures.values())]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name, row in rows.items():
        cells = [
            " / ".join(_short(row[engine][figure]) for engine in engines) + _ratio(row, figure)
            if all(figure in row[engine] for engine in engines)
            else "-"
            for figure in figures
        ]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


def _ratio(row: dict[str, Any], figure: str) -> str:
    return f" ({row['ratio'][figure]:.2f})" if figure in row.get("ratio", {}) else ""


def _short(value: float) -> str:
    """Three digits, or all digits before the point."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
