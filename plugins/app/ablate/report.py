"""Report of an ablation: tables on the terminal, and a plot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dovetail.plugins.app.ablate.compare import METRICS, Metric, summary
from dovetail.plugins.app.ablate.stats import CONFIDENCE, Estimate

NONE = "n/a"
DRAWN = ("output_tokens_per_s", "ttft_ms.median", "tpot_ms.median")


def show(result: Mapping[str, Any]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 150
    console.print(_where(result))
    for rate in result["rates"]:
        console.print(_figures(result, rate))
        for table in _changes(result, rate):
            console.print(table)
    for table in _quality(result):
        console.print(table)
    for variant in result["variants"]:
        if variant["skipped"]:
            console.print(f"[bold]{_plain(variant['name'])}[/] was skipped: {_plain(variant['skipped'])}")
        if variant["failure"]:
            round_, reason = variant["failure"]["round"] + 1, _plain(variant["failure"]["reason"])
            console.print(f"[bold red]{_plain(variant['name'])}[/] failed in round {round_}: {reason}")
    if result["interrupted"]:
        console.print("[bold red]interrupted[/]: the figures cover only what was measured before")


def _plain(text: str) -> str:
    return text.replace("[", "\\[")


def _where(result: Mapping[str, Any]) -> str:
    config, startups = result["config"]["ablate"], [s["startup"] for v in result["variants"] for s in v["starts"]]
    device = startups[0]["device"] if startups else "no device"
    runs = f"{_many(config['rounds'], 'round')} of {_many(config['runs'], 'run')}"
    return f"workload={result['workload']} on {device}, {runs}; the same requests for all"


def _many(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number > 1 else "")


def _titled(result: Mapping[str, Any], title: str, rate: float | None) -> Table:
    at = "" if rate is None else f", {rate:g} requests/s"
    table = Table(title=title + at, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("step" if result["design"] == "ladder" else "variant", overflow="fold")
    return table


def _figures(result: Mapping[str, Any], rate: float | None) -> Table:
    table = _titled(result, "medians over runs; latency in ms, output in tokens/s", rate)
    rows = [(variant, summary(variant, rate)) for variant in result["variants"]]
    metrics = [metric for metric in METRICS if any(metric.path in found for _, found in rows)]
    for metric in metrics:
        table.add_column(metric.title, justify="right")
    for variant, found in rows:
        table.add_row(Text(variant["name"]), *(_value(metric, found.get(metric.path)) for metric in metrics))
    return table


def _value(metric: Metric, value: float | None) -> str:
    if value is None:
        return NONE
    if not metric.ratio:
        return f"{value:.1%}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _by_baseline(result: Mapping[str, Any], rate: float | None) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield (title, comparisons). A ladder has two tables: against the previous step and against the first."""
    rows = [one for one in result["comparisons"] if one["rate"] == rate]
    if result["design"] != "ladder":
        if rows:
            yield f"against {rows[0]['baseline']}", rows
        return
    nearest = {one["variant"]: one for one in reversed(rows)}
    yield "against the previous step", [one for one in rows if nearest[one["variant"]] is one]
    first = result["variants"][0]["name"]
    if further := [one for one in rows if nearest[one["variant"]] is not one]:
        yield f"against the first, {first}", further


def _changes(result: Mapping[str, Any], rate: float | None) -> Iterator[Table]:
    for against, rows in _by_baseline(result, rate):
        if not rows:
            continue
        table = _titled(result, f"{against}: ratios (differences for shares), {CONFIDENCE:.0%} intervals", rate)
        metrics = [metric for metric in METRICS if any(metric.path in row["changes"] for row in rows)]
        for metric in metrics:
            table.add_column(metric.title, justify="right")
        for row in rows:
            cells = [_change(metric, row["changes"].get(metric.path)) for metric in metrics]
            table.add_row(Text(row["variant"]), *cells)
        estimates = [Estimate(**change) for row in rows for change in row["changes"].values()]
        if any(estimate.unit == "runs" for estimate in estimates):
            table.caption = "one round: intervals are over its runs and do not include the variation between starts"
        elif any(estimate.low is None for estimate in estimates):
            table.caption = "one sample each: no interval (ablate.rounds)"
        table.caption_justify = "left"
        yield table


def _change(metric: Metric, change: Mapping[str, Any] | None) -> Text:
    """Format a cell with the interval on the line below its estimate; one line for both would be too wide."""
    if change is None:
        return Text(NONE)
    estimate = Estimate(**change)

    def number(value: float) -> str:
        return f"{value:.3g}" if metric.ratio else f"{value * 100:+.1f}"

    cell = ("x" if metric.ratio else "") + number(estimate.value)
    if estimate.low is not None and estimate.high is not None:
        cell += f"\n{number(estimate.low)} to {number(estimate.high)}"
    unchanged = 1.0 if metric.ratio else 0.0
    if not estimate.excludes(unchanged):
        return Text(cell)
    return Text(cell, style="green" if (estimate.value > unchanged) == metric.more_is_better else "red")


def _quality(result: Mapping[str, Any]) -> Iterator[Table]:
    for against, rows in _by_baseline(result, result["rates"][0]):
        if not any(row["quality"] for row in rows):
            continue
        table = _titled(result, f"answers {against}", None)
        for head in ("greedy tokens equal", "outputs equal", "top-1 agreement", "NLL change, nats/token"):
            table.add_column(head, justify="right")
        for row in rows:
            if (found := row["quality"]) is None:
                table.add_row(Text(row["variant"]), *[NONE] * 4)
                continue
            change = Estimate(**found["nll_change"])
            interval = "" if change.low is None else f" [{change.low:+.4f}, {change.high:+.4f}]"
            shares = (found[name] for name in ("greedy_tokens_equal", "outputs_equal", "top1_agreement"))
            table.add_row(Text(row["variant"]), *(f"{share:.1%}" for share in shares), f"{change.value:+.4f}{interval}")
        yield table


# Plot.


def draw(path: str, result: Mapping[str, Any]) -> None:
    """Draw one row per load: ratios with their intervals; for a ladder, the cumulative ratio comes first."""
    from matplotlib.figure import Figure

    ladder = result["design"] == "ladder"
    names = [variant["name"] for variant in result["variants"]]
    rates = result["rates"]
    panels = len(DRAWN) + ladder
    figure = Figure(figsize=(3.6 * panels, (1.6 + 0.32 * len(names)) * len(rates)), layout="constrained")
    for axes, rate in zip(figure.subplots(len(rates), panels, squeeze=False, sharey=True), rates, strict=True):
        tables = list(_by_baseline(result, rate))
        if ladder:
            further = {row["variant"]: row for _, rows in tables for row in rows}
            _ratios(axes[0], names, list(further.values()), METRICS[0], "against the first", climb=True)
        for axis, path_ in zip(axes[ladder:], DRAWN, strict=True):
            metric = next(metric for metric in METRICS if metric.path == path_)
            _ratios(axis, names, tables[0][1] if tables else [], metric, tables[0][0] if tables else "")
        axes[0].set_yticks(range(len(names)), names, fontsize=8)
        axes[0].invert_yaxis()
        if rate is not None:
            axes[0].set_title(f"{rate:g} requests/s", loc="left")
    figure.savefig(path)


def _ratios(
    axis: Any, names: list[str], rows: list[dict[str, Any]], metric: Metric, against: str, *, climb: bool = False
) -> None:
    axis.axvline(1.0, color="gray", linewidth=0.8)
    known = [(row, Estimate(**row["changes"][metric.path])) for row in rows if metric.path in row["changes"]]
    if climb:
        steps = [(1.0, 0), *((found.value, names.index(row["variant"])) for row, found in known)]
        axis.plot(*zip(*steps, strict=True), color="C0", linewidth=0.8)
    for row, found in known:
        sides = None if found.low is None else [[found.value - found.low], [found.high - found.value]]
        axis.errorbar(found.value, names.index(row["variant"]), xerr=sides, fmt="o", capsize=3, color="C0")
    axis.set_xlabel(f"{metric.title}, ratio\n{against}", fontsize=8)
