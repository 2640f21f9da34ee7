"""config.json of supported models, and the errors in them."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail import LLM
from dovetail.core.compose import compose
from dovetail.core.compose.capabilities import Host
from dovetail.core.errors import ConfigError
from dovetail.core.layers import build_rope
from dovetail.core.startup_notes import collect_notes
from dovetail.core.testing.model_driver import build_context
from dovetail.plugins.model.config import LlamaConfig
from dovetail.plugins.model.llama.capabilities import capabilities
from dovetail.plugins.model.llama.decoder import Llama
from dovetail.plugins.model.llama.families import FAMILIES, read_model, read_spec, runs

HF = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
}


def test_what_is_left_out_follows_from_the_rest():
    spec = read_spec(HF, "here")
    assert (spec.kv_heads, spec.head_dim, spec.dtype, spec.eos_ids, spec.tied) == (8, 8, "float32", (), False)
    assert spec.windows == (0, 0, 0)


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("LlamaForCausalLM", "helium"), ("LlamaForCausalLM", "mistral"), ("Qwen3ForCausalLM", "qwen2")],
)
def test_the_class_of_another_type_is_refused(architecture, kind):
    """Tensors of these have the same names and shapes, but another meaning."""
    hf = {**HF, "architectures": [architecture], "model_type": kind}
    message = f"here: model_type is '{kind}'; architectures names {architecture}, the class of another type"
    with pytest.raises(ConfigError, match=message):
        read_spec(hf, "here")
    assert not runs(hf)


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("LlamaForCausalLM", "llama"), ("GPTJForCausalLM", "gptj"), ("Qwen2Model", "qwen2"), ("LlamaForCausalLM", "own")],
)
def test_a_type_of_the_class_or_of_remote_code_is_read(architecture, kind):
    assert runs({**HF, "architectures": [architecture], "model_type": kind})


def test_windows_and_several_ends():
    hf = {**HF, "architectures": ["MistralForCausalLM"], "sliding_window": 32, "eos_token_id": [2, 5]}
    spec = read_spec(hf, "here")
    assert spec.windows == (32, 32, 32) and spec.eos_ids == (2, 5)


QWEN = {**HF, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 32, "max_window_layers": 1}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({}, (0, 0, 0)),
        ({"use_sliding_window": True}, (0, 32, 32)),
        ({"use_sliding_window": True, "layer_types": KINDS}, (32, 0, 32)),
        ({"use_sliding_window": True, "sliding_window": None}, (0, 0, 0)),
        ({"use_sliding_window": True, "max_window_layers": 9}, (0, 0, 0)),
    ],
)
def test_windows_of_qwen(change, windows):
    assert read_spec({**QWEN, **change}, "here").windows == windows


@pytest.mark.parametrize(
    ("change", "kv_heads"),
    [({"num_kv_heads": 8}, 1), ({"multi_query": False}, 8), ({"new_decoder_architecture": True, "num_kv_heads": 2}, 2)],
)
def test_kv_heads_of_falcon(change, kv_heads):
    spec = read_spec({**HF, "architectures": ["FalconForCausalLM"], **change}, "here")
    assert (spec.kv_heads, spec.intermediate, spec.tied) == (kv_heads, 256, True)


def test_kv_cache_of_a_sequence():
    spec = read_spec({**QWEN, "use_sliding_window": True, "num_key_value_heads": 2}, "here")
    assert spec.kv_bytes_per_token(2) == 3 * 2 * 2 * 8 * 2
    assert spec.kv_bytes(100, 2) == (100 + 32 + 32) * 2 * 2 * 8 * 2  # two of three layers keep 32 tokens
    assert [spec.kv_bytes_per_token(1, tp) for tp in (1, 2, 4)] == [96, 48, 48]  # a kv head is not split


FALCON, GPTJ = ({"architectures": [name]} for name in ("FalconForCausalLM", "GPTJForCausalLM"))
SHAPES_OF_GPTJ = {"n_embd": 64, "n_layer": 3, "n_head": 8, "n_positions": 512}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures is .'GPT2LMHeadModel'.*LlamaForCausalLM"),
        ({"architectures": None}, "architectures is None"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'; model=llama runs"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures is .*; model=llama runs"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; the options are silu"),
        ({"hidden_act": ["silu"]}, "hidden_act is "),
        ({"num_key_value_heads": 3}, "8 query heads.*3 kv heads"),
        ({"num_key_value_heads": 9}, "num_key_value_heads is 9; it must be from 1 to 8"),
        ({"vocab_size": -1}, "vocab_size is -1; it must be from 1"),
        ({"vocab_size": True}, "vocab_size is True; it must be a whole number"),
        ({"hidden_size": "64"}, "hidden_size is '64'; it must be a whole number"),
        ({"hidden_size": 64.0}, "hidden_size is 64.0; it must be a whole number"),
        ({"hidden_size": 7}, "hidden_size is 7; .*8 heads"),
        ({"hidden_size": 65}, "hidden_size is 65; .*8 heads"),
        ({"head_dim": 7}, "take 7 of 7 dimensions"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be from 1 to 1024"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"intermediate_size": 10**30}, "intermediate_size is 1000"),
        ({"max_position_embeddings": 2**40}, "max_position_embeddings is"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes'; it must be true or false"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; it must be true or false"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype is 'float8_e4m3fn'; the options are bfloat16"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"eos_token_id": [2, 100]}, "eos_token_id is .2, 100.; it must be a whole number from 0 to 99"),
        ({"eos_token_id": {"a": 1}}, "eos_token_id is {'a': 1}"),
        ({"bos_token_id": 2.5}, "bos_token_id is 2.5"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; it must be an object"),
        ({"rope_scaling": {"type": "yarn", "factor": 1e9}}, "yarn scales to 512000000000 positions"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -4}, "sliding_window is -4"),
        ({**QWEN, "layer_types": KINDS}, "layer_types is .*; sliding_attention needs use_sliding_window"),
        ({**QWEN, "layer_types": KINDS[:2]}, "layer_types is .*; it must be a list of 3 kinds"),
        ({**QWEN, "layer_types": ["linear_attention"] * 3}, "'linear_attention' is neither"),
        ({**FALCON, "alibi": True}, "alibi is True; attention with linear biases is not supported"),
        ({**FALCON, "new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn is False"),
        ({**FALCON, "num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn is 2"),
        ({**GPTJ, **SHAPES_OF_GPTJ, "rotary_dim": 16}, "rotary_dim is 16; it must be from 1 to 8"),
        ({**GPTJ, **SHAPES_OF_GPTJ, "rotary_dim": 5}, "take 5 of 8 dimensions"),
    ],
)
def test_values_that_are_refused(change, message):
    with pytest.raises(ConfigError, match=f"^here: .*{message}"):
        read_spec({**HF, **change}, "here")


OF_ANY_FAMILY = st.sampled_from(sorted(FAMILIES)).map(lambda name: {**HF, **SHAPES_OF_GPTJ, "architectures": [name]})
KEYS = st.sampled_from(
    [
        *HF,
        *(
            "head_dim",
            "num_key_value_heads",
            "sliding_window",
            "use_sliding_window",
            "max_window_layers",
            "layer_types",
        ),
        *("rms_norm_eps", "hidden_act", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
        *("eos_token_id", "bos_token_id", "dtype", "torch_dtype", "tie_word_embeddings", "attention_bias", "mlp_bias"),
        *("num_kv_heads", "multi_query", "parallel_attn", "new_decoder_architecture", "num_ln_in_parallel_attn"),
        *("ffn_hidden_size", "n_embd", "n_head", "n_inner", "n_positions", "rotary_dim", "activation_function"),
        *("n_routed_experts", "num_experts_per_tok", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "v_head_dim"),
    ]
)
ROPE_KEYS = st.sampled_from(
    [
        *("rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "mscale", "mscale_all_dim"),
        *("beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor", "partial_rotary_factor", "truncate"),
    ]
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "4", "silu", "yarn"])
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2)
)
ROPES = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["default", "linear", "llama3", "yarn"]), "factor": st.floats(1, 100)}
).flatmap(lambda rope: st.dictionaries(ROPE_KEYS, SCALARS, max_size=4).map(lambda more: {**rope, **more}))


@given(OF_ANY_FAMILY, st.dictionaries(KEYS, VALUES, max_size=3), st.none() | ROPES)
@settings(max_examples=500, deadline=None)
def test_any_config_is_read_or_raises_config_error(hf, changes, rope):
    """No other error, whatever the content; and the rotary table is finite."""
    try:
        spec, layout = read_model({**hf, "rope_scaling": rope, **changes}, "here")
    except ConfigError as error:
        assert str(error).startswith("here: ")
        return
    assert spec.parameters.total > 0 and spec.kv_bytes_per_token(2) > 0
    assert build_rope(layout.rope, 9, torch.device("cpu")).table.isfinite().all()


def test_code_that_a_folder_brings_is_never_run(tmp_path):
    """auto_map is how transformers finds custom code (trust_remote_code)."""
    (tmp_path / "modeling_evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: ...\n")
    custom = {"AutoConfig": "modeling_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    (tmp_path / "config.json").write_text(json.dumps({**HF, "auto_map": custom, "trust_remote_code": True}))
    config = LlamaConfig(path=str(tmp_path), load="dummy")
    model = Llama(config, build_context(Llama.spec(config)))
    model.init_dummy(0)
    assert not (tmp_path / "ran").exists()


def test_a_file_of_endless_nesting_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"a": ' + "[" * 100_000)
    with pytest.raises(ConfigError, match="config.json: cannot be read as JSON"):
        Llama.spec(LlamaConfig(path=str(tmp_path)))


MIXTRAL = {**HF, "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
QWEN3_MOE = {**HF, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2}
GLM4_MOE = {**HF, "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "num_experts_per_tok": 4}
GPT_OSS = {**HF, "architectures": ["GptOssForCausalLM"]}
DEEPSEEK_V2 = compose(["model=deepseek_v2"], app="generate").part("model").config.hf
DEEPSEEK = compose(["model=deepseek_v3"], app="generate").part("model").config.hf


@pytest.mark.parametrize(
    ("hf", "change", "words"),
    [
        (MIXTRAL, {"num_experts_per_tok": 5}, "num_experts_per_tok is 5; it must be from 1 to 4"),
        (QWEN3_MOE, {"num_experts_per_tok": 0}, "num_experts_per_tok is 0; it must be from 1 to 8"),
        (QWEN3_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step is 2; .*it must be 1"),
        (QWEN3_MOE, {"mlp_only_layers": [1]}, "mlp_only_layers is .*come first"),
        (GPT_OSS, {"num_experts_per_tok": 129}, "num_experts_per_tok is 129; it must be from 1 to 128"),
        (
            GPT_OSS,
            {"layer_types": ["full_attention"]},
            "layer_types is .*it must be a list of 3 of full_attention",
        ),
        (GLM4_MOE, {"head_dim": 22}, "rotary positions take 11 of 22 dimensions of a head"),
        (GPT_OSS, {"swiglu_limit": 0}, "swiglu_limit is 0; it must be from 1e-12"),
        (GLM4_MOE, {"n_group": 3}, "n_group is 3; it must divide 8 experts"),
        (GLM4_MOE, {"n_group": 4, "topk_group": 1}, "topk_group is 1; .*fewer than 4 experts"),
        (GLM4_MOE, {"n_group": 4}, "topk_group' is missing"),
        (GLM4_MOE, {"scoring_func": "softmax"}, "scoring_func is 'softmax'; the options are sigmoid"),
        (GLM4_MOE, {"topk_method": "greedy"}, "topk_method is 'greedy'; the options are noaux_tc"),
        (DEEPSEEK, {"scoring_func": "relu"}, "scoring_func is 'relu'; the options are sigmoid, softmax"),
        (DEEPSEEK, {"topk_method": "greedy"}, "topk_method is 'greedy'; the options are noaux_tc"),
        (DEEPSEEK_V2, {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; the options are softmax"),
    ],
)
def test_experts_that_cannot_be_are_refused(hf, change, words):
    with pytest.raises(ConfigError, match=f"here: .*{words}"):
        read_spec({**hf, **change}, "here")


def test_uniform_routing_needs_experts_and_random_weights():
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no experts; set model.routing=learned"):
        Llama.spec(LlamaConfig(hf=HF, load="dummy", routing="uniform"))
    with pytest.raises(ValueError, match="set model.load=dummy"):
        LlamaConfig(path="/models/mixtral", routing="uniform")


def test_ranks_share_the_channels_of_experts():
    """Those of MLPs do not count if no layer has one."""
    spec = read_spec({**QWEN3_MOE, "intermediate_size": 7, "moe_intermediate_size": 36}, "here")
    assert list(spec.shares()) == [1, 2, 4]
    spec = read_spec({**QWEN3_MOE, "moe_intermediate_size": 6, "mlp_only_layers": [0]}, "here")
    assert list(spec.shares()) == [1, 2]


@pytest.mark.parametrize(
    ("hf", "change", "words"),
    [
        (DEEPSEEK, {"attention_bias": True}, "attention_bias is True; .*no biases beside compressed attention"),
        (DEEPSEEK, {"rope_interleave": False}, "rope_interleave is False; .*set model=transformers"),
        (DEEPSEEK, {"moe_layer_freq": 2}, "moe_layer_freq is 2; .*experts in every layer after the dense ones"),
        (DEEPSEEK, {"kv_lora_rank": 0}, "kv_lora_rank is 0; it must be from 1"),
        (DEEPSEEK, {"qk_rope_head_dim": 63}, "rotary positions take 63 of 191 dimensions"),
        (DEEPSEEK_V2, {"norm_topk_prob": True}, "norm_topk_prob is True; .*not divided by their sum"),
        (DEEPSEEK_V2, {"topk_method": "noaux_tc"}, "the options are greedy, group_limited_greedy"),
        (DEEPSEEK_V2, {"topk_group": 9}, "topk_group is 9; it must be from 1 to 8"),
    ],
)
def test_latents_that_cannot_be_are_refused(hf, change, words):
    with pytest.raises(ConfigError, match=f"here: .*{words}"):
        read_spec({**hf, **change}, "here")


def test_queries_are_compressed_unless_the_file_says_null():
    """A file without the key has transformers' default."""
    without = {key: value for key, value in DEEPSEEK_V2.items() if key != "q_lora_rank"}
    ranks = [read_spec(hf, "here").mla.q_rank for hf in (without, {**DEEPSEEK_V2, "q_lora_rank": None})]
    assert ranks == [1536, 0]


def test_yarn_scales_scores_of_compressed_attention_alone():
    scaled = {**HF, "max_position_embeddings": 163840, "rope_parameters": DEEPSEEK["rope_parameters"]}
    factor = (0.1 * math.log(40) + 1) ** 2
    assert read_model(DEEPSEEK, "here")[1].score_scale == pytest.approx(192**-0.5 * factor)
    _, layout = read_model(scaled, "here")
    assert layout.rope.score_factor == pytest.approx(factor) and layout.score_scale == layout.score_scale
    assert layout.score_scale == read_spec(scaled, "here").head_dim ** -0.5


def test_any_scaling_scales_scores_of_compressed_attention():
    """transformers multiplies the softmax scale by it whenever positions are scaled."""
    factor = (0.1 * 0.7 * math.log(4) + 1) ** 2
    linear = {"rope_type": "linear", "factor": 4.0, "mscale_all_dim": 0.7}
    for scaling in (linear, {**linear, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}):
        layout = read_model({**DEEPSEEK, "rope_parameters": scaling}, "here")[1]
        assert layout.score_scale == pytest.approx(192**-0.5 * factor)


def test_latents_share_no_rank_and_take_656_bytes_in_eight_bits():
    spec = read_spec(DEEPSEEK, "here")
    assert [spec.kv_bytes_per_token(size, tp) // 61 for size, tp in ((2, 1), (2, 8), (1, 1), (1, 8))] == [
        *(1152, 1152),
        *(656, 656),
    ]
    assert spec.shares()[8] == 64 and 128 in spec.shares()


def test_a_missing_key_is_named():
    with pytest.raises(ConfigError, match="here: the key 'vocab_size' is missing"):
        read_spec({key: value for key, value in HF.items() if key != "vocab_size"}, "here")


def test_a_path_and_shapes_exclude_each_other():
    with pytest.raises(ConfigError, match="both of model.path and model.hf"):
        compose(["model=llama3_8b", "model.path=/somewhere"], app="generate")
    with pytest.raises(ConfigError, match="neither of model.path and model.hf"):
        compose(["model=llama"], app="generate")


GEMMA3 = {**HF, "architectures": ["Gemma3ForCausalLM"], "head_dim": 16, "sliding_window": 8, "num_hidden_layers": 6}


def test_layers_with_a_window_have_rotary_positions_of_their_own():
    """Files of transformers 4 and 5 mean the same."""
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = {**GEMMA3, "rope_theta": 1e6, "rope_local_base_freq": 5000.0, "rope_scaling": scaling}
    by_kind = {"full_attention": {"rope_theta": 1e6, **scaling}, "sliding_attention": {"rope_theta": 5000.0}}
    new = {**{key: value for key, value in GEMMA3.items() if key != "rope_theta"}, "rope_parameters": by_kind}
    (spec, layout), (_, other) = (read_model(hf, "config.json") for hf in (old, new))
    assert (layout.rope, layout.window_rope) == (other.rope, other.window_rope)
    assert layout.rope.factor == 8.0 and layout.window_rope.theta == 5000.0
    assert spec.windows == (8, 8, 8, 8, 8, 0)
    with pytest.raises(ConfigError, match="rope_scaling is .*; rope_parameters has settings for each kind of layer"):
        read_model({**new, "rope_scaling": scaling}, "config.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True; attention to later tokens"),
        ({"layer_types": ["full_attention"]}, "it must be a list of 6 of full_attention, sliding_attention"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern is 0; it must be from 1"),
    ],
)
def test_invalid_values_of_gemma(change, message):
    with pytest.raises(ConfigError, match=message):
        read_model({**GEMMA3, **change}, "config.json")


PHI3 = {**HF, "architectures": ["Phi3ForCausalLM"], "original_max_position_embeddings": 64}
LONGROPE = {"type": "su", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.5, 8.0]}


def test_longrope_has_frequencies_for_short_and_for_long_sequences():
    rope = read_model({**PHI3, "rope_scaling": LONGROPE}, "config.json")[1].rope
    with collect_notes() as notes:
        short, long = (build_rope(rope, length, torch.device("cpu")).table[:64] for length in (64, 65))
    (text,) = notes
    assert "engine.max_len=64 selects" in text
    assert torch.equal(short[:, 0], long[:, 0]) and not torch.equal(short[:, 1], long[:, 1])
    # Beside the longest sequence, the engine's tables have positions of drafts.
    assert torch.equal(build_rope(rope, 80, torch.device("cpu"), longest=64).table[:64], short)


def test_the_length_that_the_note_names_selects_frequencies_for_short_sequences(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**PHI3, "rope_scaling": LONGROPE}))
    for length, noted in ((64, False), (65, True)):
        words = ["engine.device=cpu", f"engine.max_len={length}", "model.load=dummy", "spec_decode=ngram"]
        with LLM(str(tmp_path), overrides=words) as llm:
            assert any("rotary frequencies are those for more than 64" in note for note in llm.info.notes) == noted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"short_factor": [1.0]}, r"rope_scaling.short_factor is .*; it must be a list of 4 numbers"),
        ({"long_factor": [1.0, 2.0, -3.0, 1.0]}, r"long_factor is -3.0; it must be from 1e-12"),
        ({"type": "llama3"}, r"rope_scaling.type is 'llama3'; the options are default, longrope, su, yarn"),
    ],
)
def test_invalid_values_of_longrope(change, message):
    with pytest.raises(ConfigError, match=message):
        read_model({**PHI3, "rope_scaling": {**LONGROPE, **change}}, "config.json")


def test_capped_scores_are_required_of_attention():
    config = LlamaConfig(hf={**GEMMA3, "architectures": ["Gemma2ForCausalLM"]}, load="dummy")
    assert ("attention", "scores", "soft_cap") in {
        (one.kind, one.key, one.contains) for one in capabilities(config, Host()).requires
    }


def test_what_gpt_oss_leaves_out_is_that_of_transformers():
    spec, layout = read_model(GPT_OSS, "config.json")
    assert (spec.windows, spec.head_dim, spec.moe.experts, spec.moe.active) == ((128, 0, 128), 64, 128, 4)
    assert (layout.rope.kind, layout.rope.factor, layout.rope.theta, layout.rope.truncate) == (
        "yarn",
        32,
        150000,
        False,
    )
    config = LlamaConfig(hf=GPT_OSS, load="dummy")
    assert any((one.key, one.contains) == ("scores", "sinks") for one in capabilities(config, Host()).requires)


def test_the_text_part_of_a_model_with_images_has_the_defaults_of_its_family():
    """A published file states few sizes of the decoder."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    hf = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "eos_token_id": [1, 106]}
    spec = read_spec({**hf, "torch_dtype": "bfloat16"}, "config.json")
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.vocab, spec.max_len) == (8, 4, 256, 262208, 131072)
    assert (spec.dtype, spec.eos_ids, spec.tied, spec.windows[4:6]) == ("bfloat16", (1, 106), True, (1024, 0))
