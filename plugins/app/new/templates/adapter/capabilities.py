"""Capabilities of the adapters. Composing imports this module, so it must not import torch."""

from dovetail import Capabilities, Requires


def capabilities(config, host):
    return Capabilities(
        requires=(
            Requires(kind="model", key="adapters", allowed=(True,), reason="it changes linear layers"),
            Requires(kind="executor", key="adapters", allowed=(True,), reason="each rank reads adapters"),
        )
    )
