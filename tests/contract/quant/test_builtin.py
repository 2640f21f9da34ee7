"""Contract suite for every built-in quantizer."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dovetail.core.interfaces import LinearMethod, Quantizer
from dovetail.core.layouts.words import pack_nibbles
from dovetail.core.testing.checkpoint import MemoryCheckpoint
from dovetail.core.testing.quant import QuantizerContract
from dovetail.plugins.quant.config import FP4Config, FP8Config, Int4Config, Int8Config, NF4Config, NoneConfig
from dovetail.plugins.quant.fp4.quantizer import FP4
from dovetail.plugins.quant.fp4.rounding import round_to_fp4
from dovetail.plugins.quant.fp8.format import E4M3, LARGEST, quantize_rows
from dovetail.plugins.quant.fp8.quantizer import FP8
from dovetail.plugins.quant.int4.quantizer import Int4
from dovetail.plugins.quant.int8.format import quantize_rows as quantize_int8
from dovetail.plugins.quant.int8.quantizer import Int8
from dovetail.plugins.quant.nf4.quantizer import NF4Quantizer
from dovetail.plugins.quant.none import Unquantized

from ...layouts import awq, bitsandbytes, compressed_tensors, gptq, pack_quantized, rounded

nightly = pytest.mark.skipif(os.environ.get("DOVETAIL_GRID") != "pairs", reason="the nightly script runs it")
"""For layouts whose code other classes run, too."""


# Errors of formats with 4 bits: the mean over products of one token plus six standard deviations, from 300 draws of
# the suite's smallest shape. Scales of other groups, or zeros that are off by one, give 0.25 on average.


def compressed_fp4(form: str, block: int) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "group_size": block, "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


class TestNone(QuantizerContract):
    def make(self) -> Quantizer:
        return Unquantized(NoneConfig())


class TestInt8(QuantizerContract):
    error = 0.02

    def make(self) -> Quantizer:
        return Int8(Int8Config())


@nightly
class TestInt8CompressedTensors(QuantizerContract):
    """One scale per output channel; static inputs with zero points, which are not used."""

    error = 0.02

    def make(self) -> Quantizer:
        weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
        inputs = {**weights, "strategy": "tensor", "symmetric": False, "dynamic": False}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
        said = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}
        quantizer = Int8(Int8Config())
        quantizer.read_checkpoint(MemoryCheckpoint({"quantization_config": said}))
        return quantizer

    def checkpoint(self, method: LinearMethod, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
        values, scale_O1 = quantize_int8(weight_OI.float())
        static = {"input_scale": torch.tensor([0.1]), "input_zero_point": torch.zeros(1, dtype=torch.int8)}
        return {"weight": values, "weight_scale": scale_O1, **static}


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


@nightly
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


class TestFP8Blocks(QuantizerContract):
    """Blocks of 64 outputs and 64 inputs, which the shares of two ranks cut."""

    error = 0.06

    def make(self) -> Quantizer:
        said = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 64]}
        quantizer = FP8(FP8Config())
        quantizer.read_checkpoint(MemoryCheckpoint({"quantization_config": said}))
        return quantizer

    def checkpoint(self, method: LinearMethod, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs, inputs = weight_OI.shape
        padded = F.pad(weight_OI.float(), (0, -inputs % 64, 0, -outputs % 64))
        amax = padded.unflatten(0, (-1, 64)).unflatten(2, (-1, 64)).abs().amax((1, 3)).clamp(min=1e-10)
        scale = (amax / LARGEST).repeat_interleave(64, 0).repeat_interleave(64, 1)[:outputs, :inputs]
        return {"weight": (weight_OI.float() / scale).to(E4M3), "weight_scale_inv": amax / LARGEST}


class TestFP8RoundedBlocks(QuantizerContract):
    """Blocks of 128 outputs and inputs, made of plain weights; those of a rank's share."""

    error = 0.06

    def make(self) -> Quantizer:
        return FP8(FP8Config(scales="block"))


class TestNVFP4(QuantizerContract):
    error = 0.18

    def make(self) -> Quantizer:
        return FP4(FP4Config())


class TestMXFP4(QuantizerContract):
    error = 0.22

    def make(self) -> Quantizer:
        return FP4(FP4Config(block=32, activations="fp8"))


class StoredFP4(QuantizerContract):
    error = 0.18
    config: dict[str, Any]

    def make(self) -> Quantizer:
        quantizer = FP4(FP4Config())
        quantizer.read_checkpoint(MemoryCheckpoint({"quantization_config": self.config}))
        return quantizer


class TestNVFP4CompressedTensors(StoredFP4):
    config = compressed_fp4("nvfp4-pack-quantized", 16)

    def checkpoint(self, method: LinearMethod, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
        codes, scale_OG, _, row_scale_O = round_to_fp4(weight_OI.float(), 16, nvfp4=True)
        packed = pack_nibbles(F.pad(codes, (0, codes.shape[1] % 2)))
        return {"weight_packed": packed, "weight_scale": scale_OG, "weight_global_scale": 1 / row_scale_O[:1]}


@nightly
class TestNVFP4ModelOpt(StoredFP4):
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}

    def checkpoint(self, method: LinearMethod, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
        codes, scale_OG, _, row_scale_O = round_to_fp4(weight_OI.float(), 16, nvfp4=True)
        packed = pack_nibbles(F.pad(codes, (0, codes.shape[1] % 2)))
        scales = {"weight_scale_2": row_scale_O[0], "input_scale": torch.tensor(0.1)}
        return {"weight": packed, "weight_scale": scale_OG, **scales}


@nightly
class TestMXFP4CompressedTensors(StoredFP4):
    error = 0.22
    config = compressed_fp4("mxfp4-pack-quantized", 32)

    def checkpoint(self, method: LinearMethod, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
        codes, scale_OG, _, _ = round_to_fp4(weight_OI.float(), 32, nvfp4=False)
        packed = pack_nibbles(F.pad(codes, (0, codes.shape[1] % 2)))
        return {"weight_packed": packed, "weight_scale": (scale_OG.log2() + 127).to(torch.uint8)}


class TestNF4(QuantizerContract):
    error = 0.18

    def make(self) -> Quantizer:
        return NF4Quantizer(NF4Config())


class TestNF4Bitsandbytes(QuantizerContract):
    """Double quantization: scales are 8-bit codes with a scale of their own."""

    error = 0.19
    nested = True
    shapes = ((128, (96,)), (256, (64, 64)), (128, (96, 32, 64)))

    def make(self) -> Quantizer:
        said = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
        quantizer = NF4Quantizer(NF4Config())
        said |= {"bnb_4bit_use_double_quant": self.nested}
        quantizer.read_checkpoint(MemoryCheckpoint({"quantization_config": said}))
        return quantizer

    def checkpoint(self, method: LinearMethod, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
        return bitsandbytes(weight_OI.float(), self.nested)


@nightly
class TestNF4BitsandbytesPlainScales(TestNF4Bitsandbytes):
    error = 0.18
    nested = False


class TestInt4(QuantizerContract):
    error = 0.16

    def make(self) -> Quantizer:
        return Int4(Int4Config(group=32))


@nightly
class TestInt4Symmetric(QuantizerContract):
    error = 0.19

    def make(self) -> Quantizer:
        return Int4(Int4Config(group=64, symmetric=True))


@nightly
class TestInt8Groups(QuantizerContract):
    error = 0.02

    def make(self) -> Quantizer:
        return Int4(Int4Config(bits=8, group=0))


class TestInt4FP8Inputs(QuantizerContract):
    error = 0.16

    def make(self) -> Quantizer:
        return Int4(Int4Config(group=32, activations="fp8"))


class StoredInt4(QuantizerContract):
    """Codes in the layout of a published checkpoint, rounded to nearest."""

    error = 0.18
    config: dict[str, Any]

    def make(self) -> Quantizer:
        quantizer = Int4(Int4Config())
        quantizer.read_checkpoint(MemoryCheckpoint({"quantization_config": self.config}))
        return quantizer


class TestPackQuantized(StoredInt4):
    config = pack_quantized(num_bits=4, strategy="group", group_size=32, symmetric=False)

    def checkpoint(self, method: LinearMethod, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
        return compressed_tensors(rounded(weight_OI, 4, 32, True), 4, True)


@nightly
class TestPackQuantizedRows(StoredInt4):
    error = 0.02
    config = pack_quantized(num_bits=8, strategy="channel", symmetric=True)

    def checkpoint(self, method: LinearMethod, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
        return compressed_tensors(rounded(weight_OI, 8, 0, False), 8, False)


class TestAWQ(StoredInt4):
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}

    def checkpoint(self, method: LinearMethod, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
        return awq(rounded(weight_OI, 4, 32, True))


@nightly
class TestGPTQ(StoredInt4):
    """Version 1, whose zeros are one too small, without act-order."""

    config = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False}

    def checkpoint(self, method: LinearMethod, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
        return gptq(rounded(weight_OI, 4, 64, True))


class TestGPTQActOrder(StoredInt4):
    config = {**TestGPTQ.config, "group_size": 32, "desc_act": True, "checkpoint_format": "gptq_v2"}

    def checkpoint(self, method: LinearMethod, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
        return gptq(rounded(weight_OI, 4, 32, True, act_order=True), offset=0)
