"""Experts of decoder families: the reader of their keys in config.json, and their names in checkpoints. Imports no
torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dovetail.core.config_json import ConfigJson
from dovetail.core.interfaces import SWIGLU, GatedActivation, MoE, RoutingRule

MOST_EXPERTS = 2**14
MOST_CHANNELS = 2**22
MOST_SCALE = 1e6


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names in the checkpoint, within a layer."""

    router: str = "mlp.gate"
    stacked_router: str | None = None
    """The router in files of stacked experts; None = as `router`."""
    selection_bias: str | None = None
    """Tensor that is added to the scores by which experts are selected."""
    matrices: tuple[str, str, str] = (
        "mlp.experts.{}.gate_proj",
        "mlp.experts.{}.up_proj",
        "mlp.experts.{}.down_proj",
    )
    """gate, up and down of each expert."""
    shared: tuple[str, str, str] = (
        "mlp.shared_experts.gate_proj",
        "mlp.shared_experts.up_proj",
        "mlp.shared_experts.down_proj",
    )
    """gate, up and down of the experts that process every token, which are one MLP."""

    alternate: bool = False
    """Whether stacked matrices are [inputs, outputs], with alternating outputs of gate and up (gpt-oss, 2025)."""


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """Facts about a model's experts that the decoder needs besides MoE."""

    rule: RoutingRule
    names: ExpertNames
    activation: GatedActivation = SWIGLU
    bias: bool = False
    """Whether router and experts have biases."""


Experts = tuple[MoE, ExpertLayout]


def read_gpt_oss(config: ConfigJson, layers: int) -> Experts:
    # Newer versions of transformers write num_experts_per_tok, the first files also have experts_per_token.
    experts, active = _counts(config, "num_local_experts", 128, 4)
    moe = MoE(experts, active, config.count("intermediate_size", 2880, at_most=MOST_CHANNELS))
    alpha, limit = config.number("swiglu_alpha", 1.702), config.number("swiglu_limit", 7.0)
    names = ExpertNames("mlp.router", alternate=True)
    rule = RoutingRule(experts, active, normalize=True)
    return moe, ExpertLayout(rule, names, GatedActivation(alpha, limit, 1.0), bias=True)


def read_mixtral(config: ConfigJson, layers: int) -> Experts:
    experts, active = _counts(config, "num_local_experts", 8, 2)
    moe = MoE(experts, active, config.count("intermediate_size", at_most=MOST_CHANNELS))
    names = ExpertNames(
        "block_sparse_moe.gate",
        "mlp.gate",
        matrices=(
            "block_sparse_moe.experts.{}.w1",
            "block_sparse_moe.experts.{}.w3",
            "block_sparse_moe.experts.{}.w2",
        ),
    )
    return moe, ExpertLayout(RoutingRule(experts, active, normalize=True), names)


def read_qwen3(config: ConfigJson, layers: int) -> Experts:
    # Published files say num_experts, those that newer versions of transformers write num_local_experts.
    key = "num_experts" if config.get("num_local_experts") is None else "num_local_experts"
    experts, active = _counts(config, key, 128, 8)
    if config.count("decoder_sparse_step", 1) != 1:
        raise config.unsupported(
            "decoder_sparse_step",
            "model=llama runs models with experts in every layer: it must be 1, or set model=transformers",
        )
    dense = config.counts("mlp_only_layers")
    if list(dense) != list(range(len(dense))):
        raise config.unsupported(
            "mlp_only_layers",
            "model=llama runs models whose layers without experts come first; set model=transformers",
        )
    channels = config.count("moe_intermediate_size", 768, at_most=MOST_CHANNELS)
    rule = RoutingRule(experts, active, normalize=config.flag("norm_topk_prob"))
    return MoE(experts, active, channels, dense_layers=min(len(dense), layers)), ExpertLayout(rule, ExpertNames())


def read_glm4(config: ConfigJson, layers: int) -> Experts:
    # Published files lack these keys of DeepSeek. Other values would mean other experts.
    config.choice("scoring_func", ("sigmoid",), "sigmoid")
    config.choice("topk_method", ("noaux_tc",), "noaux_tc")
    return read_grouped(config, layers, "sigmoid", experts=128, channels=1408, dense=1, shared=1, active=8)


def read_grouped(
    config: ConfigJson,
    layers: int,
    scores: Literal["softmax", "sigmoid"],
    *,
    experts: int | None = None,
    channels: int | None = None,
    dense: int = 0,
    shared: int = 0,
    active: int | None = None,
    normalize: bool = True,
    grouped: bool = True,
    group_best: Literal[1, 2] = 2,
    selection_bias: bool = True,
) -> Experts:
    """Read the keys of DeepSeek and GLM-4.5, whose defaults are given; None = the key is required.

    `grouped`: whether the keys of groups count. `group_best`: as in RoutingRule.
    """
    experts, active = _counts(config, "n_routed_experts", experts, active)
    groups = config.count("n_group", 1, at_most=experts) if grouped else 1
    if experts % groups:
        raise config.wrong("n_group", f"it must divide {experts} experts")
    kept = config.count("topk_group", groups if groups == 1 else None, at_most=groups) if grouped else 1
    if active > experts // groups * kept:
        raise config.wrong("topk_group", f"so many groups have fewer than {active} experts")
    moe = MoE(
        experts=experts,
        active=active,
        intermediate=config.count("moe_intermediate_size", channels, at_most=MOST_CHANNELS),
        shared=config.count("n_shared_experts", shared, at_least=0, at_most=experts),
        dense_layers=config.count("first_k_dense_replace", dense, at_least=0, at_most=layers),
    )
    scale = config.number("routed_scaling_factor", 1.0, at_most=MOST_SCALE)
    normalize = config.flag("norm_topk_prob", normalize)
    rule = RoutingRule(experts, active, scores, normalize, scale, groups, kept, group_best)
    bias = "mlp.gate.e_score_correction_bias" if selection_bias else None
    return moe, ExpertLayout(rule, ExpertNames(selection_bias=bias))


def _counts(config: ConfigJson, key: str, experts: int | None, active: int | None) -> tuple[int, int]:
    """Read the number of experts, and of those that a token has."""
    count = config.count(key, experts, at_most=MOST_EXPERTS)
    return count, config.count("num_experts_per_tok", active, at_most=count)
