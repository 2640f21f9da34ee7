"""Several files of curve.py as one figure and one table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import ceil, log2
from os.path import commonpath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail import ConfigError, DovetailError, compose
from dovetail.core.engine.cost import of_another_gpu

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

SCHEMA = "dovetail.curve/1"
ROWS = (1, 16, 64, 128, 256, 512)
"""Numbers of rows in the table."""
COLUMNS = 3
"""Panels side by side. More are too small to read on a page of the docs."""
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
GIVE = "give files OUT.json that curve.py wrote"
MARKERS = "osD^v"
"""Markers of a panel's points: another one for every ten lines, since there are ten colours."""


@dataclass(frozen=True, slots=True)
class Curve:
    file: Path
    model: str
    """Name of the model, and its layout if that has several ranks."""
    label: str
    """Number format. If others of its model have the same one, what distinguishes it: the GPU or the file."""
    gpu: str
    limits_of: str | None
    """The GPU of the limits, if it is not the one that was measured."""
    context: int
    """Prompt tokens of each row."""
    rule: float
    points: list[dict[str, Any]]


# Files.


def read_curves(files: Sequence[Path]) -> list[Curve]:
    """Return the curves in the order of the files, those of a model together, each with its own label. Raises
    ConfigError for a file that curve.py did not write."""
    curves = [read(file) for file in files]
    if len({one.gpu for one in curves}) > 1:
        curves = [replace(one, label=f"{one.label}, {one.gpu}") for one in curves]
    number = Counter((one.model, one.label) for one in curves)
    folder = commonpath([file.resolve().parent for file in files])

    def named(one: Curve) -> Curve:
        return replace(one, label=f"{one.label} ({one.file.resolve().relative_to(folder).with_suffix('')})")

    curves = [one if number[one.model, one.label] == 1 else named(one) for one in curves]
    models = [one.model for one in curves]
    return sorted(curves, key=lambda one: models.index(one.model))


def read(file: Path) -> Curve:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--draw: {file} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ConfigError(f"--draw: {file} is not JSON ({error}); {GIVE}") from None
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != SCHEMA:
        raise ConfigError(f"--draw: {file} is not a curve (its schema is {schema}, not {SCHEMA}); {GIVE}")
    try:
        return _curve(file, found)
    except DovetailError as error:
        raise ConfigError(f"--draw: {file}: its overrides cannot be composed here ({error})") from None
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ConfigError(f"--draw: {file} is not a whole curve ({error!r}); measure it again") from None


def _curve(file: Path, found: dict[str, Any]) -> Curve:
    config = found["config"]
    choices, stated = found.get("choices"), config["cost"].get("device")
    if choices is None:
        # The first curves have neither these names nor the dtype, nor the device of the cost model.
        composition = compose(found["overrides"])
        choices, stated = composition.choices, getattr(composition.part("cost").config, "device", None)
    path = config["model"]["path"]
    name = choices["model"] if path is None else Path(path).name
    layout = [f"{key}={config['engine'][key]}" for key in ("tp", "pp", "dp") if config["engine"][key] > 1]
    format = choices["quant"]
    if format == "none":
        format = DTYPES[found.get("dtype") or config["model"]["hf"]["dtype"]]
    gpus = found["machine"]["gpus"] if config["engine"]["device"] != "cpu" else []
    if not found["points"]:
        raise IndexError("no points")
    gpu = gpus[0] if gpus else "cpu"
    return Curve(
        file=file,
        model=" ".join([name, *layout]),
        label=format,
        gpu=gpu.removeprefix("NVIDIA ") if gpus else "CPU",
        limits_of=stated if of_another_gpu(stated, gpu) else None,
        context=found["context"],
        rule=found["rule"],
        points=[_checked(point) for point in found["points"]],
    )


def _checked(point: dict[str, Any]) -> dict[str, Any]:
    """Return the point. Raises KeyError if it lacks something."""
    return {key: point[key] for key in ("rows", "graph_size", "ms", "limit_ms", "ratio_to_next_size")}


def broken(points: Sequence[dict[str, Any]], rule: float) -> list[dict[str, Any]]:
    """Return the points that take more than `rule` times the step at the next graph size."""
    return [point for point in points if (point["ratio_to_next_size"] or 0.0) > rule]


# Figure.


def draw_lines(axes: Axes, points: Sequence[dict[str, Any]], rule: float, look: tuple[str, str] = ("C0", "o")) -> None:
    """Draw a curve, its limit, and the points that break the rule. `look`: colour and marker."""
    colour, marker = look
    rows = [point["rows"] for point in points]
    style = {"color": colour, "linewidth": 1.2}
    axes.plot(rows, [point["ms"] for point in points], marker=marker, markersize=2.2, **style)
    axes.plot(rows, [point["limit_ms"] for point in points], linestyle="--", **style)
    bad = broken(points, rule)
    axes.plot([p["rows"] for p in bad], [p["ms"] for p in bad], "kx", markersize=7, markeredgewidth=1.6, zorder=3)
    axes.grid(alpha=0.3)


def draw_one(path: Path, points: Sequence[dict[str, Any]], rule: float, title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    draw_lines(axes, points, rule)
    axes.set(xlabel="rows", ylabel="ms per decode step", ylim=(0, None), title=title)
    axes.legend(handles=_styles("C0", {rule}))
    figure.savefig(path, dpi=120)


def draw_all(path: Path, curves: Sequence[Curve]) -> None:
    """Draw a panel for each model, with a line for each of its curves and its limit."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    models = list(dict.fromkeys(one.model for one in curves))
    labels = list(dict.fromkeys(one.label for one in curves))
    across = min(COLUMNS, len(models))
    down = ceil(len(models) / across)
    looks = {label: (f"C{i % 10}", MARKERS[i // 10 % len(MARKERS)]) for i, label in enumerate(labels)}
    handles = [
        *(Line2D([], [], color=colour, marker=marker, label=label) for label, (colour, marker) in looks.items()),
        *_styles("0.4", {one.rule for one in curves}),
    ]
    width = max(3.0 * across, 6.0)
    columns = _legend_columns([str(handle.get_label()) for handle in handles], width)
    most = max(point["rows"] for one in curves for point in one.points)
    ticks = range(0, most + 1, 1 << max(0, ceil(log2(most / 4.5))))
    figure = Figure(figsize=(width, 2.2 * down + 0.2 * ceil(len(handles) / columns) + 0.3), layout="constrained")
    panels = list(figure.subplots(down, across, squeeze=False, sharex=True).flat)
    for axes, model in zip(panels, models, strict=False):
        for one in curves:
            if one.model == model:
                draw_lines(axes, one.points, one.rule, looks[one.label])
        axes.set(ylim=(0, None), xticks=ticks)
        axes.set_title(model, fontsize=10)
        axes.tick_params(labelsize=8, labelbottom=True)
    for axes in panels[len(models) :]:
        axes.set_visible(False)
    figure.legend(handles=handles, loc="outside upper center", ncols=columns, fontsize=9, frameon=False)
    figure.supxlabel("rows", fontsize=10)
    figure.supylabel("ms per decode step", fontsize=10)
    figure.savefig(path, dpi=120)


def _legend_columns(labels: Sequence[str], inches: float) -> int:
    """Return the most columns that fit into the width. A line of the legend has 12 characters per inch, and the first
    columns have one entry more than the others."""
    for columns in range(len(labels), 1, -1):
        each, more = divmod(len(labels), columns)
        ends = accumulate([each + 1] * more + [each] * (columns - more), initial=0)
        widths = (max(map(len, labels[start:end])) + 6 for start, end in pairwise(ends))
        if sum(widths) <= 12 * inches:
            return columns
    return 1


def _styles(colour: str, rules: set[float]) -> list[Line2D]:
    """Entries of the legend for the two lines and the mark."""
    from matplotlib.lines import Line2D

    over = " or ".join(f"{rule:g}" for rule in sorted(rules))
    return [
        Line2D([], [], color=colour, label="measured"),
        Line2D([], [], color=colour, linestyle="--", label="limit"),
        Line2D([], [], color="k", marker="x", linestyle="", label=f"over {over} x the next graph size"),
    ]


# Table.


def markdown(curves: Sequence[Curve]) -> Iterator[str]:
    """Lines of a table with a line for each curve, and above it what all curves share."""
    measured = {point["rows"] for one in curves for point in one.points if point["rows"] == point["graph_size"]}
    rows = [n for n in ROWS if n in measured]
    about: dict[str, Callable[[Curve], str]] = {
        "prompt tokens a row": lambda one: str(one.context),
        "rule": lambda one: f"{one.rule:g}",
    }
    columns = {name: value for name, value in about.items() if len(set(map(value, curves))) > 1}
    shared = [f"{name}: {value(curves[0])}" for name, value in about.items() if name not in columns]
    gpus = dict.fromkeys(one.gpu for one in curves)
    stated = "; ".join([f"GPU: {' and '.join(gpus)}", *shared])
    yield f"ms per decode step by number of rows, in brackets its ratio to the limit. {stated}."
    yield ""
    head = ("model", "format", *columns, *map(str, rows), "largest ratio to the next size", "rule kept")
    yield _line(head)
    yield _line(["---"] * len(head))
    for one in curves:
        found = {point["rows"]: point for point in one.points}
        cells = (_cell(found[n]) if n in found else "-" for n in rows)
        bad = ", ".join(str(point["rows"]) for point in broken(one.points, one.rule))
        ends = (_largest(one.points), f"breaks at {bad}" if bad else "PASS")
        yield _line((one.model, one.label, *(value(one) for value in columns.values()), *cells, *ends))


def _cell(point: dict[str, Any]) -> str:
    return f"{point['ms']:#.3g}".rstrip(".") + f" ({point['ms'] / point['limit_ms']:.2f})"


def _largest(points: Sequence[dict[str, Any]]) -> str:
    worst = max((p for p in points if p["ratio_to_next_size"] is not None), key=_ratio, default=None)
    return "-" if worst is None else f"{_ratio(worst):.3f} at {worst['rows']}"


def _ratio(point: dict[str, Any]) -> float:
    return float(point["ratio_to_next_size"])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
