"""Checks of what runs in lanes: replicas that share routed experts (`engine.ep` > `engine.tp`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dovetail.core.compose import Host, Selected
from dovetail.core.errors import DovetailError

if TYPE_CHECKING:
    from dovetail.core.compose import Composition


def lane_conflicts(composition: Composition, here: Host) -> list[str]:
    """Return what does not work in the lanes of this composition."""
    if "experts" not in composition.parts or composition.lanes == 1:
        return []
    return [
        *placement_conflicts(composition),
        *_option_conflicts(composition),
        *_executor_conflicts(composition, here),
    ]


def placement_conflicts(composition: Composition) -> Iterator[str]:
    """Yield the conflict of lanes with a placement that needs every row of a step."""
    if "experts" not in composition.parts or composition.lanes == 1:
        return
    part = composition.part("experts")
    if part.build().rows != "own":  # an option may decide it
        works = [f"experts={name}" for name in _of_own_rows(composition)]
        yield (
            f"experts={part.name} needs every row of a step on each rank, and the {composition.lanes} lanes that "
            f"engine.ep={composition.engine.ep} makes of the replicas have rows of their own. Would work: "
            f"{', '.join([*works, f'engine.ep of at most engine.tp={composition.engine.tp}'])}."
        )


def _of_own_rows(composition: Composition) -> Iterator[str]:
    """Yield the names of placements that take a rank's own rows."""
    registry = composition.registry
    for name in registry.options("experts"):
        try:
            if registry.get("experts", name).target().rows == "own":
                yield name
        except DovetailError:
            continue  # an unusable one is no remedy


def _option_conflicts(composition: Composition) -> Iterator[str]:
    engine = composition.engine
    if engine.overlap_tokens:
        yield (
            f"engine.overlap_tokens={engine.overlap_tokens} splits steps by a lane's own rows, and lanes run alike "
            "steps. Would work: engine.overlap_tokens=0."
        )
    if engine.late_launch:
        yield ("engine.late_launch delays a launch for which other lanes wait. Would work: engine.late_launch=false.")
    if engine.record is not None:
        yield (
            f"engine.record={engine.record} records the steps of one scheduler, and lanes also launch steps for each "
            "other. Would work: engine.record=null."
        )
    adapter = composition.parts.get("adapter")
    if isinstance(adapter, Selected) and getattr(adapter.config, "slots", False):
        yield (
            f"adapter={adapter.name} selects CUDA graphs by a lane's own rows, and lanes run the "
            "same graph. Would work: adapter=none."
        )


def _executor_conflicts(composition: Composition, here: Host) -> Iterator[str]:
    executor = composition.part("executor")
    if not executor.capabilities(here).provides.get("lanes"):
        yield (
            f"executor={executor.name} with its options does not run lanes, which exchange rows within each step. "
            "Would work: executor=inproc without delay, executor=multiproc, executor=simulated with "
            "executor.clock=virtual."
        )
