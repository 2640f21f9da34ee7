"""Capabilities of the executor. Composing imports this module, so it must not import torch."""

from dovetail import Capabilities, Requires


def capabilities(config, host):
    one = [Requires(kind="engine", key=key, allowed=(1,), reason="it runs one rank") for key in ("tp", "pp", "dp")]
    return Capabilities(provides={"processes": "one"}, requires=tuple(one))
