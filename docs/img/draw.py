"""Draw the pictures of the docs: `python docs/img/draw.py` writes them to this folder, and a test compares.

Each picture is a card with a background, readable on a light and on a dark page.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from timeline import Timeline

STYLE = """
  .card { fill: #ffffff; stroke: #c9ced6 } text { font: 13px system-ui, sans-serif; fill: #1f2328 }
  .small { font-size: 11.5px } .head { font-weight: 600 } .mid { text-anchor: middle } .dim { fill: #57606a }
  rect { rx: 5; stroke-width: 1 } .host { fill: #ddf4ff; stroke: #54aeff } .device { fill: #dafbe1; stroke: #4ac26b }
  .plain { fill: #f6f8fa; stroke: #8c959f } .wait { fill: none; stroke: #8c959f; stroke-dasharray: 4 3 }
  line, path { stroke: #57606a; stroke-width: 1.3; fill: none } marker path { fill: #57606a; stroke: none }
  @media (prefers-color-scheme: dark) {
    .card { fill: #161b22; stroke: #3d444d } text { fill: #e6edf3 } .dim { fill: #9aa4b2 }
    .host { fill: #0c2d4d; stroke: #388bfd } .device { fill: #0f3320; stroke: #3fb950 }
    .plain { fill: #21262d; stroke: #6e7681 } .wait { stroke: #6e7681 } line, path { stroke: #9aa4b2 }
    marker path { fill: #9aa4b2 }
  }
"""


class Picture:
    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def text(self, x: float, y: float, words: str, look: str = "") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{look}">{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, look: str, *lines: str) -> None:
        """Add a box with centred lines of text; if there are several lines, the first one is the heading."""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{look}"/>')
        top = y + height / 2 + 4.5 - 8 * (len(lines) - 1)
        for i, line in enumerate(lines):
            weight = "head" if len(lines) > 1 and not i else ("small" if i else "")
            self.text(x + width / 2, top + 16 * i, line, f"mid {weight}".strip())

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.parts.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" marker-end="url(#tip)"/>')

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img">\n'
            f"<title>{escape(self.title)}</title>\n<style>{STYLE}</style>\n"
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0 8 4 0 8z"/></marker></defs>\n'
            f'<rect x="1" y="1" width="{self.width - 2}" height="{self.height - 2}" class="card"/>\n'
        )
        return head + "\n".join(self.parts) + "\n</svg>\n"


def step() -> Picture:
    """Timeline with two plans in flight, and the parts that one plan passes."""
    p = Picture(880, 420, "The step as a pipeline with two plans in flight")
    p.text(20, 28, "engine.depth = 2: the host plans step n + 1 while the device runs step n", "head")
    p.text(20, 68, "host, rank 0", "dim small")
    p.text(20, 150, "device, each rank", "dim small")
    start, width = 190, 170
    p.box(120, 48, 64, 34, "host", "plan 0")
    p.arrow(184, 82, start + 4, 126)
    for n in range(4):
        x = start + width * n
        p.box(x, 128, width - 4, 36, "device", f"runs plan {n}")
        if n == 0:
            p.box(x + 6, 48, 64, 34, "host", "plan 1")
            p.box(x + 74, 48, 92, 34, "wait", "waits for 0")
            p.arrow(x + 60, 82, x + width + 4, 126)
            continue
        p.arrow(x - 6, 128, x + 2, 84)
        p.box(x - 2, 48, 66, 34, "host", f"update {n - 1}")
        if n < 3:
            p.box(x + 68, 48, 56, 34, "host", f"plan {n + 1}")
            p.arrow(x + 110, 82, x + width + 4, 126)
    p.text(20, 194, "down: StepPlan, a diff without token values. up: StepResult, tokens, logprobs.", "dim small")
    p.parts.append('<line x1="20" y1="212" x2="860" y2="212"/>')
    p.text(20, 238, "inside one plan: kinds of parts, and what each does", "head")
    p.text(20, 262, "host", "dim small")
    p.box(20, 270, 180, 46, "host", "scheduler", "which rows, how many tokens")
    p.arrow(200, 293, 222, 293)
    p.box(224, 270, 190, 46, "host", "kv_cache", "reserve, fork, publish pages")
    p.arrow(414, 293, 436, 293)
    p.box(438, 270, 150, 46, "host", "executor", "sends the plan to ranks")
    p.arrow(588, 293, 610, 293)
    p.box(612, 270, 248, 46, "device", "apply the diff", "slots, tokens, page tables, drafts")
    p.arrow(736, 316, 736, 344)
    p.text(20, 340, "device", "dim small")
    p.box(612, 346, 248, 52, "device", "model: each layer", "quant · attention · collective")
    p.arrow(612, 372, 592, 372)
    p.box(424, 346, 166, 52, "device", "logits", "processors, in order")
    p.arrow(424, 372, 404, 372)
    p.box(214, 346, 188, 52, "device", "sample and verify drafts", "part of the core")
    p.arrow(214, 372, 194, 372)
    p.box(20, 346, 172, 52, "device", "spec_decode", "drafts for the next step")
    return p


def house() -> Picture:
    """Storeys of the code and the direction of imports."""
    p = Picture(880, 404, "The four storeys of the code")
    p.text(20, 28, "A storey imports only storeys below it. lint-imports checks this.", "head")
    p.text(20, 58, "plugins and apps", "dim small")
    p.box(20, 66, 400, 54, "plain", "plugins/<kind>/", "built-in components; one kind imports no other")
    p.box(460, 66, 400, 54, "plain", "your package", "found by the entry-point group `dovetail`")
    p.arrow(440, 122, 440, 144)
    p.text(20, 138, "front-end", "dim small")
    p.box(
        20,
        146,
        840,
        54,
        "host",
        "core/frontend/",
        "text and clients: LLM, request table, engine loop, engine processes, replicas",
    )
    p.arrow(440, 202, 440, 224)
    p.text(20, 218, "engine and worker", "dim small")
    p.box(20, 226, 270, 54, "host", "core/engine/", "host loop of rank 0: plans and results")
    p.box(305, 226, 270, 54, "plain", "core/parallel/", "plans and results between processes")
    p.box(590, 226, 270, 54, "device", "core/worker/", "each rank: state, forward, sampling")
    p.text(305, 298, "memory/, layers/, ops/: libraries of this storey", "dim small")
    p.arrow(155, 282, 155, 312)
    p.arrow(725, 282, 725, 312)
    p.text(20, 306, "interfaces", "dim small")
    p.box(20, 314, 270, 64, "plain", "core/compose/", "finds, chooses and checks parts; no torch")
    p.box(305, 314, 555, 64, "device", "core/interfaces/", "the contracts, one file per kind; StepPlan, StepResult")
    return p


def timeline() -> Timeline:
    """Thirty steps of a stored recording, from the events that `replay.trace` writes."""
    from dovetail.core.recording.recording import Recording
    from dovetail.plugins.app.replay.timeline import trace_events

    stored = Path(__file__).parents[2] / "tests" / "unit" / "recording" / "stored" / "priority-prefix_hash.rec"
    return Timeline(list(trace_events(Recording(str(stored), "replay.path"))), 24, 54)


PICTURES = {"step.svg": step, "timeline.svg": timeline, "house.svg": house}


def main() -> None:
    for name, draw in PICTURES.items():
        (Path(__file__).parent / name).write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
