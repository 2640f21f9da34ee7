"""Contract suite for every built-in quantizer."""

from __future__ import annotations

from typing import Any

import torch

from dovetail.core.interfaces import LinearMethod, Quantizer
from dovetail.core.testing.checkpoint import MemoryCheckpoint
from dovetail.core.testing.quant import QuantizerContract
from dovetail.plugins.quant.config import FP8Config, Int4Config, Int8Config, NoneConfig
from dovetail.plugins.quant.fp8.format import E4M3, LARGEST, quantize_rows
from dovetail.plugins.quant.fp8.quantizer import FP8
from dovetail.plugins.quant.int4.quantizer import Int4
from dovetail.plugins.quant.int8.quantizer import Int8
from dovetail.plugins.quant.none import Unquantized

from ...layouts import awq, compressed_tensors, gptq, pack_quantized, rounded


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


class TestInt4(QuantizerContract):
    error = 0.11

    def make(self) -> Quantizer:
        return Int4(Int4Config(group=32))


class TestInt4Symmetric(QuantizerContract):
    error = 0.14

    def make(self) -> Quantizer:
        return Int4(Int4Config(group=64, symmetric=True))


class TestInt8Groups(QuantizerContract):
    error = 0.02

    def make(self) -> Quantizer:
        return Int4(Int4Config(bits=8, group=0))


class TestInt4FP8Inputs(QuantizerContract):
    error = 0.12

    def make(self) -> Quantizer:
        return Int4(Int4Config(group=32, activations="fp8"))


class StoredInt4(QuantizerContract):
    """Codes in the layout of a published checkpoint, rounded to nearest."""

    error = 0.12
    config: dict[str, Any]

    def make(self) -> Quantizer:
        quantizer = Int4(Int4Config())
        quantizer.read_checkpoint(MemoryCheckpoint({"quantization_config": self.config}))
        return quantizer


class TestPackQuantized(StoredInt4):
    config = pack_quantized(num_bits=4, strategy="group", group_size=32, symmetric=False)

    def checkpoint(self, method: LinearMethod, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
        return compressed_tensors(rounded(weight_OI, 4, 32, True), 4, True)


class TestPackQuantizedRows(StoredInt4):
    error = 0.02
    config = pack_quantized(num_bits=8, strategy="channel", symmetric=True)

    def checkpoint(self, method: LinearMethod, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
        return compressed_tensors(rounded(weight_OI, 8, 0, False), 8, False)


class TestAWQ(StoredInt4):
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}

    def checkpoint(self, method: LinearMethod, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
        return awq(rounded(weight_OI, 4, 32, True))


class TestGPTQ(StoredInt4):
    """Version 1, whose zeros are one too small, without act-order."""

    config = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False}

    def checkpoint(self, method: LinearMethod, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
        return gptq(rounded(weight_OI, 4, 64, True))


class TestGPTQActOrder(StoredInt4):
    config = {**TestGPTQ.config, "group_size": 32, "desc_act": True, "checkpoint_format": "gptq_v2"}

    def checkpoint(self, method: LinearMethod, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
        return gptq(rounded(weight_OI, 4, 32, True, act_order=True), offset=0)
