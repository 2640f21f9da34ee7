"""The layers of a step run one after another, each collective call where the model hands it out."""

from __future__ import annotations

from dovetail.core.interfaces import Hidden, Layers


def run_layers(layers: Layers) -> Hidden:
    """All of a step at once: each call is made where it is handed out."""
    given = None
    try:
        while True:
            given = layers.send(given)()
    except StopIteration as end:
        return end.value
