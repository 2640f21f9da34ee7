"""Table of the differences between decoder architectures, and the reader of their config.json. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dovetail.core.checkpoint import open_checkpoint
from dovetail.core.config_json import ConfigJson
from dovetail.core.embedding_files import read_embedding
from dovetail.core.errors import ConfigError, UnsupportedError, shown
from dovetail.core.interfaces import EmbeddingSpec, ModelSpec
from dovetail.core.rope import RopeConfig, read_longrope, read_rope
from dovetail.plugins.model.config import LlamaConfig
from dovetail.plugins.model.llama import cohere, deepseek, gemma, gpt_oss, granite, olmo
from dovetail.plugins.model.llama.family import BlockLayout, ConfigKeys, Family, Layout, Names, attention_bias, no
from dovetail.plugins.model.llama.moe import (
    MOST_EXPERTS,
    read_glm4,
    read_mixtral,
    read_qwen3,
)
from dovetail.plugins.model.llama.parameters import count_parameters, mtp_spec

HF = Mapping[str, Any]
"""Content of config.json."""


def _window(config: ConfigJson) -> int:
    """Read sliding_window as transformers does: null means none, and a missing key means 4096."""
    if "sliding_window" in config.values and config.get("sliding_window") is None:
        return 0
    return config.count("sliding_window", 4096)


def _qwen_windows(config: ConfigJson, layers: int) -> tuple[int, ...]:
    """Return the window of each layer, from layer_types, or else for the layers from max_window_layers on."""
    window = _window(config) if config.flag("use_sliding_window") else 0
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.count("max_window_layers", 28, at_least=0)
        return tuple(window if layer >= first else 0 for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise config.wrong("layer_types", f"it must be a list of {layers} kinds, one a layer")
    if unknown := [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]:
        raise config.wrong("layer_types", f"{shown(unknown[0])} is neither full_attention nor sliding_attention")
    if "sliding_attention" in kinds and not window:
        raise config.wrong("layer_types", "sliding_attention needs use_sliding_window and a sliding_window")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _qwen3_moe_windows(config: ConfigJson, layers: int) -> tuple[int, ...]:
    return (_window(config) if config.flag("use_sliding_window") else 0,) * layers


def _rotary_dim(config: ConfigJson, head_dim: int, default: float) -> int:
    """Read partial_rotary_factor, which may be among the parameters of the rotary embedding."""
    stated = config.section("rope_parameters", "rope_scaling")
    where = config if stated.get("partial_rotary_factor") is None else stated
    return int(head_dim * where.number("partial_rotary_factor", default, at_most=1.0))


def _half_by_default(config: ConfigJson, head_dim: int) -> int:
    return _rotary_dim(config, head_dim, 0.5)


def _stablelm_block(config: ConfigJson) -> BlockLayout:
    parallel = config.flag("use_parallel_residual")
    return BlockLayout(norms=("input_layernorm",), parallel=True) if parallel else BlockLayout()


def _stablelm_qk_norm(config: ConfigJson) -> bool:
    """The 12B model has a norm for each head of q and k, with weights of its own."""
    if config.flag("qk_layernorm"):
        raise config.unsupported("qk_layernorm", "model=llama lacks norms with weights of their own for each head")
    return False


def _phi3_ropes(config: ConfigJson, head_dim: int, max_len: int) -> tuple[RopeConfig, RopeConfig]:
    """Phi-3 calls its own scaling longrope, su or yarn."""
    options = config.section("rope_scaling" if config.get("rope_scaling") else "rope_parameters")
    key = "type" if options.get("rope_type") is None else "rope_type"
    scaled = options.choice(key, ("default", "longrope", "su", "yarn"), "default") != "default"
    rope = (read_longrope if scaled else read_rope)(config, head_dim, max_len)
    return rope, rope


def _falcon_kv_heads(config: ConfigJson, heads: int) -> int:
    if config.flag("new_decoder_architecture"):
        return config.count("num_kv_heads", heads, at_most=heads)
    return 1 if config.flag("multi_query", True) else heads


def _falcon_block(config: ConfigJson) -> BlockLayout:
    if config.flag("alibi"):
        raise config.wrong("alibi", "attention with linear biases is not supported, only rotary positions")
    new, parallel = config.flag("new_decoder_architecture"), config.flag("parallel_attn", True)
    norms = config.count("num_ln_in_parallel_attn", 2 if new else 1, at_most=2)
    if new and not parallel:
        raise config.wrong("parallel_attn", "new_decoder_architecture is parallel")
    if not parallel:
        return BlockLayout()
    if norms == 2 and not new:
        raise config.wrong("num_ln_in_parallel_attn", "two norms need new_decoder_architecture")
    return BlockLayout(norms=("ln_attn", "ln_mlp") if norms == 2 else ("input_layernorm",), parallel=True)


LLAMA = Family(qkv_bias=attention_bias, o_bias=attention_bias, mlp_bias=lambda config: config.flag("mlp_bias"))
GLM = Family(
    names=Names(up=("mlp.gate_up_proj",) * 2),
    eps=1.5625e-7,
    head_dim=128,
    qkv_bias=lambda config: config.flag("attention_bias", True),
    rotary_dim=_half_by_default,
    interleaved=True,
)
GELU = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": Family(windows=lambda config, layers: (_window(config),) * layers),
    "Qwen2ForCausalLM": Family(qkv_bias=lambda config: True, windows=_qwen_windows),
    "Qwen3ForCausalLM": replace(LLAMA, mlp_bias=no, qk_norm=lambda config: True, head_dim=128, windows=_qwen_windows),
    "FalconForCausalLM": Family(
        keys=ConfigKeys(intermediate="ffn_hidden_size", eps="layer_norm_epsilon", activation="activation"),
        names=Names(
            embedding="transformer.word_embeddings",
            norm="transformer.ln_f",
            layer="transformer.h.{}",
            qkv=("self_attention.query_key_value",),
            o="self_attention.dense",
            up=("mlp.dense_h_to_4h",),
            down="mlp.dense_4h_to_h",
        ),
        block=_falcon_block,
        norm="layer",
        eps=1e-5,
        activations=GELU,
        max_len=2048,
        tied=True,
        kv_heads=_falcon_kv_heads,
        qkv_bias=lambda config: config.flag("bias"),
        o_bias=lambda config: config.flag("bias"),
        mlp_bias=lambda config: config.flag("bias"),
    ),
    **gemma.FAMILIES,
    "GlmForCausalLM": GLM,
    "Glm4ForCausalLM": replace(
        GLM, block=lambda config: BlockLayout(after=("post_self_attn_layernorm", "post_mlp_layernorm"))
    ),
    "Phi3ForCausalLM": Family(
        names=Names(qkv=("self_attn.qkv_proj",) * 3, up=("mlp.gate_up_proj",) * 2),
        ropes=_phi3_ropes,
        eps=1e-5,
        windows=lambda config, layers: (config.count("sliding_window", 0, at_least=0),) * layers,
    ),
    "GPTJForCausalLM": Family(
        keys=ConfigKeys(
            hidden="n_embd",
            layers="n_layer",
            heads="n_head",
            intermediate="n_inner",
            max_len="n_positions",
            eps="layer_norm_epsilon",
            activation="activation_function",
        ),
        names=Names(
            embedding="transformer.wte",
            norm="transformer.ln_f",
            layer="transformer.h.{}",
            qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
            o="attn.out_proj",
            up=("mlp.fc_in",),
            down="mlp.fc_out",
        ),
        ignored=(".attn.bias", ".attn.masked_bias"),
        block=lambda config: BlockLayout(norms=("ln_1",), parallel=True),
        norm="layer",
        eps=1e-5,
        activations={"gelu_new": "gelu_tanh", **GELU},
        kv_heads=lambda config, heads: heads,
        mlp_bias=lambda config: True,
        head_bias=True,
        rotary_dim=lambda config, head_dim: config.count("rotary_dim", 64, at_most=head_dim),
        interleaved=True,
    ),
    "MixtralForCausalLM": Family(
        defaults={"rope_theta": 1e6},
        windows=lambda config, layers: (config.count("sliding_window", 0, at_least=0),) * layers,
        experts=read_mixtral,
        eps=1e-5,
    ),
    "Qwen3MoeForCausalLM": replace(
        LLAMA, mlp_bias=no, qk_norm=lambda config: True, windows=_qwen3_moe_windows, experts=read_qwen3
    ),
    "Glm4MoeForCausalLM": Family(
        eps=1e-5,
        qkv_bias=attention_bias,
        qk_norm=lambda config: config.flag("use_qk_norm"),
        rotary_dim=_half_by_default,
        experts=read_glm4,
    ),
    **gpt_oss.FAMILIES,
    **olmo.FAMILIES,
    **granite.FAMILIES,
    **cohere.FAMILIES,
    # Stable LM 2 (Bellagente et al. 2024)
    "StableLmForCausalLM": Family(
        keys=ConfigKeys(eps="layer_norm_eps"),
        block=_stablelm_block,
        qk_norm=_stablelm_qk_norm,
        norm="layer",
        eps=1e-5,
        max_len=4096,
        qkv_bias=lambda config: config.flag("use_qkv_bias"),
        rotary_dim=lambda config, head_dim: _rotary_dim(config, head_dim, 0.25),
    ),
    **deepseek.FAMILIES,
}
"""Families by architectures[0] in config.json."""

MOST = {
    "vocab": 2**24,
    "layers": 2**10,
    "hidden": 2**18,
    "heads": 2**12,
    "head_dim": 2**12,
    "intermediate": 2**22,
    "experts": MOST_EXPERTS,
    "positions": 2**24,
}
"""Upper limits far above any model: a file that exceeds them is broken or hostile."""


def read_spec(hf: HF, where: str) -> ModelSpec:
    """Read the ModelSpec with the defaults of transformers. `where` names the source of `hf` in errors."""
    return read_model(hf, where)[0]


def read_model(hf: HF, where: str) -> tuple[ModelSpec, Layout]:
    """Read and check all values that the decoder uses. Raises ConfigError naming the key."""
    config = ConfigJson(hf, where)
    architecture, family = _family(config)
    headless = architecture != config.get("architectures")[0]
    config = _text_of(config, family)
    if config.get("is_causal") is False:
        raise config.wrong("is_causal", "attention to later tokens is not supported")
    keys = family.keys
    hidden = config.count(keys.hidden, at_most=MOST["hidden"])
    heads = config.count(keys.heads, at_most=MOST["heads"])
    layers = config.count(keys.layers, at_most=MOST["layers"])
    vocab = config.count("vocab_size", at_most=MOST["vocab"])
    max_len = config.count(keys.max_len, family.max_len, at_most=MOST["positions"])
    mla = None if family.mla is None else family.mla(config)
    if mla is not None:
        head_dim, kv_heads = mla.nope_dim + mla.rope_dim, heads
    else:
        each, left = divmod(hidden, heads)
        if (left or not each) and not (config.get("head_dim") or family.head_dim):
            raise config.wrong(keys.hidden, f"without head_dim it must be a multiple of {heads} heads")
        head_dim = config.count("head_dim", family.head_dim or each, at_most=MOST["head_dim"])
        kv_heads = family.kv_heads(config, heads)
    if heads % kv_heads:
        raise ConfigError(f"{where}: {heads} query heads are not a multiple of {kv_heads} kv heads")
    moe, experts = family.experts(config, layers) if family.experts else (None, None)
    gelu_default = 4 * hidden if family.norm == "layer" else None
    rotary_dim = mla.rope_dim if mla else family.rotary_dim(config, head_dim) if family.rotary_dim else None
    if family.ropes is None:
        rope = window_rope = read_rope(config, head_dim, max_len, rotary_dim)
    else:
        rope, window_rope = family.ropes(config, head_dim, max_len)
    soft_cap, logit_cap = family.caps(config)
    layout = Layout(
        architecture=architecture,
        names=family.names,
        renames=family.renames,
        left_out=family.left_out,
        ignored=family.ignored,
        block=family.block(config),
        embed_scale=hidden**0.5 if family.embed_scaled else 1.0,
        factors=family.factors(config),
        score_scale=family.score_scale(config, head_dim) * (1.0 if mla is None else rope.score_factor),
        soft_cap=soft_cap,
        logit_cap=logit_cap,
        norm=family.norm,
        norm_offset=family.norm_offset,
        norm_fp32=family.norm_fp32,
        norm_bias=family.norm_bias,
        eps=config.number(keys.eps, family.eps, at_most=1.0),
        activation=_activation(config, family),
        qkv_bias=family.qkv_bias(config),
        o_bias=family.o_bias(config),
        mlp_bias=family.mlp_bias(config),
        head_bias=family.head_bias,
        sinks=family.sinks,
        qk_norm=family.qk_norm(config),
        wide_qk_norm=family.wide_qk_norm,
        rope=rope,
        window_rope=window_rope,
        rotates_full=family.rotates_full,
        interleaved=family.interleaved,
        experts=experts,
    )
    if layout.rope.max_len > MOST["positions"]:
        raise ConfigError(f"{where}: yarn scales to {layout.rope.max_len} positions; the limit is {MOST['positions']}")
    spec = ModelSpec(
        architecture=config.get("architectures")[0],
        vocab=vocab,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=config.count(keys.intermediate, gelu_default, at_most=MOST["intermediate"]),
        max_len=max(max_len, layout.rope.max_len),
        dtype=_dtype(config),
        eos_ids=config.counts("eos_token_id", at_most=vocab - 1),
        bos_id=next(iter(config.counts("bos_token_id")), None),
        tied=config.flag("tie_word_embeddings", family.tied),
        windows=family.windows(config, layers),
        hf=hf,
        mla=mla,
        moe=moe,
        embedding=EmbeddingSpec("last", dimensions=_cuts(config)) if headless else None,
        head=not headless,
    )
    spec = replace(spec, parameters=count_parameters(spec, layout))
    return replace(spec, mtp=mtp_spec(spec, layout) if mtp_layers(hf) else None), layout


def _family(config: ConfigJson) -> tuple[str, Family]:
    """Return (architecture with a head, its family): Qwen2Model, which has no head, becomes Qwen2ForCausalLM."""
    stated = config.get("architectures")
    architecture = stated[0] if isinstance(stated, list) and stated else None
    if isinstance(architecture, str) and architecture.endswith("Model"):
        architecture = architecture.removesuffix("Model") + "ForCausalLM"
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        native = f"model=llama runs {', '.join(sorted(FAMILIES))}"
        raise config.wrong("architectures", f"{native}; model=auto also runs other decoders of transformers")
    _check_type(config, architecture)
    return architecture, FAMILIES[architecture]


def _check_type(config: ConfigJson, architecture: str) -> None:
    """Refuse the class of one model with the model_type of another one. Their tensors may have the same names and
    shapes, such as those of Llama and Helium, whose rotary pairs differ."""
    stated = config.get("model_type")
    if not isinstance(stated, str) or _stem(stated) == _stem(architecture.partition("For")[0]):
        return
    # Types of remote code, such as kimi_k2, are unknown to the library. It takes seconds to import.
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if stated in CONFIG_MAPPING_NAMES:
        raise config.wrong(
            "model_type",
            f"architectures names {architecture}, the class of another type. Correct the key that is wrong, or set "
            "model=transformers if transformers runs this type with this class",
        )


def _stem(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").removesuffix("text")


def _text_of(config: ConfigJson, family: Family) -> ConfigJson:
    """Return the decoder's settings, with the family's defaults."""
    own = config.section(family.text).values if family.text else config.values
    # Generation is configured for the whole model.
    shared = {key: config.get(key) for key in _SHARED if config.get(key) is not None}
    missing = {key: value for key, value in family.defaults.items() if own.get(key) is None}
    return ConfigJson({**own, **missing, **shared}, config.where)


_SHARED = ("architectures", "bos_token_id", "eos_token_id", "dtype", "torch_dtype")


def runs(hf: HF) -> bool:
    """Whether model=llama has the architecture and the options that a config.json states. If a value is wrong, reading
    the model reports it."""
    where = "config.json"
    try:
        _family(ConfigJson(hf, where))
    except ConfigError:
        return False
    try:
        read_model(hf, where)
    except UnsupportedError:
        return False
    except ConfigError:
        pass
    return True


def mtp_layers(hf: HF) -> int:
    """Return the number of layers for multi-token prediction (DeepSeek-V3, 2024) after the last layer. Published files
    say num_nextn_predict_layers, those that newer versions of transformers write num_mtp_layers."""
    key = "num_mtp_layers" if hf.get("num_nextn_predict_layers") is None else "num_nextn_predict_layers"
    return ConfigJson(hf, "config.json").count(key, 0, at_least=0, at_most=MOST["layers"])


def _cuts(config: ConfigJson) -> tuple[int, ...] | None:
    """Return the lengths to which embeddings may be truncated."""
    given = config.counts("matryoshka_dimensions")
    return None if not given and config.flag("is_matryoshka") else given


def _activation(config: ConfigJson, family: Family) -> str:
    key, words = family.keys.activation, tuple(family.activations)
    if isinstance(stated := config.get(key), str) and stated not in words:
        raise config.unsupported(key, f"the options are {', '.join(words)}; model=transformers has others")
    return family.activations[config.choice(key, words, words[0])]


def _dtype(config: ConfigJson) -> str:
    key = "torch_dtype" if config.get("dtype") is None else "dtype"
    return config.choice(key, ("bfloat16", "float16", "float32"), "float32")


def spec_of(config: LlamaConfig) -> ModelSpec:
    """Read the ModelSpec from the checkpoint or from model.hf."""
    if config.hf is not None:
        spec = read_spec(config.hf, "model.hf")
        if config.routing == "uniform" and spec.moe is None:
            raise ConfigError(f"model.routing=uniform: {spec.architecture} has no experts; set model.routing=learned")
        return spec
    checkpoint = open_checkpoint(config.path)
    hf, where = checkpoint.config(), f"model.path={config.path}: config.json"
    spec = replace(read_spec(hf, where), checkpoint=None if config.load == "dummy" else config.path)
    if (embedding := read_embedding(checkpoint)) is None:
        return spec
    spec = replace(spec, head=False, embedding=replace(embedding, dimensions=_cuts(ConfigJson(hf, where))))
    return replace(spec, parameters=count_parameters(spec, read_model(hf, where)[1]))
