"""Whether a composition's parts fit each other, its model and this machine: told before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dovetail.core.engine import host
from dovetail.core.engine.adapters import check_folders
from dovetail.core.engine.capacity import check_weights_fit
from dovetail.core.errors import CapabilityError
from dovetail.core.interfaces import Model

if TYPE_CHECKING:
    from dovetail.core.compose import Composition, Host


def check_fit(composition: Composition) -> None:
    """CapabilityError, CapacityError where the weights alone are too large, ConfigError where adapters are missing."""
    model = composition.part("model")
    spec = model.target().spec(model.config)
    here = host.detect_host(composition.engine.device)
    composition.check(here, host.model_facts(spec))
    if conflicts := [*_late_drafts(composition, here), *_whole_steps(composition), *_no_effect(composition)]:
        raise CapabilityError(conflicts)
    check_weights_fit(composition, spec, here)
    check_folders(composition)


def exact_lengths(composition: Composition, here: Host | None = None) -> bool:
    """Attention plans from lengths that the host knows, and bounds do not do."""
    here = here or host.detect_host(composition.engine.device)
    return composition.part("attention").capabilities(here).provides.get("exact_lengths") == "host"


def _late_drafts(composition: Composition, here: Host) -> Iterator[str]:
    """With several plans in flight, the host learns late what was accepted: some parts cannot wait for that."""
    depth = composition.engine.depth
    if depth == 1:
        return
    drafter, chosen = composition.build("spec_decode"), composition.part("spec_decode")
    if drafter.needs_host_tokens:
        yield (
            f"spec_decode={chosen.name} drafts from tokens on the host, which come late where several plans are in "
            f"flight (engine.depth={depth}). Would work: engine.depth=1."
        )
    if exact_lengths(composition, here) and drafter.lookahead:
        yield (
            f"attention={composition.part('attention').name} plans from exact lengths on the host, which come late "
            f"where drafts are in flight (spec_decode={chosen.name}, engine.depth={depth}). "
            "Would work: engine.depth=1, spec_decode=none."
        )


def _whole_steps(composition: Composition) -> Iterator[str]:
    """A step's halves can take turns only where the model hands out its collective calls."""
    model = composition.part("model")
    if composition.engine.overlap_tokens and model.target().layers is Model.layers:
        yield (
            f"model={model.name} makes its collective calls by itself (it has no `layers`), and "
            "engine.overlap_tokens runs a step as two halves in turns. Would work: engine.overlap_tokens=0."
        )


def _no_effect(composition: Composition) -> Iterator[str]:
    """Options of the engine for what others of its options rule out."""
    engine = composition.engine
    # With no other step in flight there is nothing to wait for; with more, results would wait.
    if engine.late_launch and engine.depth != 2:
        yield (
            "engine.late_launch puts the launch of a step off while the one before it runs, and "
            f"engine.depth={engine.depth} has {engine.depth - 1 or 'no'} others in flight. "
            "Would work: engine.depth=2, engine.late_launch=false."
        )
