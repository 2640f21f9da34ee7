"""Built-in quantizers."""

from dovetail.core.compose import Component
from dovetail.plugins.quant.config import FP8Config, Int8Config, NoneConfig

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
    Component(
        kind="quant",
        name="fp8",
        config=FP8Config,
        target="dovetail.plugins.quant.fp8.quantizer:FP8",
        api="quant/0.1",
        capabilities="dovetail.plugins.quant.capabilities:fp8",
    ),
)
