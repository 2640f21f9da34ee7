"""Contract suite for the other architectures of model=llama, with checkpoints in transformers' layout."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from dovetail.core.interfaces import BuildContext, ForwardContext, KVGroup, Model, ModelSpec, MTPLayer
from dovetail.core.testing.model import ModelContract, Weights
from dovetail.plugins.model.config import LlamaConfig
from dovetail.plugins.model.llama.decoder import Llama
from dovetail.plugins.model.llama.mtp import LlamaMTPLayer

from ..faults import each, rejects, suite
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


MOE = {"num_experts_per_tok": 3, "moe_intermediate_size": 24}
MIXTRAL = {**tiny.LLAMA, "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 3}
QWEN3_MOE = {**tiny.LLAMA, **MOE, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "mlp_only_layers": [0]}
GLM4_MOE = {**tiny.LLAMA, **MOE, "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 4, "use_qk_norm": True}
DEEPSEEK_V3 = {
    **tiny.LLAMA,
    **MOE,
    "num_key_value_heads": tiny.LLAMA["num_attention_heads"],
    "architectures": ["DeepseekV3ForCausalLM"],
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}


def published(state: Weights) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of published checkpoints, which have each expert's matrices apart."""
    shapes = {}
    for name, tensor in state.items():
        below, experts, matrix = name.rpartition(".experts.")
        if not experts:
            shapes[name] = tuple(tensor.shape)
            continue
        count, rows, columns = tensor.shape
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[matrix]
        for expert in range(count):
            for part in parts:
                shapes[f"{below}.experts.{expert}.{part}.weight"] = (rows // len(parts), columns)
    return shapes


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
            name: torch.randn(shape, generator=random) * shape[-1] ** -0.5 + (len(shape) == 1)
            for name, shape in published(model.state_dict()).items()
            if name != tied
        }

    def config(self, folder: str) -> LlamaConfig:
        return LlamaConfig(path=folder)


@pytest.mark.nightly
class TestQwen2(TestQwen3):
    hf = QWEN2


class TestGemma3(TestQwen3):
    hf = GEMMA3


@pytest.mark.nightly
class TestPhi3(TestQwen3):
    hf = PHI3


@pytest.mark.nightly
class TestFalcon(TestQwen3):
    hf = FALCON


class TestNewFalcon(TestQwen3):
    hf = NEW_FALCON


class TestGPTJ(TestQwen3):
    hf = GPTJ


class TestQwen3MoE(TestQwen3):
    hf = QWEN3_MOE

    def checkpoint(self) -> Weights | None:
        # Every expert must have tokens: states differ by token more than by context, and no bias is large.
        scales = {"model.embed_tokens.weight": 8.0}
        scales |= {f"model.layers.{layer}.mlp.gate.e_score_correction_bias": 0.05 for layer in range(3)}
        return {name: weight * scales.get(name, 1.0) for name, weight in super().checkpoint().items()}


@pytest.mark.nightly
class TestGLM4MoE(TestQwen3MoE):
    hf = GLM4_MOE


class TestDeepseekV3(TestQwen3MoE):
    """With a layer for multi-token prediction, which has the tensors of a layer and a few more."""

    hf = {**DEEPSEEK_V3, "num_nextn_predict_layers": 1}

    def mtp_weights(self) -> Weights | None:
        layers, random = self.hf["num_hidden_layers"], torch.Generator().manual_seed(4)
        prefix, hidden = f"model.layers.{layers}.", self.hf["hidden_size"]

        class Deeper(type(self)):  # type: ignore[misc]
            hf = {**self.hf, "num_hidden_layers": layers + 1}

        weights = {name: tensor for name, tensor in Deeper().checkpoint().items() if name.startswith(prefix)}
        for name in ("enorm", "hnorm", "shared_head.norm"):
            weights[f"{prefix}{name}.weight"] = torch.rand(hidden, generator=random) + 0.5
        weights[f"{prefix}mlp.gate.e_score_correction_bias"] *= 0.05
        pair = torch.randn(hidden, 2 * hidden, generator=random) * (2 * hidden) ** -0.5
        return {**weights, f"{prefix}eh_proj.weight": pair}


@pytest.mark.nightly
class TestMixtral(TestQwen3MoE):
    hf = MIXTRAL

    def checkpoint(self) -> Weights | None:
        names = {"mlp.experts": "block_sparse_moe.experts", "mlp.gate": "block_sparse_moe.gate"}
        names |= {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
        rename = functools.partial(functools.reduce, lambda name, pair: name.replace(*pair), names.items())
        return {rename(name): weight for name, weight in super().checkpoint().items()}


# Layers for multi-token prediction with one fault each; the suite must reject them.


class IgnoresStates(LlamaMTPLayer):
    def forward(self, embeds_TC: torch.Tensor, states_TC: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        return super().forward(embeds_TC, torch.zeros_like(states_TC), ctx)


class MixesTokens(LlamaMTPLayer):
    def forward(self, embeds_TC: torch.Tensor, states_TC: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        return super().forward(embeds_TC, states_TC + 0.1 * states_TC.mean(0), ctx)


class DiffersByRank(LlamaMTPLayer):
    def forward(self, embeds_TC: torch.Tensor, states_TC: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        return super().forward(embeds_TC, states_TC, ctx) * (1 + 0.1 * self.build.collective.rank)


class TakesTheModelsPages(LlamaMTPLayer):
    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        return tuple(replace(group, id=0) for group in super().kv_groups)


class ForgetsANorm(LlamaMTPLayer):
    def load(self, weights: Any) -> None:
        super().load(weights)
        self.embed_norm.weight.fill_(1.0)


BROKEN: dict[str, list[type[LlamaMTPLayer]]] = {
    "test_the_mtp_layer_is_a_model_of_one_layer": [TakesTheModelsPages],
    "test_chunks_do_not_matter_to_the_mtp_layer": [MixesTokens],
    "test_the_mtp_layer_reads_token_and_state": [IgnoresStates],
    "test_the_mtp_layer_is_equal_on_every_rank": [DiffersByRank],
    "test_every_weight_of_the_mtp_layer_counts": [ForgetsANorm],
}


def suite_of(layer: type[LlamaMTPLayer]) -> Any:
    class Predicts(Llama):
        def mtp_layer(self, build: BuildContext) -> MTPLayer:
            made = super().mtp_layer(build)
            made.__class__ = layer
            return made

    return suite(TestDeepseekV3, make=lambda self, build: Predicts(LlamaConfig(hf=self.hf, load="dummy"), build))


@each(BROKEN)
def test_the_suite_rejects(broken: type[LlamaMTPLayer], test: str) -> None:
    assert rejects(suite_of(broken), test)
