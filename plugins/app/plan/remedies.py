"""Changes that make a model fit: single ones first, then pairs. Each candidate is planned again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

from dovetail.core.compose import Composition, Selected
from dovetail.core.engine.checks import MOST_GPUS, MOST_QUANTIZERS, model_ranks, quantizers
from dovetail.core.errors import DovetailError
from dovetail.plugins.app.plan.memory import HOST, Plan, make_plan


def remedies(composition: Composition, plan: Plan, count: int = 3) -> list[tuple[str, Plan]]:
    """Return up to `count` (overrides, plan) with which one sequence of max_len fits, least drastic first."""
    changes = list(_changes(composition, plan))
    found: list[tuple[str, Plan]] = []
    enough: set[str] = set()
    """Kinds of change that suffice alone, so larger amounts are not tried."""
    alone = 0
    """Quantizers that suffice alone; those with most bits come first."""
    for size in (1, 2):
        for group in combinations(changes, size):
            kinds = {kind for kind, _, _ in group}
            if len(kinds) < size or kinds & enough or any(text in words for _, text, _ in group for words, _ in found):
                continue
            candidate = _try(composition, group)
            if candidate is not None and not candidate.missing:
                found.append((" ".join(text for _, text, _ in group), candidate))
                alone += kinds == {"quant"}
                enough |= kinds - ({"quant"} if alone < MOST_QUANTIZERS else set()) if size == 1 else set()
                if len(found) == count:
                    return found
    return found


Change = tuple[str, str, Mapping[str, Any]]
"""(kind of change, override, engine settings or {"quant": name} or {"slots": number})"""


def _changes(composition: Composition, plan: Plan) -> Iterator[Change]:
    engine, gpus = plan.engine, plan.engine.tp * plan.engine.dp
    if engine.memory_fraction < 0.95:
        yield "memory_fraction", "engine.memory_fraction=0.95", {"memory_fraction": 0.95}
    for divisor in (2, 4, 8):
        if engine.token_budget // divisor >= 512:
            budget = engine.token_budget // divisor
            yield "token_budget", f"engine.token_budget={budget}", {"token_budget": budget}
    slots = plan.adapter.slots // 2
    while slots and "slots" in type(composition.part("adapter").config).model_fields:
        yield "slots", f"adapter.slots={slots}", {"slots": slots}
        slots //= 2
    for name, bits in quantizers(composition, HOST):
        if bits < plan.formats.weight_bits:
            yield "quant", f"quant={name}", {"quant": name}
    ranks = [tp for tp in model_ranks(composition, HOST, max(MOST_GPUS, gpus)) if tp > engine.tp]
    for tp in ranks:
        if tp * engine.dp <= MOST_GPUS:
            yield "tp", f"engine.tp={tp} executor=multiproc", {"tp": tp}
    for tp in ranks:
        if tp <= gpus and gpus % tp == 0:
            yield "layout", f"engine.tp={tp} engine.dp={gpus // tp} executor=multiproc", {"tp": tp, "dp": gpus // tp}
    length = plan.max_len // 2
    while length >= 1024:
        yield "max_len", f"engine.max_len={length}", {"max_len": length}
        length //= 2


def _try(composition: Composition, group: tuple[Change, ...]) -> Plan | None:
    parts, engine = dict(composition.parts), composition.engine
    for kind, _, change in group:
        if kind == "quant":
            registered = composition.registry.get("quant", change["quant"])
            parts["quant"] = Selected(registered, registered.component.config())
        elif kind == "slots":
            adapter = composition.part("adapter")
            parts["adapter"] = replace(adapter, config=adapter.config.model_copy(update=dict(change)))
        else:
            engine = engine.model_copy(update=dict(change))
    try:
        return make_plan(replace(composition, parts=parts, engine_config=engine))
    except DovetailError:
        return None  # For instance, the cost model has no rate for its matmuls.
