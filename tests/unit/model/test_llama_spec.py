"""What a config.json says, and the variants of conf/model."""

import pytest

from dovetail.core.compose import compose
from dovetail.core.errors import ConfigError
from dovetail.plugins.model.llama.families import read_spec

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


def test_windows_and_several_ends():
    hf = {**HF, "architectures": ["MistralForCausalLM"], "sliding_window": 32, "eos_token_id": [2, 5]}
    spec = read_spec(hf, "here")
    assert spec.windows == (32, 32, 32) and spec.eos_ids == (2, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "here: architectures is 'GPT2LMHeadModel'.*LlamaForCausalLM"),
        ({"architectures": None}, "architectures is None"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"num_key_value_heads": 3}, "8 query heads.*3 kv heads"),
    ],
)
def test_what_it_cannot_read_is_said(change, message):
    with pytest.raises(ConfigError, match=message):
        read_spec({**HF, **change}, "here")


def test_a_missing_key_is_named():
    with pytest.raises(ConfigError, match="here: the key 'vocab_size' is missing"):
        read_spec({key: value for key, value in HF.items() if key != "vocab_size"}, "here")


@pytest.mark.parametrize(
    ("variant", "billions"), [("llama2_7b", 6.74), ("llama3_8b", 8.03), ("llama3_70b", 70.55), ("mistral_7b", 7.24)]
)
def test_variants_have_the_size_they_are_named_for(variant, billions):
    spec = read_spec(compose([f"model={variant}"], app="generate").part("model").config.hf, variant)
    attention = spec.hidden * spec.head_dim * (2 * spec.heads + 2 * spec.kv_heads)
    layer = attention + 3 * spec.hidden * spec.intermediate + 2 * spec.hidden
    total = 2 * spec.vocab * spec.hidden + spec.layers * layer + spec.hidden
    assert round(total / 1e9, 2) == billions


def test_a_path_and_shapes_exclude_each_other():
    with pytest.raises(ConfigError, match="both of model.path and model.hf"):
        compose(["model=llama3_8b", "model.path=/somewhere"], app="generate")
    with pytest.raises(ConfigError, match="neither of model.path and model.hf"):
        compose(["model=llama"], app="generate")
