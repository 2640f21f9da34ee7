"""Report of an ablation: tables on the terminal, and a plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from dovetail.plugins.app.ablate.compare import (
    BY_PATH,
    METRICS,
    Load,
    Metric,
    compared,
    loads,
    of_load,
    sentence,
    summary,
    unit,
    verdict,
)
from dovetail.plugins.app.ablate.conditions import unchecked
from dovetail.plugins.app.ablate.config import VoidConfig
from dovetail.plugins.app.ablate.stats import CONFIDENCE, Estimate
from dovetail.plugins.app.tables import NONE, console, figures_table, number, share, simulated_title

ANSWERS = ("greedy tokens equal", "outputs equal", "top-1 agreement", "NLL change, nats/token")
MOST = 400
"""Greatest width of a table in a file or a pipe, characters."""
DRAWN = ("output_tokens_per_s", "ttft_ms.median", "tpot_ms.median")


def show(result: Mapping[str, Any]) -> None:
    out = console(150, highlight=False)
    out.print(_where(result))
    tables = [table for load in loads(result) for table in (*_figures(result, load), *_changes(result, load))]
    tables += _quality(result)
    if tables and not out.is_terminal:
        # A file or a pipe has room for the names of variants.
        out.width = max(
            out.width, *(out.measure(table, options=out.options.update(width=MOST)).maximum for table in tables)
        )
    for table in tables:
        out.print(table)
    for line in _tuned_otherwise(result):
        out.print(line)
    for line in sentences(result):
        out.print(line, markup=False)
    for line in void_notes(result):
        out.print(f"[bold red]{_plain(line)}[/]")
    for variant in result["variants"]:
        if variant["skipped"]:
            out.print(f"[bold]{_plain(variant['name'])}[/] was skipped: {_plain(variant['skipped'])}")
        if variant["failure"]:
            round_, reason = variant["failure"]["round"] + 1, _plain(variant["failure"]["reason"])
            out.print(f"[bold red]{_plain(variant['name'])}[/] failed in round {round_}: {reason}")
    if result["interrupted"]:
        out.print("[bold red]interrupted[/]: the figures cover only what was measured before")


def _tuned_otherwise(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each variant whose kernels ran with another tuning table than those of the first start."""
    starts = [(v["name"], start["startup"].get("tuning", "")) for v in result["variants"] for start in v["starts"]]
    for name in dict.fromkeys(name for name, tuning in starts if tuning != starts[0][1]):
        others = ", ".join(sorted({tuning or "none" for one, tuning in starts if one == name}))
        yield (
            f"[bold red]{_plain(name)}[/] ran with tuning table {others}, {_plain(starts[0][0])} first with "
            f"{starts[0][1] or 'none'}: part of their difference comes from other choices of kernels"
        )


def sentences(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield what was found about each variant, and how large an effect had to be in order to be seen."""
    primary = result["config"]["ablate"]["primary"]
    if words := simulated(result):
        yield f"{words}drafts were accepted by a coin, so the text has no meaning"
    if all_void(result):
        yield "every round is void: nothing can be said about the variants"
    for one in result["comparisons"]:
        change = one["changes"].get(primary)
        if one["repeats"] or (change is None and not one["gate"] and all_void(result)):
            continue
        noise = f" ({seen(change, BY_PATH[primary])})" if change and change["detectable"] is not None else ""
        against = f", against {one['baseline']}" if result["design"] == "ladder" else ""
        yield f"{sentence(one, primary)}{noise}{against}"


def void_notes(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the rounds that do not count, and the parts of the rule that could not be applied."""
    for number_, reason in result["void_rounds"].items():
        yield f"round {int(number_) + 1} does not count: {reason}"
    rule, gpu = VoidConfig(**result["config"]["ablate"]["void"]), bool(result["machine"]["gpus"])
    starts = [start.get("conditions", {}) for variant in result["variants"] for start in variant["starts"]]
    missing = Counter(name for found in starts for name in unchecked(rule, found, gpu=gpu))
    for name, times in missing.items():
        yield f"ablate.void.{name} could not be checked in {times} of {len(starts)} starts, since its value is unknown"


def all_void(result: Mapping[str, Any]) -> bool:
    """Whether no round counts."""
    return len(result["void_rounds"]) >= result["config"]["ablate"]["rounds"]


def seen(change: Mapping[str, Any], metric: Metric) -> str:
    """State the smallest effect that could have been seen, in the direction of the change: what x4 is upwards, is 75 %
    downwards."""
    least = change["detectable"]
    if metric.ratio and change["value"] < 1:
        least /= 1 + least
    return f"sees {100 * least:.{0 if least >= 1 else 1}f} {unit(metric)}"


def estimate_of(change: Mapping[str, Any]) -> Estimate:
    return Estimate(**{field: change[field] for field in ("value", "low", "high", "samples", "unit")})


def _plain(text: str) -> str:
    return text.replace("[", "\\[")


def _where(result: Mapping[str, Any]) -> str:
    config, startups = result["config"]["ablate"], [s["startup"] for v in result["variants"] for s in v["starts"]]
    device = startups[0]["device"] if startups else "no device"
    runs = f"{_many(config['rounds'], 'round')} of {_many(config['runs'], 'run')}"
    return f"workload={result['workload']} on {device}, {runs}; the same requests for all"


def _many(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number > 1 else "")


def _table(result: Mapping[str, Any], title: str, load: Load, heads: Iterable[str]) -> Table:
    at = f", {load.title}" if load.title else ""
    return figures_table(
        simulated(result) + title + at, "step" if result["design"] == "ladder" else "variant", heads, overflow="fold"
    )


def simulated(result: Mapping[str, Any]) -> str:
    """Return what begins the titles of tables if drafts were accepted by a coin."""
    return simulated_title(start.get("startup") for v in result["variants"] for start in v.get("starts", ()))


def _figures(result: Mapping[str, Any], load: Load) -> Iterator[Table]:
    rows = [(variant, summary(variant, load.rate)) for variant in of_load(result, load)]
    metrics = [metric for metric in METRICS if any(metric.path in found for _, found in rows)]
    if not metrics:
        return
    title = "medians over runs; latency in ms, output in tokens/s"
    table = _table(result, title, load, (metric.title for metric in metrics))
    for variant, found in rows:
        cells = ((number if metric.ratio else share)(found.get(metric.path)) for metric in metrics)
        table.add_row(Text(load.name(variant["name"])), *cells)
    yield table


def _by_baseline(result: Mapping[str, Any], load: Load) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield (title, comparisons). A ladder has two tables: against the previous step and against the first."""
    rows = compared(result, load)
    if result["design"] != "ladder":
        if rows:
            yield f"against {load.name(rows[0]['baseline'])}", rows
        return
    nearest = {one["variant"]: one for one in reversed(rows)}
    yield "against the previous step", [one for one in rows if nearest[one["variant"]] is one]
    first = load.name(of_load(result, load)[0]["name"])
    if further := [one for one in rows if nearest[one["variant"]] is not one]:
        yield f"against the first, {first}", further


def _changes(result: Mapping[str, Any], load: Load) -> Iterator[Table]:
    for against, rows in _by_baseline(result, load):
        metrics = [metric for metric in METRICS if any(metric.path in row["changes"] for row in rows)]
        if not metrics:
            continue
        title = f"{against}: ratios (differences for shares), {CONFIDENCE:.0%} intervals"
        primary = result["config"]["ablate"]["primary"]
        heads = (metric.title + (" (primary)" if metric.path == primary else "") for metric in metrics)
        table = _table(result, title, load, heads)
        for row in rows:
            cells = [_change(metric, row) for metric in metrics]
            table.add_row(Text(load.name(row["variant"])), *cells)
        table.caption = "\n".join(captions(result, load, rows))
        table.caption_justify = "left"
        yield table


def captions(result: Mapping[str, Any], load: Load, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield how the changes of these rows are to be read."""
    changes = [change for row in rows for change in row["changes"].values()]
    if any(change["unit"] == "runs" for change in changes):
        yield "one round: intervals are over its runs and do not include the variation between starts"
    elif any(change["low"] is None for change in changes):
        yield "one sample each: no interval (ablate.rounds)"
    if any(change["detectable"] is not None for change in changes):
        yield "sees: smallest effect that would have been seen with probability 80 %, from the repeated baseline"
    if exact := [row["primary"]["exact"] for row in rows if row.get("primary")]:
        yield "p of the primary figure: " + ("exact sign flips of rounds" if all(exact) else "Student's t over rounds")
    if _same_requests(result, load):
        yield "all rounds had the same requests: intervals do not cover differences between requests"
    yield "all figures but the primary one are exploratory"


def _same_requests(result: Mapping[str, Any], load: Load) -> bool:
    """Whether a workload that never changes, such as a recording, was measured in several rounds."""
    starts = [start for variant in of_load(result, load) for start in variant["starts"]]
    runs = [run for start in starts for one in start["loads"] if one["rate"] == load.rate for run in one["runs"]]
    return len({start["round"] for start in starts}) > 1 and len({run.get("requests_hash") for run in runs}) == 1


def _change(metric: Metric, row: Mapping[str, Any]) -> Text:
    """Format a cell with the interval on the line below its estimate; one line for both would be too wide. Only a
    significant change of the primary metric has a colour."""
    if (change := row["changes"].get(metric.path)) is None:
        return Text(NONE)
    estimate = estimate_of(change)

    def words(value: float) -> str:
        return f"{value:.3g}" if metric.ratio else f"{value * 100:+.1f}"

    cell = ("x" if metric.ratio else "") + words(estimate.value)
    if estimate.low is not None and estimate.high is not None:
        cell += f"\n{words(estimate.low)} to {words(estimate.high)}"
    if change["detectable"] is not None:
        cell += "\n" + seen(change, metric).removesuffix(" points")
    return Text(cell, style={"better": "green", "worse": "red"}.get(verdict(row, metric), ""))


def _quality(result: Mapping[str, Any]) -> Iterator[Table]:
    # Answers do not depend on the rate.
    first = {load.block: load for load in reversed(loads(result))}
    found_by = [(load, *table) for load in reversed(first.values()) for table in _by_baseline(result, load)]
    for load, against, rows in found_by:
        if not any(row["quality"] for row in rows):
            continue
        table = _table(result, f"answers {against}", Load(load.block, None), ANSWERS)
        for row in rows:
            table.add_row(Text(load.name(row["variant"])), *answer_cells(row["quality"]))
        yield table


def answer_cells(found: Mapping[str, Any] | None) -> list[str]:
    """Return the cells under ANSWERS. None = the variant or its baseline has no answers."""
    if found is None:
        return [NONE] * len(ANSWERS)
    change = Estimate(**found["nll_change"])
    interval = "" if change.low is None else f" [{change.low:+.4f}, {change.high:+.4f}]"
    shares = [share(found[name]) for name in ("greedy_tokens_equal", "outputs_equal", "top1_agreement")]
    return [*shares, f"{change.value:+.4f}{interval}"]


# Plot.


def draw(path: str, result: Mapping[str, Any]) -> None:
    """Draw one row per load: ratios with their intervals; for a ladder, the cumulative ratio comes first."""
    from matplotlib.figure import Figure

    ladder = result["design"] == "ladder"
    drawn = loads(result)
    panels = len(DRAWN) + ladder
    most = max((len(of_load(result, load)) for load in drawn), default=1)
    figure = Figure(figsize=(3.6 * panels, (1.6 + 0.32 * most) * max(len(drawn), 1)), layout="constrained")
    if words := simulated(result):
        figure.suptitle(words.rstrip(": "))
    grid = figure.subplots(max(len(drawn), 1), panels, squeeze=False, sharey="row")
    for axes, load in zip(grid, drawn, strict=False):
        names = [variant["name"] for variant in of_load(result, load)]
        tables = list(_by_baseline(result, load))
        if ladder:
            further = {row["variant"]: row for _, rows in tables for row in rows}
            _ratios(axes[0], names, list(further.values()), METRICS[0], "against the first", climb=True)
        for axis, path_ in zip(axes[ladder:], DRAWN, strict=True):
            metric = next(metric for metric in METRICS if metric.path == path_)
            _ratios(axis, names, tables[0][1] if tables else [], metric, tables[0][0] if tables else "")
        axes[0].set_yticks(range(len(names)), [load.name(name) for name in names], fontsize=8)
        axes[0].invert_yaxis()
        axes[0].set_title(load.title, loc="left", fontsize=9)
    figure.savefig(path)


def _ratios(
    axis: Any, names: list[str], rows: list[dict[str, Any]], metric: Metric, against: str, *, climb: bool = False
) -> None:
    axis.axvline(1.0, color="gray", linewidth=0.8)
    known = [(row, estimate_of(row["changes"][metric.path])) for row in rows if metric.path in row["changes"]]
    if climb:
        steps = [(1.0, 0), *((found.value, names.index(row["variant"])) for row, found in known)]
        axis.plot(*zip(*steps, strict=True), color="C0", linewidth=0.8)
    for row, found in known:
        sides = None if found.low is None else [[found.value - found.low], [found.high - found.value]]
        axis.errorbar(found.value, names.index(row["variant"]), xerr=sides, fmt="o", capsize=3, color="C0")
    axis.set_xlabel(f"{metric.title}, ratio\n{against}", fontsize=8)
