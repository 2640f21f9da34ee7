"""Report of an ablation as one HTML file without scripts or external parts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from dovetail.plugins.app.ablate.compare import (
    BY_PATH,
    METRICS,
    Load,
    Metric,
    compared,
    loads,
    of_load,
    percent,
    summary,
    unit,
    verdict,
)
from dovetail.plugins.app.ablate.config import GateConfig
from dovetail.plugins.app.ablate.report import ANSWERS, answer_cells, captions, seen, sentences, void_notes
from dovetail.plugins.app.tables import NONE, number, share

TEMPLATE = "report.html.j2"
COST = "tpot_ms.median"
"""Figure of the other axis of the Pareto plot."""
GAIN = "output_tokens_per_s"
WIDTH, HEIGHT = 520, 300
"""Pixels of the plot."""
LINE = 13
"""Pixels between two names in the plot."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A change and its interval on a common axis, in percent of the axis."""

    name: str
    at: float
    low: float
    high: float
    unchanged: float
    """Place of no change."""
    text: str
    verdict: str
    """"better" or "worse" if significant, else ""."""


@dataclass(frozen=True, slots=True)
class Point:
    name: str
    x: float
    y: float
    label_y: float
    """Baseline of its name, which covers no other name."""
    best: bool
    """No other variant is better in both figures."""


def write_report(path: str, result: Mapping[str, Any]) -> None:
    folder = FileSystemLoader(Path(__file__).parent)
    pages = Environment(loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    config = result["config"]
    primary = BY_PATH[config["ablate"]["primary"]]
    shown = [_load(result, load, primary) for load in loads(result)]
    text = pages.get_template(TEMPLATE).render(
        result=result,
        primary=primary,
        sentences=list(sentences(result)),
        void_notes=list(void_notes(result)),
        loads=shown,
        variants=[
            one | {"yaml": yaml.safe_dump(one["composition"], sort_keys=False, allow_unicode=True)}
            for one in result["variants"]
        ],
        seed=config["engine"]["seed"],
        width=WIDTH,
        height=HEIGHT,
        answer_heads=ANSWERS,
        gated=GateConfig(**config["ablate"]["gate"]).limits,
    )
    Path(path).write_text(text + "\n", encoding="utf-8")


def _load(result: Mapping[str, Any], load: Load, primary: Metric) -> dict[str, Any]:
    named = {"variant", "baseline"}
    rows = [one | {key: load.name(one[key]) for key in named} for one in compared(result, load)]
    variants = {load.name(variant["name"]): variant for variant in of_load(result, load)}
    found = {name: summary(variant, load.rate) for name, variant in variants.items()}
    repeats = {name for name, variant in variants.items() if variant.get("repeats")}
    metrics = [metric for metric in METRICS if any(metric.path in one for one in found.values())]
    return {
        "title": load.title,
        "heads": [metric.title + (" (primary)" if metric is primary else "") for metric in metrics],
        "medians": {
            name: [(number if metric.ratio else share)(one.get(metric.path)) for metric in metrics]
            for name, one in found.items()
        },
        "changes": [(one, [_cell(one["changes"].get(metric.path), metric) for metric in metrics]) for one in rows],
        "captions": list(captions(result, load, rows)),
        "bars": list(_bars(rows, primary)),
        "plot": _plot({name: one for name, one in found.items() if name not in repeats}),
        "answers": [(one, answer_cells(one["quality"])) for one in rows] if any(one["quality"] for one in rows) else [],
    }


def _cell(change: Mapping[str, Any] | None, metric: Metric) -> list[str]:
    """Return the lines of a cell: change, interval, smallest effect to be seen."""
    if change is None:
        return [NONE]
    lines = [_value(change["value"], metric)]
    if change["low"] is not None:
        low, high = (percent(change[edge], metric) for edge in ("low", "high"))
        lines.append(f"[{low:+.1f}, {high:+.1f}]")
    if change["detectable"] is not None:
        lines.append(seen(change, metric))
    return lines


def _value(value: float, metric: Metric) -> str:
    return f"{percent(value, metric):+.1f} {unit(metric)}"


def _bars(rows: Sequence[Mapping[str, Any]], metric: Metric) -> Iterator[Bar]:
    known = [(one, one["changes"][metric.path]) for one in rows if metric.path in one["changes"]]
    # x2 and x0.5 are equally far from no change.
    place = math.log if metric.ratio else float
    edges = [place(edge) for _, c in known for edge in (c["value"], c["low"], c["high"]) if edge is not None]
    least, most = min([*edges, 0.0]), max([*edges, 0.0])
    scale = 100 / ((most - least) or 1.0)
    for one, change in known:
        low, high = (change["value"] if change[edge] is None else change[edge] for edge in ("low", "high"))
        at, low, high = ((place(edge) - least) * scale for edge in (change["value"], low, high))
        text = " ".join(_cell(change | {"detectable": None}, metric))
        name = f"{one['variant']} / {one['baseline']}"
        yield Bar(name, at, low, high, -least * scale, text, verdict(one, metric))


def _plot(found: Mapping[str, Mapping[str, float]]) -> dict[str, Any] | None:
    """Return the points, and the values at the ends of both axes; None = no variant has both figures."""
    known = {name: (one[COST], one[GAIN]) for name, one in found.items() if COST in one and GAIN in one}
    if not known:
        return None
    widest, highest = (1.1 * max(pair[i] for pair in known.values()) or 1.0 for i in (0, 1))
    labels = _spread({name: HEIGHT * (1 - gain / highest) + 4 for name, (_, gain) in known.items()})
    points = [
        Point(
            f"{name}: {gain:.4g} output tokens/s at a median TPOT of {cost:.3g} ms",
            WIDTH * cost / widest,
            HEIGHT * (1 - gain / highest),
            labels[name],
            not any(c <= cost and g >= gain and (c, g) != (cost, gain) for c, g in known.values()),
        )
        for name, (cost, gain) in known.items()
    ]
    return {"points": points, "x_end": f"{widest:.3g}", "y_end": f"{highest:.4g}"}


def _spread(wanted: Mapping[str, float]) -> dict[str, float]:
    """Move lines of text down until each is LINE pixels below the one above it."""
    found: dict[str, float] = {}
    last = -math.inf
    for name in sorted(wanted, key=lambda name: wanted[name]):
        found[name] = last = max(wanted[name], last + LINE)
    return found
