"""Contract suite for model=transformers: rotary positions over two ranks, and learned positions with [inputs, outputs]
matrices."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from dovetail.core.interfaces import BuildContext, Model, ModelSpec
from dovetail.core.testing.model import ModelContract, Weights
from dovetail.plugins.model.config import TransformersConfig
from dovetail.plugins.model.transformers.decoder import TransformersDecoder

pytestmark = pytest.mark.nightly

COHERE2 = {
    "architectures": ["Cohere2ForCausalLM"],
    "model_type": "cohere2",
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "eos_token_id": 2,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 67,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "eos_token_id": 2,
}


class TestCohere2(ModelContract):
    hf: dict[str, Any] = COHERE2

    def spec(self) -> ModelSpec:
        return TransformersDecoder.spec(TransformersConfig(hf=self.hf, load="dummy"))

    def make(self, build: BuildContext) -> Model:
        return TransformersDecoder(TransformersConfig(hf=self.hf, load="dummy"), build)

    def checkpoint(self) -> Weights | None:
        return weights_of(self.hf["model_type"])

    def config(self, folder: str) -> TransformersConfig:
        return TransformersConfig(path=folder)


class TestGPT2(TestCohere2):
    hf = GPT2
    ranks = ()
    ignored = ("attn.bias",)  # By the library, also as a part of "attn.c_attn.bias".


@cache
def weights_of(kind: str) -> Weights:
    """Return random tensors under the names that transformers saves."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    hf = {"cohere2": COHERE2, "gpt2": GPT2}[kind]
    config = CONFIG_MAPPING[kind].from_dict(hf)
    with torch.device("meta"):
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    random = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(weight.shape, generator=random) * (0.2 if weight.ndim > 1 else 0.1) + (weight.ndim == 1)
        for name, weight in model.named_parameters()
    }
