"""Data parallelism: one composition per replica, and the router that chooses the replica of each request."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.core.compose import compose
from dovetail.core.errors import PluginError
from dovetail.core.frontend.lanes import LaneGroup
from dovetail.core.interfaces import Arrival, ReplicaLoad, RequestOptions, Router

if TYPE_CHECKING:
    from dovetail.core.compose import Composition


def make_lanes(composition: Composition) -> LaneGroup | None:
    """Return a group for the replicas if they share routed experts."""
    return LaneGroup(composition.engine.dp) if composition.engine.lanes > 1 else None


def replica_compositions(composition: Composition, lanes: LaneGroup | None = None) -> list[Composition]:
    """Return the composition of each replica: the same parts on consecutive GPUs. `lanes`: the replicas' group."""
    engine = composition.engine
    if engine.dp == 1:
        return [composition]
    gpus = engine.tp * engine.pp
    found = [
        compose(
            [
                *composition.overrides,
                "engine.dp=1",
                f"engine.first_gpu={engine.first_gpu + replica * gpus}",
                *_record(engine.record, replica),
            ],
            registry=composition.registry,
            config_dirs=composition.config_dirs,
        )
        for replica in range(engine.dp)
    ]
    return found if lanes is None else [lanes.place(one, number) for number, one in enumerate(found)]


def _record(path: str | None, replica: int) -> list[str]:
    """Return the override for a file of the replica's own: run.rec becomes run.0.rec."""
    if path is None:
        return []
    name = Path(path)
    if name.is_char_device():
        return []  # /dev/null serves all of them
    return [f"engine.record={json.dumps(str(name.with_stem(f'{name.stem}.{replica}')))}"]


def replica_environment(composition: Composition) -> Mapping[str, str] | None:
    """Return the environment of replica processes, in which replicas on a CPU share its cores. None = unchanged."""
    if composition.engine.dp == 1:
        return None
    cores = (os.cpu_count() or 1) // (composition.engine.dp * composition.engine.tp)
    return {"OMP_NUM_THREADS": str(max(1, cores)), **os.environ}


class CheckedRouter:
    """The chosen router, with a check of its results."""

    def __init__(self, composition: Composition) -> None:
        self.replicas = composition.engine.dp
        self._part = composition.part("router") if self.replicas > 1 else None
        self._router: Router | None = None if self._part is None else self._part.build(self.replicas)

    def choose(
        self, prompt_ids: Sequence[int], samples: int, options: RequestOptions, loads: Sequence[ReplicaLoad]
    ) -> int:
        """Return the replica for a request. Raises PluginError if the router fails; other requests are not affected."""
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
        """Notify the router that the replica's prefix cache is empty."""
        if self._part is not None and self._router is not None:
            with self._part.registered.blamed("failed to forget a replica"):
                self._router.forget(replica)


def _arrival(prompt_ids: Sequence[int], samples: int, options: RequestOptions) -> Arrival:
    """Describe a request for a router. Its adapter is part of the salt, since some replicas have it loaded."""
    given = {field.name: getattr(options, field.name) for field in fields(options)}
    if options.adapter:
        given["cache_salt"] = f"{options.adapter}\0{options.cache_salt}"
    return Arrival(prompt_ids, samples, **given)
