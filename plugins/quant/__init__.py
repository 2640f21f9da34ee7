"""Built-in quantizers."""

from dovetail.plugins import builtin
from dovetail.plugins.quant.config import (
    AutoConfig,
    FP4Config,
    FP8Config,
    GGUFConfig,
    Int4Config,
    Int8Config,
    NF4Config,
    NoneConfig,
)

COMPONENTS = (
    builtin("quant", "auto", AutoConfig, "none:Unquantized", chooses="auto:choose", api="0.2"),
    builtin("quant", "none", NoneConfig, "none:Unquantized", api="0.2"),
    builtin(
        "quant",
        "int8",
        Int8Config,
        "int8.quantizer:Int8",
        capabilities="capabilities:int8",
        reads="int8.checkpoint:reads",
        api="0.2",
    ),
    builtin(
        "quant",
        "int4",
        Int4Config,
        "int4.quantizer:Int4",
        capabilities="capabilities:int4",
        reads="int4.checkpoint:reads",
        api="0.2",
    ),
    builtin(
        "quant",
        "fp4",
        FP4Config,
        "fp4.quantizer:FP4",
        capabilities="capabilities:fp4",
        reads="fp4.checkpoint:reads",
        api="0.2",
    ),
    builtin(
        "quant",
        "nf4",
        NF4Config,
        "nf4.quantizer:NF4Quantizer",
        capabilities="capabilities:nf4",
        reads="nf4.checkpoint:reads",
        api="0.2",
    ),
    builtin(
        "quant",
        "gguf",
        GGUFConfig,
        "gguf.quantizer:GGUF",
        capabilities="capabilities:gguf",
        reads="gguf.checkpoint:reads",
        api="0.2",
    ),
    builtin(
        "quant",
        "fp8",
        FP8Config,
        "fp8.quantizer:FP8",
        capabilities="capabilities:fp8",
        reads="fp8.checkpoint:reads",
        api="0.2",
    ),
)
