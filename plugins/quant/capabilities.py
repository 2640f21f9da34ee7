"""Capabilities of the built-in quantizers: weight size and matmul format, used to plan memory and time."""

from __future__ import annotations

from dovetail.core.compose.capabilities import FP8_HARDWARE, Capabilities, Host, Requires
from dovetail.plugins.quant.config import (
    FP4Config,
    FP8Config,
    GGUFConfig,
    Int4Config,
    Int8Config,
    MixedConfig,
    NF4Config,
)


def int8(config: Int8Config, host: Host) -> Capabilities:
    return Capabilities(provides={"weight_bits": 8, "product": "int8"})


def int4(config: Int4Config, host: Host) -> Capabilities:
    bits = config.bits + ((16 if config.symmetric else 24) / config.group if config.group else 0)
    return Capabilities(provides={"weight_bits": bits, "product": "fp8" if config.activations == "fp8" else "model"})


def fp4(config: FP4Config, host: Host) -> Capabilities:
    # Scales of NVFP4 have 8 bits, those of MXFP4 16.
    return Capabilities(provides={"weight_bits": 4.5, "product": "fp8" if config.activations == "fp8" else "model"})


def nf4(config: NF4Config, host: Host) -> Capabilities:
    return Capabilities(provides={"weight_bits": 4.5, "product": "fp8" if config.activations == "fp8" else "model"})


def mixed(config: MixedConfig, host: Host) -> Capabilities:
    """The requirements of both; weights and products are those of the layers that no pattern matches."""
    those, rest = config.those.capabilities(host), config.rest.capabilities(host)
    requires = tuple(dict.fromkeys((*those.requires, *rest.requires)))
    return Capabilities(provides=rest.provides, requires=requires, lacks=(*those.lacks, *rest.lacks))


def gguf(config: GGUFConfig, host: Host) -> Capabilities:
    # Of Q4_K_M, the most common mixture: 4.5 bits, and a zero for each scale.
    product = "fp8" if config.activations == "fp8" else "model"
    return Capabilities(provides={"weight_bits": 5.5, "product": product, "plain_weights": False})


def fp8(config: FP8Config, host: Host) -> Capabilities:
    old = bool(host.device_count) and host.compute_capability < FP8_HARDWARE
    if config.activations == "plain" or (config.activations == "auto" and old):
        return Capabilities(provides={"weight_bits": 8, "product": "model"})
    reason = "quant.activations=fp8 multiplies in FP8, as Ada and Hopper do; quant.activations=plain runs on this GPU"
    demand = Requires(kind="host", key="compute_capability", at_least=FP8_HARDWARE, reason=reason)
    return Capabilities(provides={"weight_bits": 8, "product": "fp8"}, requires=(demand,) if old else ())
