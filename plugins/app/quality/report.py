"""Report of app=quality: a table on the terminal, and a plot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.text import Text

from dovetail.plugins.app.ablate.stats import CONFIDENCE, Estimate
from dovetail.plugins.app.tables import NONE, console, figures_table, share, simulated_title

COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("perplexity_change", "perplexity change", lambda value: f"{value:+.2%}"),
    ("kl", "KL, nats/token", lambda value: f"{value:.3g}"),
    ("top1_agreement", "top-1 agreement", lambda value: f"{value:.2%}"),
    ("divergence_length", "greedy tokens equal", lambda value: f"{value:.1f}"),
)
"""Key of an estimate among the figures, title, and how a value is written."""


def show(result: Mapping[str, Any]) -> None:
    out = console(150, highlight=False)
    out.print(_where(result), markup=False)
    out.print(_table(result))
    for one in result["variants"]:
        for what in ("skipped", "failure"):
            if one[what]:
                how = "was skipped" if what == "skipped" else "failed"
                out.print(Text.assemble((one["name"], "bold"), f" {how}: {one[what]}"))
    if result["interrupted"]:
        out.print("[bold red]interrupted[/]: the figures cover only what was measured before")


def _where(result: Mapping[str, Any]) -> str:
    config = result["config"]["quality"]
    device = next((one["startup"]["device"] for one in result["variants"] if one["startup"]), "no device")
    text = result["text"]
    words = f"{config['windows']} windows of {config['length']} tokens of {text['name']} ({text['sha256']})"
    return f"{words}, greedy outputs of {config['tokens']} tokens, on {device}"


def _simulated(result: Mapping[str, Any]) -> str:
    return simulated_title(one["startup"] for one in result["variants"])


def _table(result: Mapping[str, Any]) -> Any:
    tokens = result["config"]["quality"]["tokens"]
    columns = [column for column in COLUMNS if tokens or column[0] != "divergence_length"]
    heads = [title for _, title, _ in columns]
    more = ["outputs equal"] if tokens else []
    title = f"{_simulated(result)}against {result['variants'][0]['name']}, with {CONFIDENCE:.0%} intervals over windows"
    table = figures_table(title, "variant", ["perplexity", *heads, "KL p99", *more], overflow="fold")
    for one in result["variants"]:
        if (figures := one["figures"]) is None:
            continue
        cells = [_cell(figures.get(key), words) for key, _, words in columns]
        p99 = f"{figures['kl_p99']:.3g}" if "kl_p99" in figures else NONE
        equal = [share(figures.get("outputs_equal"))] if tokens else []
        table.add_row(Text(one["name"]), f"{figures['perplexity']:.4g}", *cells, p99, *equal)
    return table


def _cell(found: Mapping[str, Any] | None, words: Callable[[float], str]) -> str:
    """Format a cell with the interval on the line below its estimate."""
    if found is None:
        return NONE
    estimate = Estimate(**found)
    interval = "" if estimate.low is None else f"\n{words(estimate.low)} to {words(estimate.high)}"
    return words(estimate.value) + interval


def draw(path: str, result: Mapping[str, Any]) -> None:
    """Draw each figure of all variants with its interval."""
    from matplotlib.figure import Figure

    drawn = [one for one in result["variants"][1:] if one["figures"]]
    columns = [column for column in COLUMNS if any(column[0] in one["figures"] for one in drawn)]
    if not columns:
        return
    figure = Figure(figsize=(3.6 * len(columns), 1.4 + 0.32 * len(drawn)), layout="constrained")
    if mark := _simulated(result):
        figure.suptitle(mark.rstrip(": "))
    panels = figure.subplots(1, len(columns), squeeze=False, sharey=True)[0]
    for axis, (key, title, words) in zip(panels, columns, strict=True):
        for place, one in enumerate(drawn):
            found = Estimate(**one["figures"][key])
            sides = None if found.low is None else [[found.value - found.low], [found.high - found.value]]
            axis.errorbar(found.value, place, xerr=sides, fmt="o", capsize=3, color="C0")
        if key == "perplexity_change":
            axis.axvline(0.0, color="gray", linewidth=0.8)
        axis.tick_params("x", labelsize=8)
        axis.xaxis.set_major_formatter(lambda value, _, words=words: words(value))
        axis.set_xlabel(f"{title}\nagainst {result['variants'][0]['name']}", fontsize=8)
    panels[0].set_yticks(range(len(drawn)), [one["name"] for one in drawn], fontsize=8)
    panels[0].invert_yaxis()
    figure.savefig(path)
