"""Scheduler and allocator of a replay, composed from the recorded command line and the present one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dovetail.core.compose import ENGINE_NODES, compose
from dovetail.core.engine.adapters import AdapterSlots
from dovetail.core.engine.cost import bind_cost
from dovetail.core.errors import ConfigError, DovetailError
from dovetail.core.interfaces import CostModel, KVAllocator, Scheduler, SchedulerLimits
from dovetail.core.recording.recorder import shapes
from dovetail.core.recording.recording import Recording
from dovetail.plugins.app.ablate.variants import key_of, merged

if TYPE_CHECKING:
    from dovetail.core.compose import Composition

DECIDING = ("scheduler", "kv_cache", "router", "cost")
"""Kinds that may differ from the recording. The results of other parts are the recorded ones."""
DECIDING_OPTIONS = ("depth", "dp", "drafts", "kv_pages", "max_seqs", "page_size", "seed", "token_budget")
"""Options of `engine` that may differ from the recording."""
RECORDING_OPTIONS = ("record", "record_tokens")


@dataclass(frozen=True, slots=True)
class Parts:
    """A scheduler and an allocator, both new, and what they are given."""

    kv: KVAllocator
    scheduler: Scheduler
    limits: SchedulerLimits
    seed: int
    cost: CostModel | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    recorded: Composition
    given: Composition

    @property
    def same(self) -> bool:
        return not self.changed()

    @property
    def replicated(self) -> bool:
        """Whether the requests of the recorded engine are distributed over several replicas."""
        return self.given.engine.dp > 1

    def changed(self) -> list[str]:
        """Return what the command line changes, as overrides."""
        before, after = self.recorded.nodes(), self.given.nodes()
        found = [f"{kind}={after[kind]['name']}" for kind in ENGINE_NODES[1:] if before.get(kind) != after.get(kind)]
        options = (name for name in after["engine"] if before["engine"][name] != after["engine"][name])
        return found + [f"engine.{name}={after['engine'][name]}" for name in options if name not in RECORDING_OPTIONS]


def compose_pair(recording: Recording, composition: Composition) -> Pair:
    """Compose the recorded parts, and the same with the changes of the command line. Raises ConfigError if that changes
    what a replay takes from the recording, or another model was recorded."""
    words = [word for word in recording.header.overrides if _is_of_engine(word)]
    words = [word for word in words if not _is_of_recording(word)]
    changes = [word for word in composition.overrides if _is_of_engine(word)]
    if useless := [word for word in changes if _is_of_recording(word)]:
        raise ConfigError(f"{useless[0]}: a replay has no engine that could be recorded; leave it out")
    dirs = tuple(dict.fromkeys((*recording.header.config_dirs, *composition.config_dirs)))
    # The model may be elsewhere now, and must then be given for both.
    moved = [word for word in changes if key_of(word).split(".")[0] == "model"]
    try:
        recorded = compose(merged(words, moved), app="bench", registry=composition.registry, config_dirs=dirs)
    except DovetailError as error:
        raise ConfigError(f"replay.path={recording.path}: its parts cannot be composed here: {error}") from None
    given = compose(merged(words, changes), app="bench", registry=composition.registry, config_dirs=dirs)
    pair = Pair(recorded, given)
    _check(recording, pair)
    return pair


def _is_of_engine(word: str) -> bool:
    return key_of(word).split(".")[0].split("@")[0] in (*ENGINE_NODES, "preset")


def _is_of_recording(word: str) -> bool:
    return key_of(word) in {f"engine.{name}" for name in RECORDING_OPTIONS}


def _check(recording: Recording, pair: Pair) -> None:
    fixed = [
        word
        for word in pair.changed()
        if (key := word.partition("=")[0]) not in (*DECIDING, "model")
        and key not in {f"engine.{name}" for name in DECIDING_OPTIONS}
    ]
    if fixed:
        options = ", ".join((*DECIDING, *(f"engine.{name}" for name in DECIDING_OPTIONS)))
        raise ConfigError(f"{', '.join(fixed)}: a replay takes this from the recording; it can change {options}")
    model = pair.given.part("model")
    here, recorded = shapes(model.target().spec(model.config)), recording.header.model
    if different := [name for name, value in here.items() if value != recorded.get(name)]:
        what = ", ".join(f"{name} {recorded.get(name)} (model={model.name}: {here[name]})" for name in different)
        raise ConfigError(f"replay.path={recording.path}: another model was recorded: {what}")


def notes(recording: Recording, pair: Pair) -> list[str]:
    """Return how the composition differs from the recorded one although no override does."""
    before, after = recording.header.nodes, pair.recorded.nodes()
    changed = [kind for kind in (*DECIDING, "engine") if _values(before.get(kind)) != _values(after.get(kind))]
    if not changed:
        return []
    return [f"the options of {', '.join(changed)} have other defaults here than when it was recorded"]


def _values(node: Any) -> Any:
    return {k: v for k, v in node.items() if k not in RECORDING_OPTIONS} if isinstance(node, Mapping) else node


def build(recording: Recording, composition: Composition, recorded: Composition) -> Parts:
    """Build a scheduler and an allocator as the engine does. Pages of another size fill the recorded memory."""
    engine, header, limits = composition.engine, recording.header, recording.limits
    limits = replace(
        limits,
        token_budget=engine.token_budget,
        max_seqs=engine.max_seqs,
        depth=engine.depth,
        weighs_drafts=engine.drafts == "paying",
    )
    groups, pages = recording.groups, dict(header.num_pages)
    if engine.page_size != recorded.engine.page_size:
        scale = recorded.engine.page_size / engine.page_size
        pages = {group.id: max(math.floor(pages[group.id] * scale), 1) for group in groups}
        groups = tuple(replace(group, page_tokens=round(group.page_tokens / scale)) for group in groups)
    if engine.kv_pages is not None:
        pages = dict.fromkeys(pages, engine.kv_pages)
    kv: KVAllocator = composition.build("kv_cache", groups=groups, num_pages=pages)
    scheduler: Scheduler = composition.build("scheduler", limits=limits, kv=kv)
    if header.adapter_slots:
        scheduler.resources = (AdapterSlots(header.adapter_slots),)
    model = composition.part("model")
    cost = bind_cost(composition, model.target().spec(model.config), header.device)
    return Parts(kv, scheduler, limits, engine.seed, cost)


@contextmanager
def blamed(composition: Composition) -> Iterator[None]:
    """Turn errors of the block into one that names the scheduler and the allocator."""
    names = ", ".join(f"{kind}={composition.part(kind).name}" for kind in ("scheduler", "kv_cache"))
    with composition.part("scheduler").registered.blamed(f"failed in a replay ({names})"):
        yield


def choices(composition: Composition) -> Sequence[str]:
    return [f"{kind}={composition.part(kind).name}" for kind in DECIDING]
