"""Former versions of contracts whose components still run, each for one release (docs/versions.md)."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Former:
    """How components of a former contract run under the present one."""

    until: str
    """First release of Dovetail that refuses them."""
    change: str
    """Their limit, as the end of "it still runs, but ..."."""
    adapt: str | None = None
    """Reference to a function of the component's class that returns a class of the present contract, "module:function".
    None = the class runs as it is, since whatever is new has a default."""
    conflicts: str | None = None
    """Reference to a function of (part, composition) that returns in words what the component cannot do in this
    composition because of its contract, "module:function". Called before a device is used. None = nothing."""


FORMER: Mapping[str, Former] = {
    "collective/0.1": Former(
        until="0.2",
        change="its boundary cannot norm a sum before the residual is added",
        adapt="dovetail.core.parallel.former_collective:with_after",
    ),
    "cost/0.1": Former(until="0.2", change="drafting has the predicted time of the draft model alone"),
    "scheduler/0.1": Former(
        until="0.2",
        change="drafters that follow hidden states need a PolicyScheduler",
        conflicts="dovetail.core.engine.checks:former_scheduler_conflicts",
    ),
}
"""Former contract -> how its components run. An entry leaves with the release that it names: a test says so."""


def former(api: str) -> Former | None:
    """Return how components of this contract run, if it is a former one that is adapted."""
    return FORMER.get(api)


@functools.cache
def adapted(api: str, target: type[Any]) -> type[Any]:
    """Return the class of the present contract for one of `api`."""
    known = FORMER.get(api)
    return target if known is None or known.adapt is None else load(known.adapt)(target)


def load(reference: str) -> Any:
    """Import the function at "module:name"."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)
