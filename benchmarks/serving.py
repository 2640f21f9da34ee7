"""Processor time that serving costs per token: in the engine's process, the front-end and this client.

    python benchmarks/serving.py
    python benchmarks/serving.py --step-us 12000 -- engine.max_seqs=512
    python benchmarks/serving.py --rate 4 --requests 40
    python benchmarks/serving.py --processes 4 --step-us 12000 -- engine.max_seqs=512
    python benchmarks/serving.py --llm --requests 64 -- engine.max_seqs=64
    python benchmarks/serving.py --llm --requests 64 -- engine.dp=2

The server, the engine, its scheduler and its cache are the real ones. The device is simulated (executor=simulated) and
takes --step-us a step, by default no time. Prompts are token ids of the bundled model, so that outputs become text.
`offline` is the engine alone on the same requests. us/token is processor time; `ceiling` is the throughput that it
allows on a dedicated core. The front-end has one thread that makes text and one, its event loop, that answers; they
share the interpreter. A process that falls behind batches: `tokens/read` is the number of tokens in a read of the
client. With --rate requests arrive at random times; where the device takes no time, TTFT is what the server adds. With
--processes `front-end` is the sum of all of them, and its ceiling is that of the busiest; `supervisor` owns the engine.
--llm measures the Python API in place of a server: tokens/s of `LLM.generate` over all prompts (median of --rounds) and
the time to the first token of a request that comes to an idle `LLM`.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from dovetail import LLM, SamplingParams
from dovetail.core.compose import compose
from dovetail.core.interfaces import SLO, TimedRequest
from dovetail.plugins.app.bench.inprocess import EngineTarget
from dovetail.plugins.app.bench.metrics import Timeline, measure
from dovetail.plugins.app.bench.server import ServerTarget
from dovetail.plugins.app.bench.target import Target

ROOT = Path(__file__).parents[1]
VOCAB = 4096
PARTS = ("executor=simulated", "model=tiny", "engine.device=cpu", "engine.depth=2", "engine.token_budget=8192")
WARM_UP = 64


class Server:
    """`app=serve` in a separate process."""

    def __init__(self, overrides: Sequence[str], processes: int) -> None:
        words = [sys.executable, "run.py", "app=serve", "serve.port=0", "serve.max_waiting=100000", *overrides]
        words.append(f"serve.processes={processes}")
        self._process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        self.url = self._printed(r"listening on (http://\S+);")
        self._printed(r"(ready:)")
        tasks = Path(f"/proc/{self._process.pid}/task").iterdir()
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
        (self.engine,) = (pid for pid, command in commands.items() if b"engine_main" in command)
        fronts = [pid for pid, command in commands.items() if b"front_end_process" in command]
        self.fronts = fronts or [self._process.pid]
        self.supervisor = self._process.pid if fronts else None

    def _printed(self, pattern: str) -> str:
        """Wait for a line with this pattern and return its first group."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if found := re.search(pattern, line):
                return found[1]
        raise SystemExit(f"the server ended with status {self._process.wait()}")

    def busy(self) -> dict[str, list[float]]:
        """Processor seconds that each process has used so far."""
        fronts = [_threads(pid) for pid in self.fronts]
        found = {
            "engine": [sum(_threads(self.engine).values())],
            "front-end": [sum(threads.values()) for threads in fronts],
            "its event loop": [threads[pid] for threads, pid in zip(fronts, self.fronts, strict=True)],
        }
        return found | ({"supervisor": [sum(_threads(self.supervisor).values())]} if self.supervisor else {})

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def _threads(pid: int) -> dict[int, float]:
    """Processor seconds of each thread of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return {int(task.name): int((task / "schedstat").read_text().split()[0]) * 1e-9 for task in tasks}


@contextmanager
def serving(overrides: Sequence[str], processes: int) -> Iterator[Server]:
    server = Server(overrides, processes)
    try:
        yield server
    finally:
        server.close()


def load(args: argparse.Namespace, seed: int) -> list[TimedRequest]:
    rng, arrival, requests = random.Random(seed), 0.0, []
    for _ in range(args.requests):
        requests.append(TimedRequest(tuple(rng.choices(range(1, VOCAB), k=args.prompt)), args.output, arrival))
        arrival += rng.expovariate(args.rate) if args.rate else 0.0
    return requests


def run(target: Target, requests: Sequence[TimedRequest]) -> tuple[list[Timeline], dict[str, Any]]:
    timelines, _ = target.run(requests, lambda done: None)
    if failures := [line.failure for line in timelines if line.failure]:
        raise SystemExit(f"{len(failures)} of {len(requests)} requests failed: {failures[0]}")
    return timelines, measure(timelines, SLO())


def measure_llm(parts: Sequence[str], requests: Sequence[TimedRequest], rounds: int) -> None:
    prompts = [request.prompt_ids for request in requests]
    params = SamplingParams(max_tokens=requests[0].output_tokens, ignore_eos=True)
    rates, waits = [], []
    with LLM(overrides=parts) as llm:
        llm.generate(prompts, params)
        for _ in range(rounds):
            began = time.perf_counter()
            done = llm.generate(prompts, params)
            rates.append(sum(len(one.token_ids) for one in done) / (time.perf_counter() - began))
        for prompt in prompts:
            time.sleep(0.02)  # The engine becomes idle.
            began = time.perf_counter()
            stream = llm.stream(prompt, SamplingParams(max_tokens=2, ignore_eos=True))
            next(stream)
            waits.append((time.perf_counter() - began) * 1e3)
            stream.close()
    print(f"{len(prompts)} prompts by LLM: {' '.join(parts)}")
    print(f"{'generate':>15} {median(rates):9.0f} output tokens/s, {min(rates):.0f} to {max(rates):.0f} in {rounds}")
    print(f"{'idle':>15} {median(waits):9.2f} ms to the first token, {min(waits):.2f} to {max(waits):.2f}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=256, help="tokens of an output")
    parser.add_argument("--rate", type=float, help="requests/s; by default all arrive at once")
    parser.add_argument("--step-us", type=float, default=0.0, help="time of a step on the simulated device, us")
    parser.add_argument("--processes", type=int, default=1, help="processes that answer HTTP (serve.processes)")
    parser.add_argument("--llm", action="store_true", help="measure the Python API in place of a server")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of LLM.generate")
    parser.add_argument("overrides", nargs="*", help="of engine and server, after --")
    args = parser.parse_args(argv)
    pace = ["cost=h200", f"cost.step_us={args.step_us}", "cost.kernel_us=0"] if args.step_us else []
    parts = [*PARTS, *pace, *args.overrides]
    warm_up, requests = load(args, 0)[:WARM_UP], load(args, 1)
    if args.llm:
        measure_llm(parts, requests, args.rounds)
        return

    offline = EngineTarget(compose(["app=bench", *parts]))
    offline.start(lambda phase, share: None)
    run(offline, warm_up)
    began = time.process_time()
    _, alone = run(offline, requests)
    spent = {"offline": [time.process_time() - began]}
    offline.close()

    with serving(parts, args.processes) as server:
        client = ServerTarget(*_as_client(server, parts))
        client.start(lambda phase, share: None)
        run(client, warm_up)
        before, began = server.busy(), time.process_time()
        timelines, figures = run(client, requests)
        for name, now in server.busy().items():
            spent[name] = [after - earlier for after, earlier in zip(now, before[name], strict=True)]
        spent["client"] = [time.process_time() - began]

    tokens = figures["output_tokens"]
    reads = sum(len(line.times) for line in timelines)
    print(
        f"{len(requests)} x {args.prompt}/{args.output}: {' '.join([*pace, *args.overrides]) or 'a step takes no time'}"
        f"{f', {args.processes} processes' if args.processes > 1 else ''}"
    )
    for name, found in (("offline", alone), ("server", figures)):
        ttft = found["ttft_ms"]
        print(f"{name:>15} {found['output_tokens_per_s']:9.0f} output tokens/s", end="")
        print(f"   TTFT ms median {ttft['median']:.2f}, p99 {ttft['p99']:.2f}")
    for name, seconds in spent.items():
        print(f"{name:>15} {sum(seconds) / tokens * 1e6:9.2f} us/token {tokens / max(seconds):9.0f} ceiling, tokens/s")
    print(f"{'tokens/read':>15} {tokens / reads:9.2f}")


def _as_client(server: Server, parts: Sequence[str]) -> tuple[Any, Any]:
    composition = compose(["app=bench", f"bench.url={server.url}/v1", *parts])
    return composition, composition.app_part.config


if __name__ == "__main__":
    main()
