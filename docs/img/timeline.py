"""Draw an exported timeline as a trace viewer shows it: `python docs/img/timeline.py trace.json out.svg`.

`replay.trace` exports it. `--steps 24 54` selects steps of the device by their order. The picture has a group of rows
for the engine, one for the requests, and an axis in milliseconds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

LEFT, WIDTH, ROW, TOP = 150, 900, 22, 62
"""Pixels: the names of rows, the whole picture, the height of a row, and everything above the first row."""
STYLE = """
  .card { fill: #ffffff; stroke: #c9ced6 } text { font: 11px system-ui, sans-serif; fill: #1f2328 }
  .head { font-weight: 600; font-size: 13px } .dim { fill: #57606a } .line { stroke: #d8dee4 } .group { fill: #f6f8fa }
  .schedule { fill: #a371f7 } .step { fill: #54aeff } .prefill { fill: #fb8f44 } .decode { fill: #4ac26b }
  .waiting { fill: #d0d7de } .on { fill: #0b0d10 } .hit { fill: #0969da } .preempted { fill: #cf222e }
  .end { fill: #57606a }
  @media (prefers-color-scheme: dark) {
    .card { fill: #161b22; stroke: #3d444d } text { fill: #e6edf3 } .dim { fill: #9aa4b2 } .line { stroke: #2d333b }
    .group { fill: #1f242c } .waiting { fill: #4d5560 } .on { fill: #0b0d10 } .hit { fill: #79c0ff }
  }
"""
KINDS = {
    "schedule": "host decides",
    "step": "device runs",
    "waiting": "waits",
    "prefill": "prompt chunk",
    "decode": "decode steps",
}
MARKS = {"prefix": ("hit", "prefix hit"), "preempted": ("preempted", "preempted before")}
"""First word of a mark -> its look and its name in the legend; every other mark is the end of a request."""


class Timeline:
    """Events of a trace between the starts of two steps."""

    def __init__(self, events: Sequence[dict[str, Any]], first: int, last: int) -> None:
        steps = sorted(e["ts"] for e in events if e["ph"] == "X" and kind(e) == "step")
        if not 0 <= first < last < len(steps):
            raise SystemExit(f"--steps {first} {last}: the trace has the steps 0 to {len(steps) - 1}")
        self.begin, self.end = steps[first], steps[last]
        names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        self.groups = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        self.bars = [e for e in events if e["ph"] == "X" and e["ts"] < self.end and e["ts"] + e["dur"] > self.begin]
        self.marks = [e for e in events if e["ph"] == "i" and self.begin <= e["ts"] <= self.end]
        self.rows: dict[tuple[int, int], tuple[int, str]] = {}
        """Row of the trace -> its top, and its name."""
        self.headings: list[tuple[int, str]] = []
        top = TOP
        for pid, group in self.groups.items():
            self.headings.append((top, group))
            top += ROW
            for row in sorted({(e["pid"], e["tid"]) for e in self.bars if e["pid"] == pid}):
                self.rows[row] = top, names[row]
                top += ROW
        self.height = top + 14
        self.parts: list[str] = []

    def x(self, moment: float) -> float:
        inside = min(max(moment, self.begin), self.end) - self.begin
        return LEFT + (WIDTH - LEFT - 20) * inside / (self.end - self.begin)

    def text(self, x: float, y: float, words: str, look: str = "") -> None:
        self.parts.append(f'<text x="{x:.1f}" y="{y:g}" class="{look}">{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, look: str, title: str = "") -> None:
        shape = f'<rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{height:g}" rx="2" class="{look}"'
        self.parts.append(f"{shape}><title>{escape(title)}</title></rect>" if title else f"{shape}/>")

    def legend(self) -> None:
        at = LEFT
        for look, words in KINDS.items():
            self.box(at, 12, 12, 12, look)
            self.text(at + 17, 22, words)
            at += 30 + 6 * len(words)
        for look, words in (*MARKS.values(), ("end", "end")):
            self.mark(at + 5, 12, look)
            self.text(at + 14, 22, words)
            at += 28 + 6 * len(words)

    def mark(self, x: float, y: float, look: str, title: str = "") -> None:
        title = f"<title>{escape(title)}</title>" if title else ""
        self.parts.append(f'<path d="M{x:.1f} {y:g} l5 6 l-5 6 l-5 -6 z" class="{look}">{title}</path>')

    def axis(self) -> None:
        length = (self.end - self.begin) / 1e3
        tick = next(size for size in _ticks() if length / size <= 10)
        for i in range(int(length / tick) + 1):
            x = self.x(self.begin + i * tick * 1e3)
            self.parts.append(f'<line x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{self.height - 12}" class="line"/>')
            self.text(x + 2, TOP - 10, f"{i * tick:g} ms", "dim")

    def svg(self) -> str:
        self.legend()
        for top, group in self.headings:
            self.box(1, top, WIDTH - 2, ROW, "group")
            self.text(12, top + 15, group, "head")
        self.axis()
        for top, name in self.rows.values():
            self.text(22, top + 15, name, "dim")
        for e in sorted(self.bars, key=lambda e: e["ts"]):
            top, x = self.rows[e["pid"], e["tid"]][0], self.x(e["ts"])
            width = max(self.x(e["ts"] + e["dur"]) - x - 0.6, 0.8)
            self.box(x, top + 3, width, ROW - 6, kind(e), f"{e['name']}: {e['dur'] / 1e3:.2f} ms")
            label = e["name"] if 6 * len(e["name"]) + 6 < width else e["name"].rpartition(" ")[2]
            if 6 * len(label) + 4 < width:
                self.text(x + 3, top + 15, label, "on" if kind(e) != "waiting" else "")
        for e in self.marks:
            if (row := self.rows.get((e["pid"], e["tid"]))) is not None:
                self.mark(self.x(e["ts"]), row[0] + 5, MARKS.get(kind(e), ("end", ""))[0], e["name"])
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" role="img">\n'
            "<title>Timeline of a recording: host, device, and a row for each request</title>\n"
            f"<style>{STYLE}</style>\n"
            f'<rect x="1" y="1" width="{WIDTH - 2}" height="{self.height - 2}" rx="5" class="card"/>\n'
        )
        return head + "\n".join(self.parts) + "\n</svg>\n"


def kind(event: dict[str, Any]) -> str:
    """Return the first word of an event's name."""
    return str(event["name"]).partition(" ")[0]


def _ticks() -> list[float]:
    return [size * 10.0**power for power in range(-3, 6) for size in (1, 2, 5)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("trace", type=Path, help="file of replay.trace")
    parser.add_argument("out", type=Path, help="SVG to write")
    parser.add_argument("--steps", type=int, nargs=2, metavar=("FIRST", "LAST"), help="steps to draw; default: all")
    args = parser.parse_args(argv)
    try:
        events = json.loads(args.trace.read_text(encoding="utf-8"))["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"{args.trace} is not a file that replay.trace wrote: {type(error).__name__}: {error}")
    last = sum(e["ph"] == "X" and kind(e) == "step" for e in events) - 1
    first, last = args.steps or (0, last)
    args.out.write_text(Timeline(events, first, last).svg(), encoding="utf-8")
    print(f"{args.out}: steps {first} to {last}")


if __name__ == "__main__":
    main()
