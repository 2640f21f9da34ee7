"""Adapter for collectives of contract 0.1, whose `boundary` has no `after`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.core.interfaces import PLAIN, Collective

if TYPE_CHECKING:
    from dovetail.core.interfaces import ActFormat
    from dovetail.core.interfaces.collective import Norm


def with_after(target: type[Collective]) -> type[Collective]:
    """Return the class with a boundary that norms the sum, if asked to, by the default of the contract: the component's
    own reduction, then the norms."""
    if target.boundary is Collective.boundary:
        return target

    def boundary(
        self: Any,
        x: Any,
        residual: Any,
        norm: Norm,
        emit: tuple[ActFormat, ...] = (PLAIN,),
        after: Norm | None = None,
    ) -> Any:
        if after is None:
            return target.boundary(self, x, residual, norm, emit)
        return Collective.boundary(self, x, residual, norm, emit, after)

    return type(target.__name__, (target,), {"__module__": target.__module__, "boundary": boundary})
