"""Capabilities of the built-in quantizers: weight size and matmul format, used to plan memory and time."""

from __future__ import annotations

from typing import Any

from dovetail.core.compose import Selected
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
from dovetail.plugins.quant.gguf.checkpoint import bits_of_mix


def _provides(config: FP8Config | FP4Config | Int4Config | NF4Config, bits: float, host: Host) -> dict[str, Any]:
    """Return what a quantizer with the options `activations` and `head` provides."""
    return {"weight_bits": bits, **_product(config.activations), **_head(config.head, host)}


def _head(head: str, host: Host) -> dict[str, Any]:
    """Return the capabilities that a value of the option `head` sets."""
    return {"head_bits": 8, "head_product": "model" if _old(host) else "fp8"} if head == "fp8" else {}


def _product(activations: str) -> dict[str, Any]:
    """Return the capabilities that a value of the option `activations` sets; auto = the checkpoint does."""
    return {"product": "fp8" if activations == "fp8" else "model", "fixed_product": activations != "auto"}


def _many_rows(many_rows: str, activations: str) -> dict[str, Any]:
    """Return the capabilities that the options `many_rows` and `activations` set."""
    copies = 8 if many_rows == "kept" and activations != "model" else 0
    return {"rounds": many_rows != "exact", "copy_bits": copies}


def _with_activations(
    config: FP4Config | GGUFConfig | Int4Config | NF4Config, provides: dict[str, Any], host: Host
) -> Capabilities:
    """Return capabilities with what the option `activations` requires, since kernels that encode E4M3 do not compile
    for older GPUs, and with what the option `many_rows` sets."""
    needs_fp8 = config.activations == "fp8" and _old(host)
    provides = {**provides, **_many_rows(config.many_rows, config.activations)}
    return Capabilities(provides=provides, requires=(_multiplies_fp8(),) if needs_fp8 else ())


def _old(host: Host) -> bool:
    """Whether the host has a GPU without FP8 matmuls."""
    return bool(host.device_count) and host.compute_capability < FP8_HARDWARE


def int8(config: Int8Config, host: Host) -> Capabilities:
    return Capabilities(provides={"weight_bits": 8, "product": "int8"})


def int4(config: Int4Config, host: Host) -> Capabilities:
    bits = config.bits + ((16 if config.symmetric else 24) / config.group if config.group else 0)
    return _with_activations(config, _provides(config, bits, host), host)


def fp4(config: FP4Config, host: Host) -> Capabilities:
    # Scales of NVFP4 have 8 bits. Those of MXFP4 have 8 in experts, and 16 in other matrices.
    experts = {"expert_bits": 4.25 if config.block == 32 else 4.5}
    plain = {"weight_bits": "model"} if config.layers == "experts" else {}
    return _with_activations(config, {**_provides(config, 4.5, host), **experts, **plain}, host)


def nf4(config: NF4Config, host: Host) -> Capabilities:
    return _with_activations(config, _provides(config, 4.5, host), host)


def mixed(config: MixedConfig, host: Host) -> Capabilities:
    """The requirements of both; weights and products are those of the layers that no pattern matches, and `of_layers`
    has the others."""
    those, rest = config.those.capabilities(host), config.rest.capabilities(host)
    requires = [*those.requires, *rest.requires]
    provides = {**_formats(config.rest, rest), **_head(config.head, host)}
    if config.layers:
        provides["of_layers"] = ((config.layers, _formats(config.those, those)),)
    if config.activations != "auto":
        # Quantizers without the option, such as int8, keep their own format.
        provides |= {**_product(config.activations), "fixed_product": ("fp8", "model")}
    if config.many_rows != "rounded":
        provides |= _many_rows(config.many_rows, config.activations)
    if config.activations == "fp8" and _old(host):
        requires.append(_multiplies_fp8())
    lacks = (*those.lacks, *rest.lacks)
    return Capabilities(provides=provides, requires=tuple(dict.fromkeys(requires)), lacks=lacks)


def _formats(quant: Selected, stated: Capabilities) -> dict[str, Any]:
    """Return what a nested quantizer provides. quant=none states no formats, since those are the model's dtype."""
    plain = {"weight_bits": "model", "product": "model"} if quant.name == "none" else {}
    return plain | dict(stated.provides)


def gguf(config: GGUFConfig, host: Host) -> Capabilities:
    product = "fp8" if config.activations == "fp8" else "model"
    return _with_activations(config, {**bits_of_mix(config.mix), "product": product, "plain_weights": False}, host)


def fp8(config: FP8Config, host: Host) -> Capabilities:
    old = _old(host)
    # A float32 scale for each 128 inputs of a row; experts have one for each block.
    provides = _provides(config, 8.25 if config.scales == "block" else 8, host)
    if config.scales == "block":
        provides["expert_bits"] = 8
    if config.plain_inputs or (config.activations == "auto" and old):
        head = {"head_product": "model"} if config.head == "fp8" else {}
        return Capabilities(provides={**provides, **head})
    return Capabilities(provides={**provides, "product": "fp8"}, requires=(_multiplies_fp8(),) if old else ())


def _multiplies_fp8() -> Requires:
    reason = "quant.activations=fp8 multiplies in FP8, as Ada and Hopper do; quant.activations=model runs on this GPU"
    return Requires(kind="host", key="compute_capability", at_least=FP8_HARDWARE, reason=reason)
