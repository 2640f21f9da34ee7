"""Differences between the families of model=llama, and the facts that the decoder needs. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dovetail.core.config_json import ConfigJson
from dovetail.core.interfaces import MLA
from dovetail.core.rope import RopeConfig
from dovetail.plugins.model.llama.moe import ExpertLayout, Experts

Read = Callable[[ConfigJson], Any]


@dataclass(frozen=True, slots=True)
class ConfigKeys:
    """Names in config.json of the sizes that every family has."""

    hidden: str = "hidden_size"
    layers: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    intermediate: str = "intermediate_size"
    max_len: str = "max_position_embeddings"
    eps: str = "rms_norm_eps"
    activation: str = "hidden_act"


@dataclass(frozen=True, slots=True)
class Names:
    """Names in the checkpoint. Names within a layer follow `layer` and a dot."""

    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{}"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Three matrices, or one with the queries, key and value of each kv head together."""
    qk_norm: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    o: str = "self_attn.o_proj"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Two matrices make a gated MLP."""
    down: str = "mlp.down_proj"


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Structure of a layer."""

    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """Norms before attention and before the MLP; a single one serves both."""
    parallel: bool = False
    """Whether the MLP reads the same input as attention (GPT-J, 2021) in place of attention's output."""
    after: tuple[str, ...] = ()
    """Norms of the outputs of attention and MLP, before they are added to the residual (Gemma 2, 2024); () = none."""


@dataclass(frozen=True, slots=True)
class Factors:
    """Constants that multiply activations."""

    embedding: float = 1.0
    block: float = 1.0
    """Factor of the outputs of attention and MLP, before they are added to the residual (Granite, 2024)."""
    logits: float = 1.0


def no(config: ConfigJson) -> bool:
    return False


def attention_bias(config: ConfigJson) -> bool:
    return config.flag("attention_bias")


@dataclass(frozen=True, slots=True)
class Family:
    """Differences from Llama 2. Functions read config.json where the models of a family differ."""

    keys: ConfigKeys = ConfigKeys()
    names: Names = Names()
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    """Suffixes of unused tensors in old checkpoints."""
    text: str = ""
    """Key of the decoder's settings in files of models that have other parts, too; "" = the file is the decoder's."""
    renames: tuple[tuple[str, str], ...] = ()
    """Beginnings of names in the checkpoint, and what takes their place."""
    left_out: tuple[str, ...] = ()
    """Beginnings of names of the other parts, after `renames`."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that files may lack."""
    block: Callable[[ConfigJson], BlockLayout] = lambda config: BlockLayout()
    embed_scaled: bool = False
    """Whether embeddings are multiplied by the root of the hidden size."""
    score_scale: Callable[[ConfigJson, int], float] = lambda config, head_dim: head_dim**-0.5
    """Reads the factor of scores, given head_dim."""
    factors: Callable[[ConfigJson], Factors] = lambda config: Factors()
    caps: Callable[[ConfigJson], tuple[float, float]] = lambda config: (0.0, 0.0)
    """Reads the caps of scores and of logits; 0 = none."""
    ropes: Callable[[ConfigJson, int, int], tuple[RopeConfig, RopeConfig]] | None = None
    """Reads the rotary settings of full layers and of those with a window, given head_dim and maximum length; None =
    all layers have the same, as usual."""
    norm_offset: float = 0.0
    """Added to the stored weights of RMSNorms."""
    norm_fp32: bool = False
    """Whether weights of RMSNorms multiply before the result is rounded, also without an offset."""
    norm_bias: bool = True
    """Whether LayerNorms have a bias."""
    norm: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    """Default for a missing key, like `max_len`, `tied` and the first of `activations`."""
    activations: Mapping[str, str] = field(default_factory=lambda: {"silu": "silu_and_mul"})
    """Name in config.json -> key of decoder.ACTIVATIONS; the default first."""
    max_len: int | None = None
    tied: bool = False
    head_dim: int | None = None
    """None = hidden / heads."""
    kv_heads: Callable[[ConfigJson, int], int] = lambda config, heads: config.count(
        "num_key_value_heads", heads, at_most=heads
    )
    """Reads the number of kv heads, given the number of heads."""
    windows: Callable[[ConfigJson, int], tuple[int, ...]] = lambda config, layers: (0,) * layers
    """Attention window of each layer; 0 = full."""
    qkv_bias: Read = no
    o_bias: Read = no
    mlp_bias: Read = no
    head_bias: bool = False
    sinks: bool = False
    """Whether each head has a score that counts in the softmax's sum alone (gpt-oss, 2025)."""
    qk_norm: Read = no
    """Whether every head's query and key pass an RMSNorm."""
    wide_qk_norm: bool = False
    """Whether all heads of q together, and those of k, pass an RMSNorm (OLMo 2, 2025)."""
    rotates_full: bool = True
    """Whether layers without a window have rotary positions (Command R7B, 2024, has none there)."""
    rotary_dim: Callable[[ConfigJson, int], int] | None = None
    """Reads the rotary dimension, given head_dim; None = partial_rotary_factor, usually 1."""
    interleaved: bool = False
    """Whether rotary pairs are adjacent columns (GPT-J) in place of halves (GPT-NeoX)."""
    experts: Callable[[ConfigJson, int], Experts] | None = None
    """Reads the experts, given the number of layers."""
    mla: Callable[[ConfigJson], MLA] | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """Facts from the family and config.json that the decoder needs besides the ModelSpec."""

    architecture: str
    names: Names
    renames: tuple[tuple[str, str], ...]
    left_out: tuple[str, ...]
    ignored: tuple[str, ...]
    block: BlockLayout
    embed_scale: float
    factors: Factors
    score_scale: float
    soft_cap: float
    logit_cap: float
    norm: Literal["rms", "layer"]
    norm_offset: float
    norm_fp32: bool
    norm_bias: bool
    eps: float
    activation: str
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    head_bias: bool
    sinks: bool
    qk_norm: bool
    wide_qk_norm: bool
    rope: RopeConfig
    window_rope: RopeConfig
    """Rotary settings of layers with a window."""
    rotates_full: bool
    interleaved: bool
    experts: ExpertLayout | None
    """None = every layer has a plain MLP."""
