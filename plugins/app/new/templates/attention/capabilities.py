"""Capabilities of the backend. Composing imports this module, so it must not import torch."""

from dovetail import Capabilities, Requires


def capabilities(config, host):
    on_cpu = Requires(kind="engine", key="device", allowed=("auto", "cpu"), reason="it reads lengths on the host")
    return Capabilities(
        provides={"kinds": ("full", "window"), "exact_lengths": "device", "tree": False, "graphs": False},
        requires=(on_cpu,),
    )
