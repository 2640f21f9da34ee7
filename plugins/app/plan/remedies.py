"""What would make a model fit: single changes first, then pairs; each one is planned again, not guessed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from dovetail.core.compose import Composition
from dovetail.core.errors import DovetailError
from dovetail.plugins.app.plan.memory import Plan, build_plan, quant_facts

MOST_GPUS = 16


def remedies(composition: Composition, plan: Plan, count: int = 3) -> list[tuple[str, Plan]]:
    """Overrides with which one sequence of max_len fits, the least drastic first."""
    changes = list(_changes(composition, plan))
    found: list[tuple[str, Plan]] = []
    for size in (1, 2):
        for group in combinations(changes, size):
            if len({kind for kind, _, _ in group}) < size or any(
                text in words for _, text, _ in group for words, _ in found
            ):
                continue
            candidate = _try(composition, group)
            if candidate is not None and not candidate.missing:
                found.append((" ".join(text for _, text, _ in group), candidate))
                if len(found) == count:
                    return found
    return found


Change = tuple[str, str, Mapping[str, Any]]
"""(what it changes, the override, engine settings or {"quant": name})"""


def _changes(composition: Composition, plan: Plan) -> Iterator[Change]:
    engine, spec = plan.engine, plan.spec
    if engine.memory_fraction < 0.95:
        yield "memory_fraction", "engine.memory_fraction=0.95", {"memory_fraction": 0.95}
    for divisor in (2, 4, 8):
        if engine.token_budget // divisor >= 512:
            budget = engine.token_budget // divisor
            yield "token_budget", f"engine.token_budget={budget}", {"token_budget": budget}
    for name in composition.registry.options("quant"):
        facts = _facts(composition, name)
        bits = facts.get("weight_bits")
        if isinstance(bits, int | float) and bits < plan.formats.weight_bits:
            yield "quant", f"quant={name}", {"quant": name}
    tp = 2 * engine.tp
    while tp <= MOST_GPUS and spec.heads % tp == 0:
        yield "tp", f"engine.tp={tp} executor=multiproc", {"tp": tp}
        tp *= 2
    length = plan.max_len // 2
    while length >= 1024:
        yield "max_len", f"engine.max_len={length}", {"max_len": length}
        length //= 2


def _facts(composition: Composition, name: str) -> Mapping[str, object]:
    try:
        return quant_facts(composition, name)
    except DovetailError:
        return {}  # A quantizer that cannot be loaded is no remedy; app=plugins says why.


def _try(composition: Composition, group: tuple[Change, ...]) -> Plan | None:
    quant = composition.part("quant").name
    engine: dict[str, Any] = {}
    for kind, _, change in group:
        if kind == "quant":
            quant = change["quant"]
        else:
            engine |= change
    facts = quant_facts(composition, None if quant == composition.part("quant").name else quant)
    try:
        return build_plan(composition, quant, facts, engine)
    except DovetailError:
        return None  # The cost model has no rate for its products.
