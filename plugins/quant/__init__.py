"""Built-in quantizers."""

from dovetail.core.compose import Component
from dovetail.plugins.quant.config import Int8Config, NoneConfig

COMPONENTS = (
    Component(
        kind="quant",
        name="none",
        config=NoneConfig,
        target="dovetail.plugins.quant.none:Unquantized",
        api="quant/0.1",
    ),
    Component(
        kind="quant",
        name="int8",
        config=Int8Config,
        target="dovetail.plugins.quant.int8.quantizer:Int8",
        api="quant/0.1",
        capabilities="dovetail.plugins.quant.capabilities:int8",
    ),
)
