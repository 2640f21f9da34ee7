"""Decide whether the steps of a composition can run as CUDA graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.core.compose import Host, Selected
from dovetail.core.host import detect_host

if TYPE_CHECKING:
    import torch

    from dovetail.core.compose import Composition
    from dovetail.core.interfaces import ModelSpec


def reason_against_graphs(composition: Composition, spec: ModelSpec, device: torch.device, ranks: int) -> str | None:
    """Return why steps cannot run as CUDA graphs, in words for a note; None = they can."""
    if device.type != "cuda":
        return "there is no CUDA device"
    if not spec.head:
        return "the model has no head: it only embeds"
    if not composition.engine.cuda_graphs:
        return "engine.cuda_graphs=false"
    host = detect_host("cuda")
    attention, collective = composition.part("attention"), composition.part("collective")
    if not attention.capabilities(host).provides.get("graphs"):
        can = _providing(composition, "attention", "graphs", host)
        return f"attention={attention.name} cannot be captured ({', '.join(can) or 'no backend'} can)"
    if ranks > 1 and not collective.capabilities(host).provides.get("graph_safe"):
        can = _providing(composition, "collective", "graph_safe", host)
        return f"collective={collective.name} cannot be captured ({', '.join(can) or 'none'} can)"
    return None


def _providing(composition: Composition, kind: str, fact: str, host: Host) -> list[str]:
    """Return the components of a kind that provide `fact` with default settings."""
    registry = composition.registry
    parts = (registry.get(kind, name) for name in registry.options(kind))
    selected = (Selected(part, part.component.config()) for part in parts)
    return [part.name for part in selected if part.capabilities(host).provides.get(fact)]
