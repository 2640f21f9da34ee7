"""The report card: plain data, and its forms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.markup import escape

from dovetail.plugins.app.tables import NONE, console, figures_table, share

SCHEMA = "dovetail.check/1"
"""Format version of the card; changes when its readers have to change."""
PAGE = Path(__file__).with_name("card.html.jinja")
HEADS = {"output_tokens_per_s": "output tokens/s", "ttft_ms.median": "TTFT p50", "tpot_ms.median": "TPOT p50"}


def counts(group: Mapping[str, Any]) -> Counter[str]:
    return Counter(test["outcome"] for test in group["tests"])


def by_reason(group: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names of the tests that failed for each reason. A component that cannot be built fails all of them."""
    found: dict[str, list[str]] = {}
    for test in group["tests"]:
        if test["outcome"] == "failed":
            found.setdefault(test["reason"], []).append(test["test"])
    return found


def failed(card: Mapping[str, Any]) -> bool:
    return any(counts(group)["failed"] for group in card["groups"]) or any(
        b.get("failures") for b in card["benchmarks"]
    )


def sentence(test: str) -> str:
    """Return the name of a test in words."""
    return test.removeprefix("test_").replace("_", " ")


def change(estimate: Mapping[str, Any] | None) -> str:
    """Return a ratio with its interval: 1.31 [1.28, 1.34]."""
    if estimate is None:
        return NONE
    low, high = estimate["low"], estimate["high"]
    return f"{estimate['value']:.2f}" + ("" if low is None else f" [{low:.2f}, {high:.2f}]")


def print_card(card: Mapping[str, Any]) -> None:
    out = console(130, highlight=False)
    table = figures_table(f"report card of {card['checked']}", "tests", ("passed", "failed", "skipped", "seconds"))
    for group in card["groups"]:
        found = counts(group)
        seconds = sum(test["seconds"] for test in group["tests"])
        cells = [str(found[outcome]) for outcome in ("passed", "failed", "skipped")]
        table.add_row(escape(group["title"]), *cells, f"{seconds:.1f}")
    out.print(table)
    for group in card["groups"]:
        for reason, tests in by_reason(group).items():
            others = f", and {len(tests) - 1} others for the same reason" if len(tests) > 1 else ""
            what = escape(f"{group['title']}: {sentence(tests[0])}{others}")
            out.print(f"[bold red]failed[/] {what}\n  {escape(reason)}")
    for group in card["groups"]:
        found = counts(group)
        if found["skipped"] and not found["passed"] and not found["failed"]:
            out.print(f"[yellow]not tested[/] {escape(group['title'])}\n  {escape(group['tests'][0]['reason'])}")
    if rows := [row for benchmark in card["benchmarks"] for row in benchmark["rows"]]:
        table = figures_table(
            f"ratios, {card['confidence']:.0%} intervals", "variant", ("against", *HEADS.values(), "equal tokens")
        )
        for row in rows:
            cells = [change(row["changes"][path]) for path in HEADS]
            table.add_row(escape(row["variant"]), escape(row["baseline"]), *cells, share(row["greedy_tokens_equal"]))
        out.print(table)
    for benchmark in card["benchmarks"]:
        if benchmark["reason"]:
            out.print(escape(f"no benchmark of {benchmark['title']}: {benchmark['reason']}"))
        for failure in benchmark["failures"]:
            out.print(f"[bold red]failed[/] benchmark of {escape(benchmark['title'])}: {escape(failure)}")
    out.print("[bold red]failed[/]" if failed(card) else "[bold green]passed[/]")


def html(card: Mapping[str, Any]) -> str:
    from jinja2 import Environment

    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        PAGE.read_text(encoding="utf-8")
    )
    return page.render(
        card=card, heads=HEADS, failed=failed(card), counts=counts, sentence=sentence, change=change, share=share
    )
