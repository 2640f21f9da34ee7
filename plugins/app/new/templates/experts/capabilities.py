"""Requirements of the placement. Composing imports this module, so it must not import torch."""

from dovetail import Capabilities, Requires


def capabilities(config, host):
    places = Requires(kind="model", key="expert_placement", allowed=(True,), reason="it must place its experts")
    return Capabilities(requires=(places,))
