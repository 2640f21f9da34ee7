"""DeepSeek V2 and V3 (2024): compressed attention and the keys of their experts. Imports no torch."""

from __future__ import annotations

from typing import Literal

from dovetail.core.config_json import ConfigJson
from dovetail.core.interfaces import MLA
from dovetail.plugins.model.llama.family import Family
from dovetail.plugins.model.llama.moe import Experts, read_grouped

MOST_COLUMNS = 2**18
Q_RANK = 1536
"""Default of q_lora_rank. In files of models without compressed queries it is null."""


def read_mla(config: ConfigJson) -> MLA:
    if config.flag("attention_bias"):
        raise config.unsupported(
            "attention_bias", "model=llama has no biases beside compressed attention; set model=transformers"
        )
    if not config.flag("rope_interleave", True):
        raise config.unsupported("rope_interleave", "model=llama rotates adjacent pairs; set model=transformers")

    def size(key: str, default: int | None = None) -> int:
        return config.count(key, default, at_most=MOST_COLUMNS)

    compressed = config.get("q_lora_rank") is not None or "q_lora_rank" not in config.values
    return MLA(
        q_rank=size("q_lora_rank", Q_RANK) if compressed else 0,
        kv_rank=size("kv_lora_rank", 512),
        rope_dim=size("qk_rope_head_dim", 64),
        nope_dim=size("qk_nope_head_dim", 128),
        v_dim=size("v_head_dim", 128),
    )


def read_v2_experts(config: ConfigJson, layers: int) -> Experts:
    """V2 selects groups by their best expert, and V2-Lite has none. Scores are not normalized."""
    _check_every_layer(config)
    if config.flag("norm_topk_prob"):
        raise config.wrong("norm_topk_prob", "scores of DeepSeek V2 are not divided by their sum")
    config.choice("scoring_func", ("softmax",), "softmax")
    grouped = config.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy") != "greedy"
    return read_grouped(
        config, layers, "softmax", shared=2, normalize=False, grouped=grouped, group_best=1, selection_bias=False
    )


def read_v3_experts(config: ConfigJson, layers: int) -> Experts:
    _check_every_layer(config)
    scores: Literal["softmax", "sigmoid"] = (
        "softmax" if config.choice("scoring_func", ("sigmoid", "softmax"), "sigmoid") == "softmax" else "sigmoid"
    )
    config.choice("topk_method", ("noaux_tc",), "noaux_tc")
    # Files without them have transformers' defaults, which are not those of other families.
    config.count("n_group")
    config.number("routed_scaling_factor")
    return read_grouped(config, layers, scores, dense=3, shared=1)


def _check_every_layer(config: ConfigJson) -> None:
    if config.count("moe_layer_freq", 1) != 1:
        raise config.wrong("moe_layer_freq", "model=llama has experts in every layer after the dense ones")


FAMILIES = {
    "DeepseekV2ForCausalLM": Family(experts=read_v2_experts, mla=read_mla, interleaved=True),
    "DeepseekV3ForCausalLM": Family(experts=read_v3_experts, mla=read_mla, interleaved=True),
}
