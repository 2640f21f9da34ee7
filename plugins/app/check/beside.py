"""The benchmark of a report card: app=ablate over a component and the built-in ones beside it."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.core.compose import ENGINE_NODES, KINDS, Registered, compose
from dovetail.core.errors import DovetailError
from dovetail.plugins.app.ablate.variants import key_of

if TYPE_CHECKING:
    from dovetail.core.compose import Composition

_NOT_COMPARED = {
    "model": "other models give other work",
    "router": "routers need replicas",
    "collective": "collectives need ranks",
    "experts": "placements need ranks and a model with experts",
}
"""Kind -> why no benchmark of one engine compares its components."""
METRICS = ("output_tokens_per_s", "ttft_ms.median", "tpot_ms.median")
SMALL = ("ablate.runs=1", "ablate.warmup=4", "ablate.quality.prompts=2", "ablate.quality.tokens=16")


def measure(registered: Registered, composition: Composition, rounds: int, beside: Sequence[str]) -> dict[str, Any]:
    """Return the comparisons with the component that the composition chooses, or the reason why there are none."""
    kind, name = registered.component.kind, registered.component.name
    found: dict[str, Any] = {"title": f"{kind}={name}", "reason": None, "failures": [], "rows": []}
    if kind not in ENGINE_NODES or kind in _NOT_COMPARED:
        return found | {"reason": _NOT_COMPARED.get(kind, "an engine has no such component")}
    with tempfile.TemporaryDirectory(prefix="dovetail-check-") as folder:
        out = Path(folder) / "ablation.json"
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                ablation(registered, composition, beside, f"ablate.rounds={rounds}", f"ablate.out={out}").run([])
        except DovetailError as error:
            return found | {"reason": str(error)}
        result = json.loads(out.read_text(encoding="utf-8"))
    failures = [f"{v['name']}: {v['failure']['reason']}" for v in result["variants"] if v["failure"]]
    return found | {"failures": failures, "rows": [_row(one) for one in result["comparisons"]]}


def ablation(registered: Registered, composition: Composition, beside: Sequence[str], *more: str) -> Composition:
    """Return the composition of app=ablate. Its baseline is the composition that is given."""
    kind, name = registered.component.kind, registered.component.name
    if KINDS[kind].cardinality == "many":
        vary = f'ablate.ladder={{without {name}: [], {name}: ["+{kind}={name}"]}}'
    else:
        chosen = composition.part(kind).name
        others = [other for other in beside if other in composition.registry.options(kind) and other != chosen]
        vary = f"ablate.vary={{{kind}: [{', '.join((*others, name))}]}}"
    given = [word for word in composition.overrides if key_of(word).split(".")[0] not in ("app", "check")]
    words = [*given, *SMALL, vary, *more]
    return compose(words, app="ablate", registry=composition.registry, config_dirs=composition.config_dirs)


def _row(comparison: dict[str, Any]) -> dict[str, Any]:
    quality = comparison["quality"]
    return {
        "variant": comparison["variant"],
        "baseline": comparison["baseline"],
        "changes": {path: comparison["changes"].get(path) for path in METRICS},
        "greedy_tokens_equal": quality["greedy_tokens_equal"] if quality else None,
    }
