"""Tensors and `quantization_config` of a quantized checkpoint, in the layout that transformers and vLLM read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dovetail.core.layouts import awq, compressed_tensors, gptq
from dovetail.plugins.app.quantize.config import QuantizeConfig
from dovetail.plugins.app.quantize.grid import LARGEST_E4M3, Quantized

FORMATS = {"w4a16": "pack-quantized", "w8a16": "pack-quantized", "w8a8": "int-quantized", "fp8": "float-quantized"}


def tensors_of(config: QuantizeConfig, quantized: Quantized) -> dict[str, torch.Tensor]:
    """Return the tensors of one matrix by the last part of their names."""
    codes_OI, scale_OG, zero_OG, bits = quantized.codes_OI, quantized.scale_OG, quantized.zero_OG, quantized.grid.bits
    if config.layout == "awq":
        return awq.pack(codes_OI, scale_OG, zero_OG)
    if config.layout == "gptq":
        return gptq.pack(codes_OI, scale_OG, zero_OG, quantized.groups(), bits)
    if config.weights == "fp8":
        return {"weight": codes_OI, "weight_scale": scale_OG}
    if config.weights == "w8a8":
        return {"weight": (codes_OI.to(torch.int16) - 128).to(torch.int8), "weight_scale": scale_OG}
    zero = None if config.symmetric else zero_OG
    order = {} if quantized.group_I is None else {"weight_g_idx": quantized.group_I}
    return {**compressed_tensors.pack(codes_OI, scale_OG, zero, bits), **order}


def kv_scales(largest: Mapping[str, float]) -> dict[str, torch.Tensor]:
    """Return the scales of an E4M3 cache, float32 [1]."""
    return {
        f"self_attn.{name}_scale": torch.tensor([max(value, 1e-6) / LARGEST_E4M3]) for name, value in largest.items()
    }


def quantization_config(config: QuantizeConfig) -> dict[str, Any]:
    bits = 4 if config.weights == "w4a16" else 8
    if config.layout == "awq":
        return {
            "quant_method": "awq",
            "version": "gemm",
            "bits": bits,
            "group_size": config.group or -1,
            "zero_point": True,
            "modules_to_not_convert": ["lm_head"],
        }
    if config.layout == "gptq":
        return {
            "quant_method": "gptq",
            "checkpoint_format": "gptq",
            "bits": bits,
            "group_size": config.group or -1,
            "sym": config.symmetric,
            "desc_act": config.act_order == "group",
            "static_groups": config.act_order == "static",
            "damp_percent": config.damping,
            "lm_head": False,
        }
    return _compressed_tensors(config, bits)


def _compressed_tensors(config: QuantizeConfig, bits: int) -> dict[str, Any]:
    packed, kind = config.weights in ("w4a16", "w8a16"), "float" if config.weights == "fp8" else "int"
    weights = {
        "num_bits": bits,
        "type": kind,
        "symmetric": not packed or config.symmetric,
        "strategy": "group" if packed and config.group else "channel",
        "dynamic": False,
    }
    if packed and config.group:
        weights["group_size"] = config.group
    if config.act_order != "none":
        weights["actorder"] = {"static": "weight", "group": "group"}[config.act_order]
    tokens = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
    cache = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None if packed else tokens}
    return {
        "quant_method": "compressed-tensors",
        "format": FORMATS[config.weights],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": cache if config.kv else None,
    }
