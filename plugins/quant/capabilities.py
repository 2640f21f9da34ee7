"""What the built-in quantizers state: bytes and the number format of products, for whoever plans memory and time."""

from __future__ import annotations

from dovetail.core.compose.capabilities import Capabilities, Host
from dovetail.plugins.quant.config import Int8Config


def int8(config: Int8Config, host: Host) -> Capabilities:
    return Capabilities(provides={"weight_bits": 8, "product": "int8"})
