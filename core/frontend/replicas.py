"""Data parallel: a composition with engine.dp replicas becomes as many compositions of one, and a router is asked which
of them runs a request."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from dovetail.core.compose import compose
from dovetail.core.errors import PluginError
from dovetail.core.interfaces import Arrival, ReplicaLoad, RequestOptions, Router

if TYPE_CHECKING:
    from dovetail.core.compose import Composition


def replica_compositions(composition: Composition) -> list[Composition]:
    """That of each replica: the same parts on GPUs of its own, which follow one another."""
    engine = composition.engine
    if engine.dp == 1:
        return [composition]
    gpus = engine.tp * engine.pp
    return [
        compose(
            [*composition.overrides, "engine.dp=1", f"engine.first_gpu={engine.first_gpu + replica * gpus}"],
            registry=composition.registry,
            config_dirs=composition.config_dirs,
        )
        for replica in range(engine.dp)
    ]


def replica_environment(composition: Composition) -> Mapping[str, str] | None:
    """Replicas on a CPU share its cores; each would otherwise start a thread for every one of them."""
    if composition.engine.dp == 1:
        return None
    cores = (os.cpu_count() or 1) // (composition.engine.dp * composition.engine.tp)
    return {"OMP_NUM_THREADS": str(max(1, cores)), **os.environ}


class CheckedRouter:
    """The chosen router, held to its contract."""

    def __init__(self, composition: Composition) -> None:
        self.replicas = composition.engine.dp
        self._part = composition.part("router") if self.replicas > 1 else None
        self._router: Router | None = None if self._part is None else self._part.build(self.replicas)

    def choose(
        self, prompt_ids: Sequence[int], samples: int, options: RequestOptions, loads: Sequence[ReplicaLoad]
    ) -> int:
        """Return the replica that runs a request. Raises PluginError where the router fails: that request fails
        alone."""
        if self._part is None or self._router is None:
            return 0
        with self._part.registered.blamed("failed to route a request"):
            chosen = self._router.route(_arrival(prompt_ids, samples, options), loads)
        if chosen not in [load.replica for load in loads]:
            there = ", ".join(str(load.replica) for load in loads)
            raise PluginError(
                str(self._part.package), f"router={self._part.name} chose replica {chosen!r}; there are {there}"
            )
        return chosen

    def forget(self, replica: int) -> None:
        """The replica's prefix cache is empty."""
        if self._part is not None and self._router is not None:
            with self._part.registered.blamed("failed to forget a replica"):
                self._router.forget(replica)


def _arrival(prompt_ids: Sequence[int], samples: int, options: RequestOptions) -> Arrival:
    """What a router sees of a request. A replica that runs the request's adapter need not load it, so the adapter is
    part of the salt."""
    given = {field.name: getattr(options, field.name) for field in fields(options)}
    if options.adapter:
        given["cache_salt"] = f"{options.adapter}\0{options.cache_salt}"
    return Arrival(prompt_ids, samples, **given)
