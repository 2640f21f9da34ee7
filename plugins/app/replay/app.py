"""`python run.py app=replay replay.path=run.rec`: repeat what an engine did, or see what other parts would do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from dovetail.core.frontend.replicas import CheckedRouter
from dovetail.core.interfaces import App
from dovetail.core.recording.recording import Recording
from dovetail.plugins.app.bench.app import check_apart, check_writable
from dovetail.plugins.app.replay.config import ReplayConfig
from dovetail.plugins.app.replay.figures import FIGURES, figures
from dovetail.plugins.app.replay.lockstep import Divergence, Lockstep, recorded_queue
from dovetail.plugins.app.replay.parts import Pair, blamed, build, choices, compose_pair, notes
from dovetail.plugins.app.replay.simulate import Simulation, recorded_outcome
from dovetail.plugins.app.replay.timeline import write_timeline
from dovetail.plugins.app.replay.times import StepTimes
from dovetail.plugins.app.tables import NONE, console, figures_table, number, share

if TYPE_CHECKING:
    from dovetail.core.compose import Composition


class ReplayApp(App):
    config: ReplayConfig

    def run(self, composition: Composition, prompts: Sequence[str]) -> int:
        config = self.config
        check_writable(config.out, "replay.out")
        check_writable(config.trace, "replay.trace")
        check_apart({"replay.out": config.out, "replay.trace": config.trace})
        recording = Recording(config.path, "replay.path")
        pair = compose_pair(recording, composition)
        if config.trace is not None:
            write_timeline(config.trace, recording)
        result = replay(recording, pair)
        if config.out is not None:
            Path(config.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        _show(result)
        return 1 if pair.same and result["divergence"] else 0


def replay(recording: Recording, pair: Pair) -> dict[str, Any]:
    """Return the first difference, and the figures of each side."""
    # The recording has the plans of one engine.
    divergence, evictions = (None, None) if pair.replicated else _diverges(recording, pair)
    sides = {"recorded": figures(recorded_outcome(recording)) | {"evictions": evictions}}
    error = None
    if divergence is not None or pair.replicated:
        # The recorded parts are simulated too: only sides with the same step times can be compared.
        times = StepTimes(recording)
        error = times.error
        compared = {"recorded parts": pair.recorded, "these parts": pair.given}
        for name, composition in compared.items():
            if name == "recorded parts" or not pair.same:
                with blamed(composition):
                    parts = [build(recording, composition, pair.recorded) for _ in range(composition.engine.dp)]
                    router = CheckedRouter(composition)
                    sides[name] = figures(Simulation(recording, parts, times, router).run())
    return {
        "schema": "dovetail.replay/1",
        "path": recording.path,
        "recorded": list(choices(pair.recorded)),
        "changed": pair.changed(),
        "notes": notes(recording, pair),
        "decisions": len(recording.plans),
        "replicas": pair.given.engine.dp,
        "divergence": None if divergence is None else asdict(divergence),
        "step_time_error": error,
        "figures": sides,
    }


def _diverges(recording: Recording, pair: Pair) -> tuple[Divergence | None, int | None]:
    """Return the first difference, and the evictions of the recorded run: known if its own parts repeat its plans."""
    with blamed(pair.given):
        replayed = Lockstep(recording, build(recording, pair.given, pair.recorded))
        found = replayed.run()
    if found is None:
        return None, replayed.evictions if pair.same else None
    found.recorded = recorded_queue(recording, found.step)
    if not pair.same:
        # Up to this step both sides had equal plans, so the recorded parts show the state of the other side.
        with blamed(pair.recorded):
            before = Lockstep(recording, build(recording, pair.recorded, pair.recorded)).run(until=found.step)
        if before is not None and before.step == found.step and not before.differences:
            found.recorded = before.replayed
    return found, None


def _show(result: dict[str, Any]) -> None:
    out = console(120, highlight=False)
    changes = " ".join(result["changed"]) or "the recorded parts"
    out.print(f"{result['path']}: {' '.join(result['recorded'])}; replayed with {changes}", markup=False)
    for note in result["notes"]:
        out.print(note, markup=False)
    divergence = result["divergence"]
    if result["replicas"] > 1:
        out.print(f"{result['replicas']} replicas: their plans have none in the recording to be compared with")
    elif divergence is None:
        out.print(f"all {result['decisions']} plans are equal", markup=False)
    else:
        _show_divergence(out, divergence)
    sides = result["figures"]
    table = figures_table("figures", "", sides)
    for name, title in FIGURES.items():
        show = share if name == "hit_rate" else number
        table.add_row(Text(title), *(show(side[name]) for side in sides.values()))
    if result["step_time_error"] is not None:
        table.caption = (
            "recorded: measured. Other columns: simulated with step times fitted to the recording "
            f"(median error {result['step_time_error']:.0%}); compare these with each other"
        )
        table.caption_justify = "left"
    out.print(table)


def _show_divergence(out: Any, divergence: dict[str, Any]) -> None:
    out.print(f"first difference at step {divergence['step']}, {divergence['clock']:.3f} s after the start:")
    for line in divergence["differences"]:
        out.print(f"  {line}", markup=False)
    sides = {name: divergence[name] for name in ("recorded", "replayed") if divergence[name]}
    table = figures_table("state after this decision", "", sides)
    for name in divergence["replayed"]:
        table.add_row(Text(name), *(Text(_value(side.get(name, NONE))) for side in sides.values()))
    out.print(table)


def _value(value: Any) -> str:
    if isinstance(value, list):
        more = f" and {len(value) - 8} more" if len(value) > 8 else ""
        return " ".join(map(str, value[:8])) + more
    return str(value)
