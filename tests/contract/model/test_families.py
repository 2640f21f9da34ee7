"""The contract suite over the other architectures of model=llama, with checkpoints as transformers makes them."""

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
FALCON = {
    "architectures": ["FalconForCausalLM"],
    "vocab_size": 67,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
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
    "initializer_range": 0.2,
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
        model = model_class._from_config(model_class.config_class(**self.hf), dtype=torch.float32)
        weights = dict(model.state_dict())
        if model.config.tie_word_embeddings:
            del weights["lm_head.weight"]
        random = torch.Generator().manual_seed(3)
        return {
            name: torch.rand(weight.shape, generator=random) + 0.5 if weight.ndim == 1 else weight
            for name, weight in weights.items()
        }

    def config(self, folder: str) -> LlamaConfig:
        return LlamaConfig(path=folder)


class TestQwen2(TestQwen3):
    hf = QWEN2


class TestFalcon(TestQwen3):
    hf = FALCON


class TestNewFalcon(TestQwen3):
    hf = NEW_FALCON


class TestGPTJ(TestQwen3):
    hf = GPTJ
