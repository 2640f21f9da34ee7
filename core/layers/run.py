"""Run the layers of a step in order, making each collective call where the model yields it."""

from __future__ import annotations

from dovetail.core.interfaces import Hidden, Layers


def run_layers(layers: Layers) -> Hidden:
    """Run all layers for the whole step and make each collective call immediately."""
    given = None
    try:
        while True:
            given = layers.send(given)()
    except StopIteration as end:
        return end.value
