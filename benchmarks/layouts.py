"""Which layout of a model over the GPUs of one host wins for which load: runs app=bench on one layout after another.

    python benchmarks/layouts.py --layouts +preset=h200_fp8_tp8 +preset=h200_fp8_tp4_dp2 +preset=h200_fp8_dp8 \
        --workloads latency,batch64,batch256,throughput --runs 3 --out benchmarks/results/NAME.json --plot layouts.png \
        -- engine.max_len=1024
    python benchmarks/layouts.py --layouts +preset=h200_fp8_tp8 +preset=h200_fp8_dp8 --workloads latency,throughput \
        -- executor=simulated
    python benchmarks/layouts.py --layouts scheduler=fcfs scheduler=static --workloads shared_prefix --rounds 3 \
        -- +preset=h200_fp8_tp1 engine.max_len=2048

A layout is a preset, or overrides in quotes ("engine.tp=4 engine.dp=2"); overrides after `--` apply to all of them.
Each runs in a separate process and gets the same requests. Where all requests arrive at once, the layout with the most
output tokens/s wins; at an offered rate, which fixes those, the one with the lowest median latency. A lead no greater
than the range over runs is a tie. --rounds starts all of them again, in reverse order every other time: changes of the
machine then widen the range instead of deciding the winner. A layout that cannot start, fails, or has no result after
--patience seconds is reported with the reason and left out. --out is written after each start.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.plugins.app.bench.metrics import summarize

RUN = Path(__file__).parent.parent / "run.py"
SCHEMA = "dovetail.layouts/1"
STOPPING = {signal.SIGINT, signal.SIGTERM}


@dataclass(frozen=True)
class Load:
    """A workload, or one rate of it."""

    workload: str
    rate: float | None

    def __str__(self) -> str:
        return self.workload if self.rate is None else f"{self.workload} {self.rate:g}/s"

    @property
    def figure(self) -> tuple[str, str, bool]:
        """The figure that decides: (key in a summary, heading, whether more is better)."""
        if self.rate is None:
            return "output_tokens_per_s", "output tokens/s", True
        return "e2e_ms.median", "E2E median, ms", False


Figures = dict[Load, dict[str, dict[str, dict[str, float]]]]
"""Load -> layout -> figure -> median, min and max over the runs."""


def measure(layout: str, common: Sequence[str], workloads: str, runs: int, patience: float) -> dict[str, Any]:
    """Return the result file of app=bench, or {"error": reason}."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        words = [*layout.split(), *common, f"bench.workloads=[{workloads}]", f"bench.runs={runs}", f"bench.out={out}"]
        code, output, errors = run([sys.executable, str(RUN), "app=bench", *words], Path(folder), patience)
        sys.stdout.write(output)
        sys.stdout.flush()
        if code is None:
            return {"error": "\n".join(filter(None, [errors, f"no result within {patience:g} s (--patience)"]))}
        if not out.is_file() or not (text := out.read_text(encoding="utf-8")) or code:
            return {"error": errors or f"exit status {code}: requests failed"}
        result: dict[str, Any] = json.loads(text)
        return result


def unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def run(command: Sequence[str], folder: Path, patience: float) -> tuple[int | None, str, str]:
    """Return exit status (None after `patience`), stdout and stderr. Kills all its processes then, or on Ctrl-C."""
    printed = [folder / "stdout", folder / "stderr"]
    with printed[0].open("w") as out, printed[1].open("w") as err:
        # Files, not pipes: a process that outlives the command would keep pipes open.
        code = process = None
        try:
            # A signal between the fork and the assignment would leave the process running.
            signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
            try:
                process = subprocess.Popen(
                    command, stdout=out, stderr=err, start_new_session=True, preexec_fn=unblock_signals
                )
            finally:
                unblock_signals()
            code = process.wait(patience)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if code is None and process is not None:
                # Ranks have their own process groups; Linux ends them with the process that started them.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    output, errors = (path.read_text(encoding="utf-8", errors="replace") for path in printed)
    return code, output, errors.strip()


def merged(result: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Join the runs of two starts."""
    if "error" in more:
        return more | {"before": result}
    for mine, theirs in zip(result["results"], more["results"], strict=True):
        for load, other in zip(mine["loads"], theirs["loads"], strict=True):
            load["runs"] += other["runs"]
            load["summary"] = summarize(load["runs"])
    return result


def figures(results: dict[str, dict[str, Any]]) -> Figures:
    found: Figures = {}
    for layout, result in results.items():
        for workload in result.get("results", ()):
            for load in workload["loads"]:
                found.setdefault(Load(workload["workload"], load["rate"]), {})[layout] = load["summary"]
    return found


def winner(load: Load, by_layout: dict[str, dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Return the best layout, its lead, and the layouts whose best run is not beaten by its worst."""
    name, _, more = load.figure
    ranked = sorted(by_layout, key=lambda layout: by_layout[layout][name]["median"], reverse=more)
    first, others = by_layout[ranked[0]][name], [by_layout[layout][name] for layout in ranked[1:]]
    if not others:
        return {"layout": ranked[0], "lead": None, "tie": []}
    better, worse = (first, others[0]) if more else (others[0], first)
    clear = [first["min"] > other["max"] if more else first["max"] < other["min"] for other in others]
    tie = [layout for layout, beaten in zip(ranked[1:], clear, strict=True) if not beaten]
    return {"layout": ranked[0], "lead": better["median"] / worse["median"] - 1, "tie": tie}


def table(found: Figures, layouts: Sequence[str]) -> Iterator[str]:
    """Lines of a Markdown table."""
    yield "| load | figure | " + " | ".join(layouts) + " | wins |"
    yield "|---|---|" + "---|" * len(layouts) + "---|"
    for load, by_layout in found.items():
        name, words, _ = load.figure
        cells = [_number(by_layout[one][name]["median"]) if one in by_layout else "-" for one in layouts]
        won = winner(load, by_layout)
        lead = "" if won["lead"] is None else f", {won['lead']:+.1%}"
        tie = f" (no clear lead over {', '.join(won['tie'])})" if won["tie"] else ""
        if len(by_layout) > 1 and all(one[name]["min"] == one[name]["max"] for one in by_layout.values()):
            tie = " (one run each: no range)"
        yield f"| {load} | {words} | {' | '.join(cells)} | {won['layout']}{lead}{tie} |"


def _number(value: float) -> str:
    return f"{value:.4g}" if value < 1e4 else f"{value:.0f}"


def draw(path: str, found: Figures, layouts: Sequence[str]) -> None:
    """Plot each layout's share of the best, one group of bars a load."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 2 + 1.6 * len(found)), 3.5 + 0.25 * len(layouts)), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(layouts)
    for number, layout in enumerate(layouts):
        heights = []
        for load, by_layout in found.items():
            name, _, more = load.figure
            best = by_layout[winner(load, by_layout)["layout"]][name]["median"]
            mine = by_layout[layout][name]["median"] if layout in by_layout else None
            heights.append(0.0 if mine is None else (mine / best if more else best / mine))
        axes.bar(
            [x + (number - (len(layouts) - 1) / 2) * width for x in range(len(found))], heights, width, label=layout
        )
    axes.set_xticks(range(len(found)), [f"{load}\n{load.figure[1]}" for load in found], fontsize=8)
    axes.set(ylabel="share of the best", ylim=(0, 1.05))
    figure.legend(fontsize=8, loc="outside upper center")
    figure.savefig(path)


def save(path: Path, results: dict[str, dict[str, Any]]) -> None:
    """Write the results. The file is complete at any time: the old one or the new one."""
    wins = {str(load): winner(load, by_layout) for load, by_layout in figures(results).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps({"schema": SCHEMA, "layouts": results, "wins": wins}, indent=1) + "\n", encoding="utf-8")
    new.replace(path)


def main(argv: Sequence[str]) -> int:
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", required=True, help="presets, or overrides in quotes")
    parser.add_argument("--workloads", default="latency,batch64,batch256,throughput")
    parser.add_argument("--runs", type=int, default=1, help="repeats of each workload")
    parser.add_argument("--rounds", type=int, default=1, help="starts of each layout, taken in turns")
    parser.add_argument(
        "--patience",
        type=float,
        default=3600.0,
        metavar="SECONDS",
        help="limit for one start and its runs",
    )
    parser.add_argument("--out", type=Path, help="JSON file for every result and the winners")
    parser.add_argument("--plot", help="png, svg or pdf file")
    args = parser.parse_args(argv[:cut])
    results: dict[str, dict[str, Any]] = {}
    for number in range(args.rounds):
        for layout in args.layouts if number % 2 == 0 else reversed(args.layouts):
            if "error" in results.get(layout, ()):
                continue
            print(f"== {layout}", flush=True)
            result = measure(layout, argv[cut + 1 :], args.workloads, args.runs, args.patience)
            results[layout] = merged(results[layout], result) if layout in results else result
            if args.out is not None:
                save(args.out, results)
            if error := result.get("error"):
                print(f"{layout}: {error}", file=sys.stderr, flush=True)
    found = figures(results)
    print("\n".join(table(found, args.layouts)) if found else "no layout could be measured")
    if args.plot is not None and found:
        draw(args.plot, found, args.layouts)
    return 1 if any("error" in result for result in results.values()) else 0


if __name__ == "__main__":
    # Act as on Ctrl-C: the running layout is a separate session, which would be left running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(sys.argv[1:]))
