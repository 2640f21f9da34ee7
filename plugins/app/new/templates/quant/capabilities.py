"""Facts of quant=mine for app=plan and cost models."""

from dovetail import Capabilities


def capabilities(config, host):
    """A weight takes 16 bits, and matmuls run in the model's dtype."""
    return Capabilities(provides={"weight_bits": 16, "product": "model"})
