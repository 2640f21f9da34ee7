"""Contract suite for the other architectures of model=llama, with checkpoints in transformers' layout."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from dovetail.core.interfaces import BuildContext, Model, ModelSpec
from dovetail.core.testing.model import ModelContract, Weights
from dovetail.plugins.model.config import LlamaConfig
from dovetail.plugins.model.llama.decoder import Llama

from . import tiny

QWEN3 = {**tiny.LLAMA, "architectures": ["Qwen3ForCausalLM"], "head_dim": 12}
QWEN2 = {
    **tiny.LLAMA,
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": True,
    "sliding_window": 9,
    "max_window_layers": 1,
}
GEMMA3 = {
    **tiny.LLAMA,
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 12,
    "query_pre_attn_scalar": 12,
    "sliding_window": 9,
    "sliding_window_pattern": 2,
    "tie_word_embeddings": True,
}
PHI3 = {**tiny.LLAMA, "architectures": ["Phi3ForCausalLM"], "pad_token_id": 0}
FALCON = {
    "architectures": ["FalconForCausalLM"],
    "vocab_size": 67,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}
NEW_FALCON = {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}
GPTJ = {
    "architectures": ["GPTJForCausalLM"],
    "vocab_size": 67,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "rotary_dim": 6,
    "eos_token_id": 2,
}


class TestQwen3(ModelContract):
    hf: dict[str, Any] = QWEN3

    def spec(self) -> ModelSpec:
        return Llama.spec(LlamaConfig(hf=self.hf, load="dummy"))

    def make(self, build: BuildContext) -> Model:
        return Llama(LlamaConfig(hf=self.hf, load="dummy"), build)

    def checkpoint(self) -> Weights | None:
        model_class = getattr(transformers, self.hf["architectures"][0])
        with torch.device("meta"):
            model = model_class._from_config(model_class.config_class(**self.hf))
        random = torch.Generator().manual_seed(3)
        tied = "lm_head.weight" if model.config.tie_word_embeddings else None
        return {
            name: torch.randn(weight.shape, generator=random) * weight.shape[-1] ** -0.5 + (weight.ndim == 1)
            for name, weight in model.state_dict().items()
            if name != tied
        }

    def config(self, folder: str) -> LlamaConfig:
        return LlamaConfig(path=folder)


class TestQwen2(TestQwen3):
    hf = QWEN2


class TestGemma3(TestQwen3):
    hf = GEMMA3


class TestPhi3(TestQwen3):
    hf = PHI3


class TestFalcon(TestQwen3):
    hf = FALCON


class TestNewFalcon(TestQwen3):
    hf = NEW_FALCON


class TestGPTJ(TestQwen3):
    hf = GPTJ
