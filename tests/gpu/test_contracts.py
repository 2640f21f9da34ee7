"""The contract suites over built-in components, with their kernels compiled."""

from __future__ import annotations

from dovetail.core.interfaces import BuildContext, Model, ModelSpec, Quantizer
from dovetail.core.testing.model import ModelContract
from dovetail.core.testing.quant import QuantizerContract
from dovetail.plugins.model.config import LlamaConfig
from dovetail.plugins.model.llama.decoder import Llama
from dovetail.plugins.quant.config import FP8Config, Int8Config, NoneConfig
from dovetail.plugins.quant.fp8.quantizer import FP8
from dovetail.plugins.quant.int8.quantizer import Int8
from dovetail.plugins.quant.none import Unquantized

from ..contract.attention import test_builtin
from ..contract.model.tiny import LLAMA

TINY = LlamaConfig(load="dummy", hf=LLAMA)


class TestSDPA(test_builtin.TestSDPA):
    device = "cuda"


class TestSDPABfloat16(test_builtin.TestSDPABfloat16):
    device = "cuda"


class TestUnquantized(QuantizerContract):
    device = "cuda"

    def make(self) -> Quantizer:
        return Unquantized(NoneConfig())


class TestInt8(QuantizerContract):
    device = "cuda"
    error = 0.02

    def make(self) -> Quantizer:
        return Int8(Int8Config())


class TestFP8(QuantizerContract):
    device = "cuda"
    error = 0.06

    def make(self) -> Quantizer:
        return FP8(FP8Config())


class TestFP8PlainActivations(QuantizerContract):
    device = "cuda"
    error = 0.04

    def make(self) -> Quantizer:
        return FP8(FP8Config(activations="plain"))


class TestLlama(ModelContract):
    device = "cuda"

    def spec(self) -> ModelSpec:
        return Llama.spec(TINY)

    def make(self, build: BuildContext) -> Model:
        return Llama(TINY, build)
