"""Tables of the files in benchmarks/results, for the pages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

SIMULATED = "SIMULATED"
"""Mark of results whose drafts were accepted by a coin."""
RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


def results() -> str:
    """Return a table for every file of benchmarks/results that app=bench or compare.py wrote, with its command."""
    parts = []
    for file in sorted(RESULTS.glob("*.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        shown = {"dovetail.bench": benchmark, "dovetail.compare": comparison}
        show_result = shown.get(str(found.get("schema", "")).partition("/")[0])
        if show_result is None:
            continue
        gpus = found["machine"]["gpus"]
        machine = f"{len(gpus)} x {gpus[0]}" if gpus else "CPU"
        started, table = show_result(found)
        parts += [
            f"{machine}, torch {found['versions']['torch']}, {started}. `{file.name}`:",
            f"```text\n{found['command']}\n```",
            table,
        ]
    return "\n\n".join(parts)


def benchmark(found: dict[str, Any]) -> tuple[str, str]:
    startup = found["startup"]
    started = startup["url"] if startup["target"] == "server" else f"start-up {startup['startup_s']} s"
    if made_up := [note.partition(":")[0] for note in startup.get("slower_paths", ()) if note.startswith(SIMULATED)]:
        started += f", {made_up[0]}"
    head = ("workload", "TPOT of the run, ms", "TTFT p50, ms", "ITL p99, ms", "output tokens/s")
    return started, table(head, [list(_result_row(r, load)) for r in found["results"] for load in r["loads"]])


def comparison(found: dict[str, Any]) -> tuple[str, str]:
    """Return the table of ratios, ours / peer, and a second table if servers were compared."""
    engines = found["engines"]
    started = " and ".join(f"{about['engine']} (start-up {about['startup_s']} s)" for about in engines.values())
    # Ours states it among its notes, a peer as its kind of acceptance.
    if any(SIMULATED in str(value) for about in engines.values() for value in about.values()):
        started += f", {SIMULATED} acceptance"
    figures = {"tpot_ms": "TPOT, ms", "one_token_s": "first token of all, s", "output_tokens_per_s": "output tokens/s"}
    tables = [_ratios("workload", figures, engines, [(f"`{row['workload']}`", row) for row in found["comparisons"]])]
    if left_out := found.get("left_out"):
        tables.append("Left out: " + ", ".join(f"`{name}` ({why})" for name, why in left_out.items()) + ".")
    if remarks := found.get("remarks"):
        tables.append(remarks)
    if rows := found.get("served"):
        engines = {name: about["startup_s"] for name, about in found["servers"].items()}
        started = started or "servers of " + " and ".join(f"{name} ({took:.1f} s)" for name, took in engines.items())
        figures = {
            "ttft_ms.median": "first token ms, median",
            "ttft_ms.p99": "p99",
            "tpot_ms.median": "TPOT ms, median",
            "output_tokens_per_s": "output tokens/s",
        }
        named = [(f"`{row['workload']}` at {row['rate']:g}/s", row) for row in rows]
        tables.append(_ratios("workload", figures, engines, named))
    return started, "\n\n".join(table for table in tables if table)


def simulator() -> str:
    """Return a table for every result of benchmarks/simulator_error.py."""
    parts = []
    for file in sorted(RESULTS.glob("*.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        if str(found.get("schema", "")).partition("/")[0] != "dovetail.simulator_error":
            continue
        made, measured = found["calibration"], found["bench"]
        about = f"{made['device']}, torch {made['versions']['torch']}, {made['steps']} steps fitted, error of a step"
        fit = made["errors"]
        parts += [
            f"{about}: median {fit['median']:.1%}, p90 {fit['p90']:.1%}. `{file.name}`:",
            f"```text\n{measured['command']}\n```",
            table(
                ("load", "figure", "measured", "uncalibrated", "calibrated"), [_error_row(r) for r in found["errors"]]
            ),
        ]
    return "\n\n".join(parts) or "No device has been measured yet."


def _error_row(row: dict[str, Any]) -> list[str]:
    def cell(name: str) -> str:
        error = row[f"{name}_error"]
        return "-" if error is None else f"{row[name]:.4g} ({error:+.1%})"

    load = f"`{row['load']}`" + (" (not fitted)" if row["held_out"] else "")
    measured = "-" if row["measured"] is None else f"{row['measured']:.4g}"
    return [load, f"`{row['figure']}`", measured, cell("uncalibrated"), cell("calibrated")]


def _ratios(title: str, figures: dict[str, str], engines: Iterable[str], rows: list[tuple[str, dict[str, Any]]]) -> str:
    """Return the table of ratios, or the figures of one engine, if only that one ran."""
    if not rows:
        return ""
    engines = list(engines)

    def cell(row: dict[str, Any], figure: str) -> str:
        if any(figure not in row[engine] for engine in engines):
            return "-"
        ratio = f" ({row['ratio'][figure]:.2f})" if len(engines) == 2 else ""
        return " / ".join(f"{row[engine][figure]:.5g}" for engine in engines) + ratio

    which = ": ours / peer (ratio)" if len(engines) == 2 else ""
    lines = [[name, *(cell(row, figure) for figure in figures)] for name, row in rows]
    return table((title, *(f"{text}{which}" for text in figures.values())), lines)


def _result_row(result: dict[str, Any], load: dict[str, Any]) -> Iterator[str]:
    yield f"`{result['workload']}`" + ("" if load["rate"] is None else f" at {load['rate']:g}/s")
    for key in ("run_tpot_ms", "ttft_ms.median", "itl_ms.p99", "output_tokens_per_s"):
        yield f"{load['summary'][key]['median']:g}" if key in load["summary"] else "-"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
