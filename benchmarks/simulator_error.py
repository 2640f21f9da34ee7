"""How far the simulator is from a device: measures four loads, and simulates them before and after a calibration.

    python benchmarks/simulator_error.py --out benchmarks/results/NAME.json -- +preset=h200_fp8_tp1 cost=h100 \
        model.load=dummy engine.max_len=4224
    python benchmarks/simulator_error.py --again benchmarks/results/NAME.json
    python benchmarks/simulator_error.py --requests 6 --tokens 12 --rate 20 --seconds 1.5 -- +preset=tiny_cpu \
        cost=cpu engine.dtype=float32 engine.max_len=128 engine.token_budget=128

One start of the engine measures `equal_burst`, requests of equal lengths at once; `chat_burst`, log-normal lengths at
once; `slow_poisson`, the same lengths as a Poisson process of half the rate; and `chat_poisson`, at the whole rate and
for three times as long, since a 99th percentile of few requests is chance. The calibration is fitted to the steps of
all loads but that of --hold-out, whose error is therefore one of prediction. Without `slow_poisson` no step with one
prompt, the first step of a request, would be measured.

Then each load runs in virtual time with as many KV pages, with the cost model that was given and with the calibration.
Overrides after `--` choose model, GPU and cost model.

The result has the measured run, the calibration and the errors, so --again can simulate it anew without a device, for
instance after a change of the simulator; it prints the table and writes nothing unless --out is given.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from rich.table import Table

from dovetail.core.compose.cli import main as run_app
from dovetail.plugins.app.ablate.variants import key_of, merged
from dovetail.plugins.app.bench.metrics import at
from dovetail.plugins.app.tables import console

SCHEMA = "dovetail.simulator_error/1"
LOADS = ("equal_burst", "chat_burst", "slow_poisson", "chat_poisson")
FIGURES = {
    "output_tokens_per_s": "output tokens/s",
    "tpot_ms.median": "TPOT p50, ms",
    "ttft_ms.mean": "TTFT mean, ms",
    "ttft_ms.p95": "TTFT p95, ms",
    "ttft_ms.p99": "TTFT p99, ms",
}
"""Path in the figures of a run -> heading."""
GOALS = {
    "uncalibrated": {"output_tokens_per_s": 0.25, "tpot_ms.median": 0.25},
    "calibrated": {"output_tokens_per_s": 0.10, "tpot_ms.median": 0.10, "ttft_ms.p99": 0.20},
}
"""Relative errors that are aimed at."""
COMMON = ("bench.runs=1", "bench.one_token_run=false")


def variants(args: argparse.Namespace) -> dict[str, str]:
    """Return the YAML of each load."""
    tokens, most = args.tokens, 4 * args.tokens
    drawn = f"{{median: {tokens}, sigma: 0.8, most: {most}}}"
    lengths = f"message: {drawn}\noutput: {drawn}\n"
    chats = f"defaults: [chats, _self_]\nconversations: {args.requests}\n{lengths}"
    return {
        "equal_burst": f"defaults: [fixed, _self_]\nrequests: {args.requests}\nprompt_tokens: {2 * tokens}\n"
        f"output_tokens: {tokens}\n",
        "chat_burst": chats,
        "slow_poisson": f"{chats}rates: [{args.rate / 2}]\nseconds: {args.seconds / 3}\n",
        "chat_poisson": f"{chats}rates: [{args.rate}]\nseconds: {args.seconds}\n",
    }


@contextmanager
def config_folder(texts: dict[str, str]) -> Iterator[tuple[Path, list[str]]]:
    """Yield a folder, and the arguments that make the loads in it workloads."""
    with tempfile.TemporaryDirectory(prefix="dovetail-simulator-error-") as name:
        folder = Path(name) / "conf" / "workload"
        folder.mkdir(parents=True)
        for load, text in texts.items():
            (folder / f"{load}.yaml").write_text(text, encoding="utf-8")
        yield Path(name), ["-cd", str(Path(name) / "conf")]


def bench(words: Sequence[str], out: Path) -> dict[str, Any]:
    """Run app=bench. Raises SystemExit with its exit code if it fails."""
    if code := run_app(["app=bench", *words, f"bench.out={out}"]):
        raise SystemExit(code)
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def measure(overrides: Sequence[str], loads: dict[str, str], held_out: str) -> dict[str, Any]:
    """Measure all loads in one start. Returns {"bench": result file, "calibration": its file}."""
    with config_folder(loads) as (folder, given):
        path = folder / "calibration.json"
        calibrate = [f"bench.workloads=[{','.join(loads)}]", f"bench.hold_out=[{held_out}]", f"bench.calibrate={path}"]
        found = bench([*given, *overrides, *COMMON, *calibrate], folder / "measured.json")
        return {"bench": found, "calibration": json.loads(path.read_text(encoding="utf-8"))}


def simulate(overrides: Sequence[str], loads: dict[str, str], measured: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return {"uncalibrated": figures by load, "calibrated": ...}."""
    with config_folder(loads) as (folder, given):
        path = folder / "calibration.json"
        path.write_text(json.dumps(measured["calibration"]), encoding="utf-8")
        pages = min(measured["bench"]["startup"]["kv_pages"].values())
        here = ["executor=simulated", "executor.clock=virtual", f"engine.kv_pages={pages}", "bench.warmup=0"]
        words = merged([word for word in overrides if not _is_of(word, "executor", "bench")], here)
        costs = {"uncalibrated": words, "calibrated": [*_without_cost(words), "cost=measured", f"cost.path={path}"]}
        found = {}
        for name, chosen in costs.items():
            more = [f"bench.workloads=[{','.join(loads)}]", *COMMON]
            with redirect_stdout(StringIO()):
                result = bench([*given, *chosen, *more], folder / f"{name}.json")
            found[name] = figures(result)
        return found


def _is_of(word: str, *nodes: str) -> bool:
    return key_of(word).split(".")[0] in nodes


def _without_cost(words: Sequence[str]) -> list[str]:
    return [word for word in words if not _is_of(word, "cost")]


def figures(result: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """Return the figures of each load of a result file of app=bench."""
    runs = {each["workload"]: each["loads"][0]["runs"][0] for each in result["results"]}
    return {load: {path: at(run, path) for path in FIGURES} for load, run in runs.items()}


def errors(measured: dict[str, Any], simulated: dict[str, dict[str, Any]], held_out: str) -> list[dict[str, Any]]:
    """Return a record for each load and figure, with the relative errors of the simulations."""
    rows = []
    for load, found in figures(measured["bench"]).items():
        for path, value in found.items():
            row: dict[str, Any] = {"load": load, "held_out": load == held_out, "figure": path, "measured": value}
            for name, sides in simulated.items():
                predicted = sides[load][path]
                row[name] = predicted
                row[f"{name}_error"] = None if not value or predicted is None else round(predicted / value - 1, 4)
            rows.append(row)
    return rows


def show(result: dict[str, Any]) -> None:
    out = console(120, highlight=False)
    made = result["calibration"]
    title = f"{made['device']}, {made['model']['architecture']}, {made['model']['layers']} layers; held out: "
    table = Table("load", "figure", "measured", title=title + ", ".join(made["held_out"]), title_justify="left")
    for name in GOALS:
        table.add_column(name, justify="right")
        table.add_column("error", justify="right")
    for row in result["errors"]:
        cells = [row["load"], FIGURES[row["figure"]], _number(row["measured"])]
        for name in GOALS:
            error, goal = row[f"{name}_error"], GOALS[name].get(row["figure"])
            missed = error is not None and goal is not None and abs(error) > goal
            cells += [_number(row[name]), "n/a" if error is None else f"{error:+.1%}" + (" !" if missed else "")]
        table.add_row(*cells)
    out.print(table)
    fit, before = made["errors"], made["uncalibrated"]
    out.print(
        f"steps fitted: {made['steps']}; error of a step median {fit['median']:.1%}, p90 {fit['p90']:.1%} (before "
        f"{before['median']:.1%}, {before['p90']:.1%}). A figure with ! misses its goal."
    )


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, help="write the result to this new JSON file")
    parser.add_argument("--again", type=Path, help="simulate the measurement of this result file anew")
    parser.add_argument("--hold-out", choices=LOADS, default="chat_poisson", help="load whose steps are not fitted")
    parser.add_argument("--requests", type=int, default=256, help="requests of each burst")
    parser.add_argument("--tokens", type=int, default=200, help="median prompt and output tokens")
    parser.add_argument("--rate", type=float, default=16.0, help="requests/s of chat_poisson")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds of arrivals of chat_poisson")
    parser.add_argument("overrides", nargs="*", help="overrides of the engine, after --")
    args = parser.parse_args(argv)
    if (args.again is None) == (not args.overrides):
        parser.error("give either --again FILE, or overrides after --")
    if args.out is not None and args.out.exists():
        parser.error(f"--out {args.out}: the file exists, and nothing is overwritten")
    return args


def previous(path: Path) -> dict[str, Any]:
    """Read a result. Raises SystemExit with a message for a file that is none."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"--again {path}: cannot be read ({error})") from None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise SystemExit(f"--again {path}: it is no result of this script with the schema {SCHEMA}")
    return found


def run(argv: Sequence[str]) -> int:
    args = parse(argv)
    if args.again is None:
        loads, overrides = variants(args), list(args.overrides)
        result = {"schema": SCHEMA, "overrides": overrides, "loads": loads, "held_out": args.hold_out}
        result |= measure(overrides, loads, args.hold_out)
    else:
        result = previous(args.again)
    result["simulated"] = simulate(result["overrides"], result["loads"], result)
    result["errors"] = errors(result, result["simulated"], result["held_out"])
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    show(result)
    return 0


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
