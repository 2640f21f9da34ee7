"""The contract suites over built-in components, with their kernels compiled."""

from __future__ import annotations

import torch

from dovetail.core.interfaces import AttentionBackend, BuildContext, Model, ModelSpec, Quantizer
from dovetail.core.testing.attention import AttentionContract
from dovetail.core.testing.model import ModelContract
from dovetail.core.testing.quant import QuantizerContract
from dovetail.plugins.attention.config import SDPAConfig
from dovetail.plugins.attention.sdpa.backend import SDPA
from dovetail.plugins.model.config import LlamaConfig
from dovetail.plugins.model.llama.decoder import Llama
from dovetail.plugins.quant.config import FP8Config, Int8Config, NoneConfig
from dovetail.plugins.quant.fp8.quantizer import FP8
from dovetail.plugins.quant.int8.quantizer import Int8
from dovetail.plugins.quant.none import Unquantized

TINY = LlamaConfig(
    load="dummy",
    hf={
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 67,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    },
)


class TestSDPA(AttentionContract):
    device = "cuda"
    kv_dtypes = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)

    def make(self) -> AttentionBackend:
        return SDPA(SDPAConfig())


class TestSDPABfloat16(TestSDPA):
    dtype = torch.bfloat16
    kv_dtypes = ()


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


class TestLlama(ModelContract):
    device = "cuda"

    def spec(self) -> ModelSpec:
        return Llama.spec(TINY)

    def make(self, build: BuildContext) -> Model:
        return Llama(TINY, build)
