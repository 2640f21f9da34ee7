"""Dovetail beside another engine: the same prompts, the same machine, the same run.

    python benchmarks/compare.py vllm --python /venvs/vllm/bin/python --env HF_HUB_OFFLINE=1 \
        --workloads latency,batch64 --rounds 3 --out benchmarks/results/NAME.json -- +preset=h200_bf16_tp1
    python benchmarks/compare.py vllm --workloads chat,agents,24x512/128,190x150/400-sampled -- model=qwen25_7b
    python benchmarks/compare.py transformers --workloads fixed -- engine.device=cpu
    python benchmarks/compare.py table --help        # the README's tables, all models in one run

The overrides of Dovetail follow `--`. Model, lengths, batch size, memory and parallelism of the peer are derived from
them; `--args` sets more (JSON, such as '{"quantization": "fp8"}'). Each engine is a separate process. Where both fit by
the cost model, they are loaded together, each with half of the memory, and take turns, so that changes of the machine
affect both alike; otherwise one runs after the other. `--order` forces one of the two.

Besides the names of workloads, `--workloads` takes ROWSxPROMPT/OUTPUT, such as 24x512/128: so many equal requests. With
`-sampled` they are sampled as workload=chat is. Both engines get the same token ids, output lengths, sampling
parameters and JSON Schemas (`agents`), and ignore end-of-sequence. Later rounds of `multi_turn` contain each engine's
own answers, and grammars are compiled by each engine's own library.

TPOT = (time of the run - time of a run with one output token) / (output tokens of a request - 1); medians over rounds.
Workloads with drawn output lengths, rounds or schemas have tokens/s alone. `--whole-only` leaves out the run with one
token where only tokens/s count: with more requests than slots, for instance.

`--only ENGINE` runs one of the two, and `--reuse FILE` takes the other's runs from the file that this wrote. They must
have the same requests, settings and GPU:

    python benchmarks/compare.py vllm --only vllm --workloads chat --out vllm.json -- +preset=h200_fp8_tp1
    python benchmarks/compare.py vllm --reuse vllm.json --workloads chat --out both.json -- +preset=h200_fp8_tp1

`--stored FORMAT` writes random weights in NF4 or GGUF to a file that both engines read: vLLM cannot draw them, as it
draws those of other formats. It needs the packages bitsandbytes and vllm-gguf-plugin.

`--lock FILE` lets several comparisons use one GPU: their engines start at the same time, which takes longest, but only
one of them runs requests. Each engine then has the memory that its workloads need by the cost model, in place of all,
unless options set it.

Workloads whose requests all arrive at once run in the engines themselves (peers/offline.py). Workloads with rates, such
as online, go to the servers of both (peers/served.py), one after the other. `--set` gives one workload an option that
others do not have: `--set online:workload.seconds=20`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from peers import model_folder, offline, served, stored_weights, table
from peers.drafting import drafting_of
from peers.jobs import Job, make_jobs, words_of

from dovetail import Composition, ConfigError, DovetailError, compose
from dovetail.core.host import detect_host
from dovetail.core.interfaces import ModelSpec
from dovetail.plugins.app.bench.record import describe, machine

PEERS = Path(__file__).parent / "peers"
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
"""Parts of names in a peer's environment whose values no result file shows."""
SPARE = 1.1
"""Bytes of vLLM's KV cache over those that our tokens take: its last blocks may be nearly empty."""
Save = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Shared:
    """Settings that a peer shares with Dovetail."""

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
    grammars: bool
    """Whether some request has one: the engine then needs the tokenizer."""
    drafting: dict[str, Any] | None
    """Speculative decoding (peers/drafting.py)."""

    @property
    def equal(self) -> dict[str, Any]:
        """Settings that two runs must share to be compared: all but folders, and those of the requests."""
        found = {name: value for name, value in asdict(self).items() if name not in ("model", "grammars")}
        if self.drafting is not None:
            found["drafting"] = {name: value for name, value in self.drafting.items() if name != "model"}
        return found


def shared_settings(composition: Composition, peer: str, folder: Path, *, grammars: bool = False) -> Shared:
    """Settings of our composition. For a model or drafter of shapes alone, writes config.json and a tokenizer into
    `folder`."""
    engine, model = composition.engine, composition.part("model")
    if engine.dp > 1:
        raise ConfigError(f"engine.dp={engine.dp}: the peers here run one replica; benchmarks/layouts.py compares ours")
    spec: ModelSpec = model.facts() or model.target().spec(model.config)
    source = model.target().source(model.config)
    if source.checkpoint is None:
        model_folder.write_folder(composition, folder)
    return Shared(
        model=str(folder if source.checkpoint is None else source.checkpoint.path),
        dummy=source.weights is None,
        dtype=spec.dtype if engine.dtype == "auto" else engine.dtype,
        tp=engine.tp,
        max_len=min(engine.max_len or spec.max_len, spec.max_len),
        max_seqs=engine.max_seqs,
        token_budget=engine.token_budget,
        memory_fraction=engine.memory_fraction,
        prefix_caching=composition.part("kv_cache").name != "paged",
        device=engine.device,
        grammars=grammars,
        drafting=drafting_of(composition, peer, folder),
    )


def chosen(overrides: Sequence[str], names: Sequence[str], options: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """Workload -> overrides, including the `options` for it alone."""
    if unknown := {name for name, _ in options} - set(names):
        raise ConfigError(f"--set {','.join(sorted(unknown))}: not among --workloads {','.join(names)}")
    return {name: [*overrides, *words_of(name), *(text for of, text in options if of == name)] for name in names}


def has_rates(composition: Composition) -> bool:
    """Whether requests arrive over time: those go to a server."""
    return any(rate is not None for rate in composition.build("workload").rates())


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
    names = sorted(path.stem.removesuffix("_peer") for path in PEERS.glob("*_peer.py"))
    parser.add_argument("peer", choices=[name for name in names if name != "dovetail"])
    parser.add_argument("--python", default=sys.executable, help="the peer's Python interpreter")
    parser.add_argument(
        "--env",
        type=name_and_value,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="added to the peer's environment, such as PYTHONPATH=/vllm/site-packages; may be repeated",
    )
    parser.add_argument(
        "--workloads", default="latency,batch64,batch256", help="names or ROWSxPROMPT/OUTPUT[-sampled], with commas"
    )
    parser.add_argument("--whole-only", default="", help="those of them whose run of one token is left out")
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
    parser.add_argument("--only", metavar="ENGINE", help="run this engine alone: dovetail or the peer")
    parser.add_argument("--reuse", type=Path, metavar="FILE", help="result file with the runs of one of the engines")
    parser.add_argument(
        "--lock", type=Path, metavar="FILE", help="share the GPU with other comparisons that name this file"
    )
    parser.add_argument(
        "--stored",
        choices=stored_weights.FORMS,
        help="write random weights to a checkpoint in this format, which both engines load",
    )
    parser.add_argument("--args", type=json.loads, default={}, help="more options of the peer's engine, a JSON object")
    parser.add_argument("--out", type=Path, help="JSON file for all figures, written after each run")
    args = parser.parse_args(argv[:cut])
    if args.only not in (None, "dovetail", args.peer):
        parser.error(f"--only {args.only}: the engines are dovetail and {args.peer}")
    if args.only and args.reuse:
        parser.error("--only and --reuse: with --reuse, the engine that the file does not have runs")
    return args, list(argv[cut + 1 :])


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["table"]:
        return table.main(argv[1:])
    args, overrides = arguments(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.stored:
            offline.log(f"writing random weights in {args.stored}")
            composition = compose(overrides, app="bench")
            overrides = stored_weights.stored(composition, overrides, args.stored, folder)
        run(args, overrides, folder)
    return 0


def run(args: argparse.Namespace, overrides: Sequence[str], folder: Path) -> None:
    """Compare the engines with all workloads. `folder`: for files that they read."""
    composition = compose(overrides, app="bench")
    workloads = chosen(overrides, args.workloads.split(","), args.set)
    made = {name: compose(words, app="bench") for name, words in workloads.items()}
    over_time = {name: words for name, words in workloads.items() if has_rates(made[name])}
    at_once = {name: one for name, one in made.items() if name not in over_time}
    if over_time and (args.only or args.reuse):
        raise ConfigError(f"--workloads {','.join(over_time)}: --only and --reuse are for requests that arrive at once")
    if over_time and args.lock:
        raise ConfigError(f"--workloads {','.join(over_time)}: --lock is for requests that arrive at once")
    if args.lock and not args.lock.absolute().parent.is_dir():
        raise ConfigError(f"--lock {args.lock}: there is no folder {args.lock.absolute().parent}")
    if over_time and not server_script(args.peer).exists():
        script = server_script(args.peer).name
        raise ConfigError(f"--workloads {','.join(over_time)}: requests arrive over time, and there is no {script}")
    result: dict[str, Any] = describe(composition) | {"schema": "dovetail.compare/2", "engines": {}, "comparisons": []}
    for name, value in args.env:
        if any(word in name.upper() for word in SECRET):
            result["command"] = result["command"].replace(shlex.quote(f"{name}={value}"), f"{name}=...")

    def save(more: dict[str, Any]) -> None:
        """Write the result after each run, so that a later failure loses nothing."""
        result.update(more)
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    jobs = make_jobs(at_once, args.rounds, folder, list(filter(None, args.whole_only.split(","))))
    grammars = any(request.json_schema for runs in jobs.values() for request in runs[0].requests)
    shared = shared_settings(composition, args.peer, folder, grammars=grammars)
    if at_once:
        compare_engines(args, composition, shared, jobs, save)
    if over_time:
        compare_servers(args, composition, shared, over_time, folder, save)


def part_of_memory(share: offline.Share, overrides: Sequence[str]) -> dict[str, float]:
    """Return the options that give Dovetail its share of a GPU, without those that `overrides` set."""
    options = {"engine.memory_fraction": share.fraction, "engine.kv_pages": share.pages}
    given = {word.partition("=")[0].lstrip("+") for word in overrides}
    return {name: value for name, value in options.items() if name not in given}


def compare_engines(
    args: argparse.Namespace, composition: Composition, shared: Shared, jobs: dict[str, list[Job]], save: Save
) -> None:
    """Run the workloads whose requests all arrive at once."""
    alone = args.only or args.reuse
    overrides = list(composition.overrides)
    if shared.grammars and model_folder.has_shapes_alone(composition):
        overrides = model_folder.loading(composition, overrides, Path(shared.model))
    peer_args = args.args
    if args.lock and detect_host(composition.engine.device).device != "cpu":
        share = offline.share_of(composition, jobs)
        part = part_of_memory(share, composition.overrides)
        overrides += [f"{name}={value}" for name, value in part.items()]
        shared = replace(shared, memory_fraction=part.get("engine.memory_fraction", shared.memory_fraction))
        if args.peer == "vllm":
            peer_args = {"kv_cache_memory_bytes": round(SPARE * share.kv_bytes)} | peer_args
    fit = args.order == "auto" and not args.lock and offline.both_fit(composition, jobs)
    interleaved = (fit or args.order == "interleaved") and not alone
    if interleaved:
        shared = replace(shared, memory_fraction=shared.memory_fraction / 2)
        overrides.append(f"engine.memory_fraction={shared.memory_fraction}")
    if not alone:
        offline.log("both engines take turns" if interleaved else "one engine after the other")

    def engine(name: str, python: str, settings: dict[str, Any], env: dict[str, str]) -> offline.Engine:
        return offline.Engine(name, [python, str(PEERS / f"{name}_peer.py"), json.dumps(settings)], env, args.lock)

    engines: list[offline.Engine | offline.Recorded] = [
        engine("dovetail", sys.executable, {"overrides": overrides}, {}),
        engine(args.peer, args.python, asdict(shared) | {"engine_args": peer_args}, dict(args.env)),
    ]
    settings = {"gpus": machine()["gpus"], **shared.equal}
    if args.only:
        engines = [one for one in engines if one.name == args.only]
    elif args.reuse:
        recorded = offline.read_recorded(args.reuse, settings, jobs)
        engines = [recorded.get(one.name, one) for one in engines]
    for measured in offline.measure([engines] if interleaved else [[one] for one in engines], jobs):
        rows = offline.compared(measured, jobs)
        found = {one.name: one.about for one in engines if one.about is not None}
        save({"interleaved": interleaved, "settings": settings, "engines": found, "comparisons": rows})
        save({"runs": offline.raw(measured)})
    print(offline.markdown(rows, [one.name for one in engines]))
    print("\n" + ", ".join(f"{about['engine']} started in {about['startup_s']:.1f} s" for about in found.values()))


def server_script(peer: str) -> Path:
    return PEERS / f"{peer}_server.py"


def compare_servers(
    args: argparse.Namespace,
    composition: Composition,
    shared: Shared,
    workloads: dict[str, list[str]],
    folder: Path,
    save: Save,
) -> None:
    """Run the workloads whose requests arrive over time, one server after the other."""
    settings = asdict(shared) | {"engine_args": args.args}

    def command(port: int) -> list[str]:
        return [args.python, str(server_script(args.peer)), json.dumps(settings | {"port": port})]

    servers = (served.dovetail_server(composition, folder), served.Server(args.peer, command, dict(args.env)))
    found: dict[str, dict[str, Any]] = {}
    for server in servers:
        offline.log(f"the server of {server.name}")
        for about in served.measure(server, workloads, args.rounds, folder):
            found[server.name] = about
            save({"servers": found})
    ours, peer = found
    rows = served.compared({name: about["loads"] for name, about in found.items()}, ours, peer)
    save({"served": rows})
    print("\n" + served.markdown(rows, ours, peer))
    print("\n" + ", ".join(f"{name}'s server started in {about['startup_s']:.1f} s" for name, about in found.items()))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except DovetailError as error:
        print(f"compare.py: {error}", file=sys.stderr)
        sys.exit(2)
