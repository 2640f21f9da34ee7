"""Dovetail beside another engine: the same prompts, the same machine, the same run.

    python benchmarks/compare.py vllm --python /venvs/vllm/bin/python --env HF_HUB_OFFLINE=1 \
        --workloads latency,batch64 --rounds 3 --out benchmarks/results/NAME.json -- +preset=h200_bf16_tp1
    python benchmarks/compare.py transformers --workloads fixed -- engine.device=cpu

What follows `--` are overrides of Dovetail. Model, lengths, batch size, memory and parallelism of the peer follow from
them; `--args` sets more (JSON, such as '{"quantization": "fp8"}'). Each engine is a process of its own. Where the cost
model says that both fit, they are loaded at once, each with half of the memory, and take turns, so that what changes on
the machine hits both; otherwise one runs after the other. `--order` says it outright.

TPOT = (time of the run - time of a run with one output token) / (output tokens of a request - 1); medians over rounds.
`--whole-only` leaves the run with one token out where only tokens/s count: with more requests than slots, for instance.

A workload with rates, such as online, goes to the servers of both (served.py), one after the other. `--set` gives an
option to one workload: `--set online:workload.seconds=20`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import served

from dovetail import Composition, ConfigError, DovetailError, compose
from dovetail.core.engine.host import detect_host
from dovetail.core.interfaces import ModelSpec, TimedRequest, WorkloadContext
from dovetail.plugins.app.bench.metrics import per_token_of_run
from dovetail.plugins.app.bench.record import describe
from dovetail.plugins.app.plan.memory import CONTEXT_BYTES, make_plan

PEERS = Path(__file__).parent / "peers"
WARMUP_REQUESTS, WARMUP_TOKENS = 64, 4
FIGURES = {
    "tpot_ms": ("TPOT, ms", False),
    "one_token_s": ("first token of all, s", False),
    "output_tokens_per_s": ("output tokens/s", True),
}
"""Figure -> what it is called, and whether more is better."""


@dataclass(frozen=True)
class Shared:
    """What a peer must do as Dovetail does."""

    model: str
    """Folder with config.json."""
    dummy: bool
    """Random weights."""
    dtype: str
    tp: int
    max_len: int
    max_seqs: int
    token_budget: int
    memory_fraction: float
    prefix_caching: bool
    device: str


def shared_settings(composition: Composition, folder: Path) -> Shared:
    """Of our composition; a model of shapes alone gets a config.json in `folder`."""
    engine, model = composition.engine, composition.part("model")
    if engine.dp > 1:
        raise ConfigError(f"engine.dp={engine.dp}: the peers here run one replica; benchmarks/layouts.py compares ours")
    spec: ModelSpec = model.facts() or model.target().spec(model.config)
    source = model.target().source(model.config)
    if source.folder is None:
        (folder / "config.json").write_text(json.dumps(hf_config(spec.hf)), encoding="utf-8")
    return Shared(
        model=str(source.folder or folder),
        dummy=source.dummy or source.folder is None,
        dtype=spec.dtype if engine.dtype == "auto" else engine.dtype,
        tp=engine.tp,
        max_len=min(engine.max_len or spec.max_len, spec.max_len),
        max_seqs=engine.max_seqs,
        token_budget=engine.token_budget,
        memory_fraction=engine.memory_fraction,
        prefix_caching=composition.part("kv_cache").name != "paged",
        device=engine.device,
    )


def hf_config(shapes: dict[str, Any]) -> dict[str, Any]:
    """A config.json that others can read: they go by model_type, and older ones by former names of options."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    (architecture,) = shapes["architectures"]
    wanted = architecture.removesuffix("ForCausalLM") + "Config"
    types = [kind for kind, name in CONFIG_MAPPING_NAMES.items() if name == wanted]
    if not types and "model_type" not in shapes:
        raise ConfigError(f"transformers knows no model_type of {architecture}; add it to model.hf")
    found = {"model_type": types[0] if types else None, **shapes}
    found.setdefault("torch_dtype", shapes.get("dtype", "bfloat16"))
    if theta := shapes.get("rope_parameters", {}).get("rope_theta"):
        found.setdefault("rope_theta", theta)
    return found


# Workloads.


@dataclass(frozen=True)
class Job:
    """One file of requests."""

    workload: str
    purpose: str
    """warm-up, one token or whole."""
    round: int
    path: Path


def chosen(overrides: Sequence[str], names: Sequence[str], options: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """Workload -> overrides, with those that `options` have for it alone."""
    if unknown := {name for name, _ in options} - set(names):
        raise ConfigError(f"--set {','.join(sorted(unknown))}: not among --workloads {','.join(names)}")
    return {name: [*overrides, f"workload={name}", *(text for of, text in options if of == name)] for name in names}


def has_rates(overrides: Sequence[str]) -> bool:
    """Whether requests arrive over time: those a server gets."""
    workload = compose(overrides, app="bench").build("workload")
    return any(rate is not None for rate in workload.rates())


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
    python: str
    settings: dict[str, Any]
    env: dict[str, str]
    """Over our own environment."""


@contextmanager
def running(launch: Launch) -> Iterator[Engine]:
    script = str(PEERS / f"{launch.name}_peer.py")
    process = subprocess.Popen(
        [launch.python, script, json.dumps(launch.settings)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | launch.env,
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
    ours: Launch, peer: Launch, jobs: dict[str, list[Job]], interleave: bool
) -> tuple[Measured, dict[str, dict[str, Any]]]:
    groups = [[ours, peer]] if interleave else [[ours], [peer]]
    found: Measured = {engine.name: {workload: [] for workload in jobs} for engine in (ours, peer)}
    about = {}
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
    return found, about


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
    rows = []
    for workload, runs in jobs.items():
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
    """Ratios are ours over the peer's: below 1 is faster where the figure is a time."""
    head = ["workload", *(f"{title}: {ours} / {peer} (ratio)" for title, _ in FIGURES.values())]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        size = f"{row['workload']}, {row['requests']} x {row['prompt_tokens']}/{row['output_tokens']}"
        cells = [
            f"{row[ours][name]:g} / {row[peer][name]:g} ({row['ratio'].get(name, float('nan')):.2f})"
            if name in row[ours]
            else "-"
            for name in FIGURES
        ]
        lines.append(f"| {' | '.join([size, *cells])} |")
    return "\n".join(lines)


def name_and_value(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def workload_option(text: str) -> tuple[str, str]:
    name, colon, option = text.partition(":")
    if not name or not colon or "=" not in option:
        raise argparse.ArgumentTypeError(f"{text!r} is not WORKLOAD:OPTION=VALUE")
    return name, option


def arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "peer",
        choices=sorted(p.stem.removesuffix("_peer") for p in PEERS.glob("*_peer.py") if "dovetail" not in p.stem),
    )
    parser.add_argument("--python", default=sys.executable, help="the peer's Python interpreter")
    parser.add_argument(
        "--env",
        type=name_and_value,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="of the peer's environment, such as PYTHONPATH=/vllm/site-packages; may be repeated",
    )
    parser.add_argument("--workloads", default="latency,batch64,batch256", help="names, with commas between them")
    parser.add_argument("--whole-only", default="", help="of these, those whose run of one token is left out")
    parser.add_argument(
        "--set",
        type=workload_option,
        action="append",
        default=[],
        metavar="WORKLOAD:OPTION=VALUE",
        help="an option for one of the workloads, such as online:workload.seconds=20; may be repeated",
    )
    parser.add_argument("--rounds", type=int, default=2, help="repeats of each run")
    parser.add_argument("--order", choices=("auto", "interleaved", "sequential"), default="auto")
    parser.add_argument("--args", type=json.loads, default={}, help="more options of the peer's engine, a JSON object")
    parser.add_argument("--out", type=Path, help="write all figures to this JSON file")
    return parser.parse_args(argv[:cut]), list(argv[cut + 1 :])


def main(argv: Sequence[str]) -> int:
    args, overrides = arguments(argv)
    composition = compose(overrides, app="bench")
    workloads = chosen(overrides, args.workloads.split(","), args.set)
    over_time = {name: words for name, words in workloads.items() if has_rates(words)}
    at_once = {name: words for name, words in workloads.items() if name not in over_time}
    script = PEERS / f"{args.peer}_server.py"
    if over_time and not script.exists():
        raise ConfigError(
            f"--workloads {','.join(over_time)}: requests arrive over time, and {script.name} is not there"
        )
    result: dict[str, Any] = describe(composition) | {"schema": "dovetail.compare/2", "engines": {}, "comparisons": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shared = shared_settings(composition, folder)
        jobs = make_jobs(at_once, args.rounds, folder, list(filter(None, args.whole_only.split(","))))
        if jobs:
            result |= compare_engines(args, composition, shared, jobs)
            write_result(args.out, result)
        if over_time:
            result |= compare_servers(args, composition, shared, script, over_time, folder)
            write_result(args.out, result)
    return 0


def write_result(out: Path | None, result: dict[str, Any]) -> None:
    """After each half: what is measured survives a server that does not start."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def compare_engines(
    args: argparse.Namespace, composition: Composition, shared: Shared, jobs: dict[str, list[Job]]
) -> dict[str, Any]:
    """Workloads whose requests are all there at once. What the result says of them; the table is printed."""
    overrides = composition.overrides
    interleaved = args.order == "interleaved" or (args.order == "auto" and both_fit(composition, jobs))
    if interleaved:
        shared = replace(shared, memory_fraction=shared.memory_fraction / 2)
        overrides = (*overrides, f"engine.memory_fraction={shared.memory_fraction}")
    say("both engines take turns" if interleaved else "one engine after the other")
    ours = Launch("dovetail", sys.executable, {"overrides": overrides}, {})
    peer = Launch(args.peer, args.python, asdict(shared) | {"engine_args": args.args}, dict(args.env))
    measured, about = measure(ours, peer, jobs, interleaved)
    rows = compared(measured, jobs, ours.name, peer.name)
    print(markdown(rows, ours.name, peer.name))
    print("\n" + ", ".join(f"{said['engine']} started in {said['startup_s']:.1f} s" for said in about.values()))
    return {"interleaved": interleaved, "engines": about, "comparisons": rows, "runs": raw(measured)}


def compare_servers(
    args: argparse.Namespace,
    composition: Composition,
    shared: Shared,
    script: Path,
    workloads: dict[str, list[str]],
    folder: Path,
) -> dict[str, Any]:
    """Workloads whose requests arrive over time, one server after the other."""
    port = served.free_port()
    settings = asdict(shared) | {"engine_args": args.args, "port": port}
    ours = served.dovetail_server(composition, folder)
    peer = served.Server(args.peer, [args.python, str(script), json.dumps(settings)], port, dict(args.env))
    measured, started = {}, {}
    for server in (ours, peer):
        say(f"the server of {server.name}")
        measured[server.name], started[server.name] = served.measure(server, workloads, args.rounds, folder)
    rows = served.compared(measured, ours.name, peer.name)
    print("\n" + served.markdown(rows, ours.name, peer.name))
    print("\n" + ", ".join(f"{name}'s server started in {seconds:.1f} s" for name, seconds in started.items()))
    return {"served": rows, "servers": {"startup_s": started, "loads": measured}}


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


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except DovetailError as error:
        print(f"compare.py: {error}", file=sys.stderr)
        sys.exit(2)
