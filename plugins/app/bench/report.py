"""Report of a benchmark: tables on the terminal, and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from dovetail.core.errors import ConfigError

NONE = "n/a"
BUSY = 0.8
"""Busy share above which the client's own work distorts the figures."""
SUFFIXES = ("png", "svg", "pdf")


def show(result: dict[str, Any]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 130
    console.print(_where(result))
    if names := result["config"]["bench"]["adapters"]:
        console.print(f"requests spread over {len(names)} adapters, skew {result['config']['bench']['adapter_skew']:g}")
    console.print(_speed(result))
    if any("steps" in load["runs"][-1] for found in result["results"] for load in found["loads"]):
        console.print(_inside(result))
    if any("replicas" in load["runs"][-1] for _, load in _rows(result)):
        console.print(_replicas(result))
    for found in result["results"]:
        if "knee" in found:
            bend = found["knee"] or {"rate": None, "rule": "too few rates, or no bend"}
            where = "none" if bend["rate"] is None else f"{bend['rate']:g} requests/s"
            console.print(f"knee of {found['workload']}: {where} ({bend['rule']})")
        for load in found["loads"]:
            for run in load["runs"]:
                if run["failed"]:
                    which = f"{found['workload']}: {run['failed']} of {run['requests']} requests failed"
                    console.print(f"[bold red]{which}[/]: {run['failures'][0]}")
                if run.get("client_busy", 0.0) > BUSY:
                    which = f"{found['workload']}: this client was busy {run['client_busy']:.0%} of the time"
                    console.print(f"[bold red]{which}[/], so the figures include its own limits")


def _where(result: dict[str, Any]) -> str:
    startup = result["startup"]
    if startup["target"] == "server":
        return f"{startup['model']} at {startup['url']}"
    long = [f"{name} {seconds:.1f} s" for name, seconds in startup["phases_s"].items() if seconds >= 0.05]
    layout = startup["layout"]
    gpus = layout["tp"] * layout["pp"] * layout["dp"]
    many = f"{gpus} x " if gpus > 1 else ""
    spread = f" ({' '.join(f'{name}={n}' for name, n in layout.items() if n > 1)})" if gpus > 1 else ""
    phases = f" ({', '.join(long)})" if long else ""
    lines = [f"{many}{startup['device']}{spread}, started in {startup['startup_s']:.1f} s{phases}"]
    return "\n".join(lines + [f"note: {note}" for note in startup["slower_paths"]])


def _rows(result: dict[str, Any]) -> Any:
    for found in result["results"]:
        for load in found["loads"]:
            rate = load["rate"]
            yield found["workload"] + ("" if rate is None else f" {rate:g}/s"), load


def _speed(result: dict[str, Any]) -> Table:
    """Build the table of medians over runs, with the range of the throughput."""
    table = _table("latency in ms, throughput in tokens/s")
    goodput = any("goodput.share" in load["summary"] for _, load in _rows(result))
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
    for head, _ in columns:
        table.add_column(head, justify="right")
    several = any(len(load["runs"]) > 1 for _, load in _rows(result))
    if several:
        table.add_column("runs", justify="right")
    for name, load in _rows(result):
        summary = load["summary"]
        cells = [_number(summary[key]["median"]) if key in summary else NONE for _, key in columns]
        if several:
            speed = summary["output_tokens_per_s"]
            around = (speed["max"] - speed["min"]) / speed["median"] / 2 if speed["median"] else 0.0
            cells.append(f"{len(load['runs'])} ± {around:.1%}")
        table.add_row(name, *cells)
    return table


def _inside(result: dict[str, Any]) -> Table:
    """Build the table of engine figures of the last run."""
    table = _table("inside the engine, last run: ms per step on host and device, share of device time idle, KV cache")
    for head in (
        "steps", "schedule", "submit", "wait", "update", "device", "idle", "KV used", "waste", "hits", "preempted",
        "accepted",
    ):  # fmt: skip
        table.add_column(head, justify="right")
    for name, load in _rows(result):
        run = load["runs"][-1]
        host = run["host_ms_per_step"]
        table.add_row(
            name,
            str(run["steps"]),
            *(f"{host[part]:.3f}" for part in ("schedule", "submit", "wait", "update")),
            f"{run['device_ms_per_step']:.3f}",
            *(_share(run[key]) for key in ("device_idle", "kv_used_max", "kv_waste", "prefix_hit_rate")),
            str(run["preemptions"]),
            NONE if run["acceptance_length"] is None else f"{run['acceptance_length']:.2f}",
        )
    return table


def _replicas(result: dict[str, Any]) -> Table:
    """Build the table of figures per replica of the last run."""
    table = _table("replicas, last run")
    for head in ("replica", "requests", "output/s", "steps", "KV used", "hits", "preempted"):
        table.add_column(head, justify="right")
    for name, load in _rows(result):
        run = load["runs"][-1]
        for number, one in enumerate(run.get("replicas", ())):
            table.add_row(
                name if not number else "",
                str(number),
                str(one["requests"]),
                _number(one["output_tokens"] / run["seconds"] if run["seconds"] else None),
                str(one["steps"]),
                _share(one["kv_used_max"]),
                _share(one["prefix_hit_rate"]),
                str(one["preemptions"]),
            )
    return table


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("workload", no_wrap=True)
    return table


def _share(value: float | None) -> str:
    return NONE if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


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
