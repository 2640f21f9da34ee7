"""Report of a benchmark: tables on the terminal, and a plot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from dovetail.core.errors import ConfigError
from dovetail.plugins.app.tables import NONE, console, figures_table, number, share, simulated_title
from dovetail.plugins.app.waiting import long_phases

BUSY = 0.8
"""Busy share above which the client's own work distorts the figures."""
SUFFIXES = ("png", "svg", "pdf")


def show(result: dict[str, Any]) -> None:
    out = console(130, highlight=False)
    out.print(_where(result))
    if names := result["config"]["bench"]["adapters"]:
        out.print(f"requests spread over {len(names)} adapters, skew {result['config']['bench']['adapter_skew']:g}")
    out.print(_speed(result))
    last = [load["runs"][-1] for _, load in rows(result)]
    if any("steps" in run for run in last):
        out.print(_inside(result))
    if any(run.get("acceptance_by_position") for run in last):
        out.print(_speculation(result))
    if any("replicas" in run for run in last):
        out.print(_replicas(result))
    for found in result["results"]:
        if "knee" in found:
            bend = found["knee"] or {"rate": None, "rule": "too few rates, or no bend"}
            where = "none" if bend["rate"] is None else f"{bend['rate']:g} requests/s"
            out.print(f"knee of {found['workload']}: {where} ({bend['rule']})")
        for load in found["loads"]:
            for run in load["runs"]:
                if run["failed"]:
                    which = f"{found['workload']}: {run['failed']} of {run['requests']} requests failed"
                    out.print(f"[bold red]{which}[/]: {run['failures'][0]}")
                if run.get("client_busy", 0.0) > BUSY:
                    which = f"{found['workload']}: this client was busy {run['client_busy']:.0%} of the time"
                    out.print(f"[bold red]{which}[/], so the figures include its own limits")


def _where(result: dict[str, Any]) -> str:
    startup = result["startup"]
    if startup["target"] == "server":
        return f"{startup['model']} at {startup['url']}"
    layout = startup["layout"]
    gpus = layout["tp"] * layout["pp"] * layout["dp"]
    many = f"{gpus} x " if gpus > 1 else ""
    spread = f" ({' '.join(f'{name}={n}' for name, n in layout.items() if n > 1)})" if gpus > 1 else ""
    phases = long_phases(startup["phases_s"])
    lines = [f"{many}{startup['device']}{spread}, started in {startup['startup_s']:.1f} s{phases}"]
    return "\n".join(lines + [f"note: {note}" for note in startup["slower_paths"]])


def simulated(result: dict[str, Any]) -> str:
    """Return what begins the titles of tables if drafts were accepted by a coin."""
    return simulated_title([result["startup"]])


def rows(result: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (workload and rate, its figures)."""
    for found in result["results"]:
        for load in found["loads"]:
            rate = load["rate"]
            yield found["workload"] + ("" if rate is None else f" {rate:g}/s"), load


def _speed(result: dict[str, Any]) -> Table:
    """Build the table of medians over runs, with the range of the throughput."""
    goodput = any("goodput.share" in load["summary"] for _, load in rows(result))
    columns = [
        ("TTFT p50", "ttft_ms.median"),
        ("p99", "ttft_ms.p99"),
        ("TPOT p50", "tpot_ms.median"),
        ("p99", "tpot_ms.p99"),
        ("of run", "run_tpot_ms"),
        ("ITL p99", "itl_ms.p99"),
        ("E2E p50", "e2e_ms.median"),
        ("p99", "e2e_ms.p99"),
        ("output/s", "output_tokens_per_s"),
    ]
    if goodput:
        columns += [("good req/s", "goodput.requests_per_s"), ("share", "goodput.share")]
    # The engine's own figures have it in another table.
    hits = any("prefix_hit_rate" in run and "steps" not in run for _, load in rows(result) for run in load["runs"])
    several = any(len(load["runs"]) > 1 for _, load in rows(result))
    heads = [head for head, _ in columns] + ["hits"] * hits + ["runs"] * several
    table = _table(f"{simulated(result)}latency in ms, throughput in tokens/s", heads)
    for name, load in rows(result):
        summary = load["summary"]
        cells = [number(summary[key]["median"]) if key in summary else NONE for _, key in columns]
        if hits:
            cells.append(share(summary["prefix_hit_rate"]["median"]) if "prefix_hit_rate" in summary else NONE)
        if several:
            speed = summary["output_tokens_per_s"]
            around = (speed["max"] - speed["min"]) / speed["median"] / 2 if speed["median"] else 0.0
            cells.append(f"{len(load['runs'])} ± {around:.1%}")
        table.add_row(name, *cells)
    return table


def _inside(result: dict[str, Any]) -> Table:
    """Build the table of engine figures of the last run."""
    host_parts = ("schedule", "submit", "wait", "update")
    heads = ("steps", *host_parts, "device", "idle", "KV used", "waste", "hits", "preempted", "accepted")
    title = "inside the engine, last run: ms per step on host and device, share of device time idle, KV cache"
    table = _table(title, heads)
    for name, load in rows(result):
        run = load["runs"][-1]
        host = run["host_ms_per_step"]
        table.add_row(
            name,
            str(run["steps"]),
            *(f"{host[part]:.3f}" for part in host_parts),
            f"{run['device_ms_per_step']:.3f}",
            *(share(run[key]) for key in ("device_idle", "kv_used_max", "kv_waste", "prefix_hit_rate")),
            str(run["preemptions"]),
            NONE if run["acceptance_length"] is None else f"{run['acceptance_length']:.2f}",
        )
    return table


def _speculation(result: dict[str, Any]) -> Table:
    """Build the table of a drafter's figures of the last run."""
    runs = [(name, load["runs"][-1]) for name, load in rows(result)]
    most = max(len(run.get("acceptance_by_position") or ()) for _, run in runs)
    heads = (
        "tokens/step",
        "accepted",
        *(f"draft {at}" for at in range(1, 1 + most)),
        "draft ms",
        "verify ms",
        "draw ms",
    )
    table = _table(
        f"{simulated(result)}speculation, last run: share of drafts accepted, also by position among those that follow "
        "accepted ones; ms per step (drafts in a step's graph count to verify)",
        heads,
    )
    for name, run in runs:
        if not (each := run.get("acceptance_by_position")):
            continue
        parts, device = run["speculation_ms_per_step"], run["device_ms_per_step"]
        shares = [NONE if rate is None else share(rate) for rate in (run["draft_acceptance"], *each)]
        times = parts["draft"], device - parts["draft"] - parts["draw"], parts["draw"]
        table.add_row(
            name,
            NONE if run["acceptance_length"] is None else f"{run['acceptance_length']:.2f}",
            *shares,
            *[NONE] * (most - len(each)),
            *(f"{ms:.3f}" for ms in times),
        )
    return table


def _replicas(result: dict[str, Any]) -> Table:
    """Build the table of figures per replica of the last run."""
    heads = ("replica", "requests", "output/s", "steps", "KV used", "hits", "preempted")
    table = _table("replicas, last run", heads)
    for name, load in rows(result):
        run = load["runs"][-1]
        for replica, one in enumerate(run.get("replicas", ())):
            table.add_row(
                name if not replica else "",
                str(replica),
                str(one["requests"]),
                number(one["output_tokens"] / run["seconds"] if run["seconds"] else None),
                str(one["steps"]),
                share(one["kv_used_max"]),
                share(one["prefix_hit_rate"]),
                str(one["preemptions"]),
            )
    return table


def _table(title: str, heads: Iterable[str]) -> Table:
    return figures_table(title, "workload", heads, no_wrap=True)


# Plot.


def check_plot(path: str | None, option: str) -> None:
    """Raise ConfigError before the measurement if the plot cannot be drawn."""
    if path is None:
        return
    if Path(path).suffix.lstrip(".") not in SUFFIXES:
        raise ConfigError(f"{option}={path}: the name must end with one of .{', .'.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError(f"{option}={path} needs matplotlib: pip install 'dovetail[bench]'") from None
    Path(path).parent.mkdir(parents=True, exist_ok=True)


def draw(path: str, result: dict[str, Any], timelines: dict[str, Any]) -> None:
    """Draw one row per workload: its load curve, or its latency distributions."""
    from matplotlib.figure import Figure

    results = result["results"]
    figure = Figure(figsize=(11, 3.2 * len(results)), layout="constrained")
    if words := simulated(result):
        figure.suptitle(words.rstrip(": "))
    for axes, found in zip(figure.subplots(len(results), 3, squeeze=False), results, strict=True):
        if len(found["loads"]) > 1:
            _curves(axes, found)
        else:
            ((_, lines),) = timelines[found["workload"]]
            _distributions(axes, lines)
        axes[0].set_title(found["workload"], loc="left")
    figure.savefig(path)


def _curves(axes: Any, found: dict[str, Any]) -> None:
    rates = [load["rate"] for load in found["loads"]]
    for axis, names, label in (
        (axes[0], ("ttft_ms.median", "ttft_ms.p99"), "TTFT, ms"),
        (axes[1], ("tpot_ms.median", "tpot_ms.p99"), "TPOT, ms"),
        (axes[2], ("output_tokens_per_s",), "output tokens/s"),
    ):
        for name in names:
            points = [(r, load["summary"].get(name)) for r, load in zip(rates, found["loads"], strict=True)]
            known = [(rate, value["median"]) for rate, value in points if value is not None]
            axis.plot(*zip(*known, strict=True), marker="o", label=name.rpartition(".")[2])
        axis.set(xlabel="offered requests/s", ylabel=label, ylim=(0, None))
        if found.get("knee") and found["knee"]["rate"] is not None:
            axis.axvline(found["knee"]["rate"], linestyle="--", color="gray", label="knee")
        axis.legend()


def _distributions(axes: Any, lines: list[Any]) -> None:
    complete = [line for line in lines if not line.failure]
    for axis, label, values in (
        (axes[0], "TTFT, ms", [line.ttft for line in complete]),
        (axes[1], "TPOT, ms", [line.tpot for line in complete if line.tpot is not None]),
        (axes[2], "E2E, ms", [line.e2e for line in complete]),
    ):
        ordered = sorted(value * 1e3 for value in values)
        axis.plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], drawstyle="steps-post")
        axis.set(xlabel=label, ylabel="share of requests", ylim=(0, 1.02))
