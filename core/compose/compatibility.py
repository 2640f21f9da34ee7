"""Checks that selected parts fit each other, from their stated capabilities, as the matrix in the docs does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import ValidationError

from dovetail.core.compose.capabilities import Capabilities, Host, Requires
from dovetail.core.compose.config import part_fields
from dovetail.core.compose.kinds import KINDS
from dovetail.core.compose.registry import Registered
from dovetail.core.compose.selected import Selected
from dovetail.core.compose.wording import listing, show
from dovetail.core.errors import PluginError

if TYPE_CHECKING:
    from dovetail.core.compose.composition import Composition

_UNSTATED = object()


def conflicts(composition: Composition, host: Host, model_facts: Mapping[str, object]) -> list[str]:
    """Return one sentence per unmet requirement, with the options that would meet it."""
    return list(dict.fromkeys(_Check(composition, host, model_facts).run()))


def layout_conflicts(composition: Composition, host: Host) -> list[str]:
    """Return the unmet requirements of the model on engine and attention, and of the placement of experts on the model.
    They apply on any host, even if nothing is built."""
    check = _Check(composition, host, {})
    apply = {("model", "engine"), ("model", "attention"), ("experts", "model")}
    demands = [demand for demand in check.demands if (demand[0], demand[2].kind) in apply]
    return list(dict.fromkeys(check.unmet(demands)))


def stated_by_default(registered: Registered, host: Host) -> Capabilities | None:
    """Return a component's capabilities with default options; None if it has required options or nested parts."""
    if part_fields(registered.component.config):
        return None
    try:
        config = registered.component.config()
    except ValidationError:
        return None
    return Selected(registered, config).capabilities(host)


class _Check:
    def __init__(self, composition: Composition, host: Host, model_facts: Mapping[str, object]) -> None:
        self.composition, self.host, self.model_facts = composition, host, model_facts
        parts = [(path, part, part.capabilities(host)) for path, part in _walk(composition.parts)]
        self.lacking = [(path, part, what) for path, part, stated in parts for what in stated.lacks]
        self.demands = [(path, part, demand) for path, part, stated in parts for demand in stated.requires]
        # Only top-level parts can meet requirements: the model inside a drafter is not *the* model.
        self.provided = {path: stated.provides for path, _, stated in parts}

    def run(self) -> Iterator[str]:
        for path, part, what in self.lacking:
            others = [f"{path}={name}" for name in self._options(path)] if path in self.composition.parts else []
            yield f"{path}={part.name} lacks {what}. Would work: {listing(others)}."
        yield from self.unmet(self.demands)

    def unmet(self, demands: Sequence[tuple[str, Selected, Requires]]) -> Iterator[str]:
        for path, part, demand in demands:
            for answerer, value in self._answers(demand):
                if value is _UNSTATED or not demand.admits(value):
                    is_now = f"{answerer} does not state it" if value is _UNSTATED else f"{answerer} has {show(value)}"
                    yield (
                        f"{path}={part.name} requires {demand.kind} with {demand.words()} ({demand.reason}); {is_now}."
                        f" Would work: {listing(self._cures(path, part, demand))}."
                    )

    def _answers(self, demand: Requires) -> list[tuple[str, object]]:
        """Return (source, value) for every part that the requirement refers to."""
        if demand.kind == "engine":
            return [("engine", getattr(self.composition.engine_config, demand.key, _UNSTATED))]
        if demand.kind == "host":
            return [("this host", getattr(self.host, demand.key, _UNSTATED))]
        chosen = self.composition.parts.get(demand.kind)
        if demand.kind == "model" and demand.key in self.model_facts:
            return [("the checkpoint", self.model_facts[demand.key])]
        if isinstance(chosen, Selected):
            return [(f"{demand.kind}={chosen.name}", self.provided[demand.kind].get(demand.key, _UNSTATED))]
        if chosen is None:
            return [(f"app={self.composition.app}, which has no {demand.kind},", _UNSTATED)]
        return [
            (f"{demand.kind}={name}", self.provided[f"{demand.kind}.{name}"].get(demand.key, _UNSTATED))
            for name in chosen
        ]

    def _cures(self, path: str, part: Selected, demand: Requires) -> Iterator[str]:
        if demand.kind == "engine" and demand.allowed is not None:
            yield " or ".join(f"engine.{demand.key}={show(value)}" for value in demand.allowed)
        elif demand.kind == "engine":
            yield f"engine.{demand.key} {demand.words().removeprefix(demand.key).strip()}"
        elif demand.kind == path == "model":
            yield f"a checkpoint with {demand.words()}"
        for kind in dict.fromkeys((demand.kind, path)):
            if kind in KINDS and isinstance(self.composition.parts.get(kind), Selected):
                yield from (f"{kind}={name}" for name in self._options(kind))

    def _options(self, kind: str) -> Iterator[str]:
        """Components of a kind that would fit all other parts as selected."""
        chosen = self.composition.part(kind)
        demands = [d for path, _, d in self.demands if d.kind == kind and path.split(".")[0] != kind]
        for name in self.composition.registry.options(kind):
            if name == chosen.name:
                continue
            try:
                stated = stated_by_default(self.composition.registry.get(kind, name), self.host)
            except PluginError:  # not suggested; it is not selected, so it must not fail the check
                continue
            if stated is None:
                continue
            meets = all(d.key in stated.provides and d.admits(stated.provides[d.key]) for d in demands)
            is_met = all(v is not _UNSTATED and d.admits(v) for d in stated.requires for _, v in self._answers(d))
            if meets and is_met and not stated.lacks:
                yield name


def _walk(parts: Mapping[str, Selected | dict[str, Selected]]) -> Iterator[tuple[str, Selected]]:
    """Every part with its path, nested ones included."""
    for path, part in parts.items():
        if isinstance(part, dict):
            yield from _walk({f"{path}.{name}": item for name, item in part.items()})
        else:
            yield path, part
            nested = {f"{path}.{field}": getattr(part.config, field) for field in part_fields(type(part.config))}
            yield from _walk(nested)
