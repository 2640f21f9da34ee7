"""Built-in quantizers."""

from dovetail.plugins import builtin
from dovetail.plugins.quant.config import FP8Config, Int8Config, NoneConfig

COMPONENTS = (
    builtin("quant", "none", NoneConfig, "none:Unquantized"),
    builtin("quant", "int8", Int8Config, "int8.quantizer:Int8", capabilities="capabilities:int8"),
    builtin("quant", "fp8", FP8Config, "fp8.quantizer:FP8", capabilities="capabilities:fp8"),
)
