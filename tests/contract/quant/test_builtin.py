"""Contract suite for every built-in quantizer."""

from __future__ import annotations

import torch

from dovetail.core.interfaces import LinearMethod, Quantizer
from dovetail.core.testing.checkpoint import MemoryCheckpoint
from dovetail.core.testing.quant import QuantizerContract
from dovetail.plugins.quant.config import FP8Config, Int8Config, NoneConfig
from dovetail.plugins.quant.fp8.format import E4M3, LARGEST, quantize_rows
from dovetail.plugins.quant.fp8.quantizer import FP8
from dovetail.plugins.quant.int8.quantizer import Int8
from dovetail.plugins.quant.none import Unquantized


class TestNone(QuantizerContract):
    def make(self) -> Quantizer:
        return Unquantized(NoneConfig())


class TestInt8(QuantizerContract):
    error = 0.02

    def make(self) -> Quantizer:
        return Int8(Int8Config())


class TestFP8(QuantizerContract):
    error = 0.06

    def make(self) -> Quantizer:
        return FP8(FP8Config())


class TestFP8PlainActivations(QuantizerContract):
    """8-bit weights alone, as on GPUs without FP8 matmuls."""

    error = 0.04

    def make(self) -> Quantizer:
        return FP8(FP8Config(activations="plain"))


class TestFP8OneScale(QuantizerContract):
    """One scale per matrix, and one for all tokens of a step."""

    error = 0.06
    rows_independent = False

    def make(self) -> Quantizer:
        return FP8(FP8Config(scales="tensor"))


class TestFP8ByTensor(QuantizerContract):
    """AutoFP8 layout: one scale per matrix, static input scales."""

    error = 0.06

    def make(self) -> Quantizer:
        quantizer = FP8(FP8Config())
        said = {"quant_method": "fp8", "activation_scheme": "static"}
        quantizer.read_checkpoint(MemoryCheckpoint({"quantization_config": said}))
        return quantizer

    def checkpoint(self, method: LinearMethod, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = weight_OI.float().abs().max() / LARGEST
        values = (weight_OI.float() / scale).clamp(-LARGEST, LARGEST).to(E4M3)
        return {"weight": values, "weight_scale": scale, "input_scale": torch.ones(1)}


class TestFP8ByRow(QuantizerContract):
    """compressed-tensors layout: one scale per output channel."""

    error = 0.06

    def make(self) -> Quantizer:
        eight = {"num_bits": 8, "type": "float", "symmetric": True}
        group = {
            "targets": ["Linear"],
            "weights": {**eight, "strategy": "channel", "dynamic": False},
            "input_activations": {**eight, "strategy": "token", "dynamic": True},
        }
        said = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
        quantizer = FP8(FP8Config())
        quantizer.read_checkpoint(MemoryCheckpoint({"quantization_config": said}))
        return quantizer

    def checkpoint(self, method: LinearMethod, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
        values, scale_O1 = quantize_rows(weight_OI.float())
        return {"weight": values, "weight_scale": scale_O1}
