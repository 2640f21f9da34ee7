"""Report of the app `tune`: what was found, and what it gains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean

from rich.table import Table

from dovetail.core.tuning.search import Found
from dovetail.plugins.app.tables import NONE, console, figures_table


def show(results: Sequence[Found], wanted: int, cache: Path, all_kept: bool) -> None:
    """Print a line for each operation and key. `cache`: file with the entries. `all_kept`: whether they could be
    written to it, and to the exported file."""
    out = console(130, highlight=False)
    if results:
        out.print(_table(results))
    place = f"the entries are in {cache}" if all_kept else "not all entries could be written"
    out.print(f"{len(results)} of {wanted} tuned; {place}", markup=False, soft_wrap=True)
    if missing := wanted - len(results):
        out.print(f"{missing} are left: the same command continues with them")


def _table(results: Sequence[Found]) -> Table:
    heads = ("rows", "us, all rows", "time / before", "least", "at rows", "time / default")
    table = figures_table("times of a call; before: with the entries and predictions of engine.tune=auto", "", heads)
    groups: dict[str, list[Found]] = {}
    for found in results:
        name = f"{found.op} " + " ".join(f"{name}={value}" for name, value in found.key)
        groups.setdefault(name, []).append(found)
    for name, group in groups.items():
        ratios = {one.rows: one.best[1] / one.before for one in group if one.before}
        defaults = [one.best[1] / us for one in group for choice, us in one.times if choice is None and us]
        least = min(ratios, key=lambda rows: ratios[rows], default=None)
        table.add_row(
            name,
            str(len(group)),
            f"{sum(one.best[1] for one in group):.1f}",
            _mean(list(ratios.values())),
            NONE if least is None else f"{ratios[least]:.3f}",
            NONE if least is None else str(least),
            _mean(defaults),
        )
    return table


def _mean(ratios: Sequence[float]) -> str:
    kept = [ratio for ratio in ratios if ratio > 0]
    return f"{geometric_mean(kept):.3f}" if kept else NONE
