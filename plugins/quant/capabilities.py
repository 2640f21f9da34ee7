"""Capabilities of the built-in quantizers: weight size and matmul format, used to plan memory and time."""

from __future__ import annotations

from dovetail.core.compose.capabilities import FP8_HARDWARE, Capabilities, Host, Requires
from dovetail.plugins.quant.config import FP8Config, Int8Config


def int8(config: Int8Config, host: Host) -> Capabilities:
    return Capabilities(provides={"weight_bits": 8, "product": "int8"})


def fp8(config: FP8Config, host: Host) -> Capabilities:
    reason = "it multiplies in FP8, as Ada and Hopper do"
    demand = Requires(kind="host", key="compute_capability", at_least=FP8_HARDWARE, reason=reason)
    return Capabilities(provides={"weight_bits": 8, "product": "fp8"}, requires=(demand,) if host.device_count else ())
