"""Rotary tables and the keys of config.json that define them. tests/numerics compares them with transformers."""

import pytest
import torch

from dovetail.core.config_json import ConfigJson
from dovetail.core.errors import ConfigError
from dovetail.core.layers import build_rope
from dovetail.core.rope import read_rope

LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def rope(hf, head_dim=32, max_len=100):
    return read_rope(ConfigJson(hf, "config.json"), head_dim, max_len)


def table(hf, head_dim=32, max_len=100):
    return build_rope(rope(hf, head_dim, max_len), max_len, torch.device("cpu")).table


def test_cos_and_sin_of_every_position():
    angles = torch.arange(8.0)[:, None] * torch.tensor([1.0, 0.1])
    torch.testing.assert_close(table({"rope_theta": 100.0}, 4, 8), torch.cat((angles.cos(), angles.sin()), dim=-1))


def test_old_and_new_keys_mean_the_same():
    old = {"rope_theta": 500.0, "rope_scaling": {"type": "llama3", **LLAMA3}}
    new = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3}}
    assert torch.equal(table(old), table(new))
    assert not torch.equal(table(old), table({"rope_theta": 500.0}))


def test_partial_rotary():
    assert table({"partial_rotary_factor": 0.25}, 64, 3).shape == (3, 16)


@pytest.mark.parametrize(("hf", "head_dim"), [({}, 32), ({"partial_rotary_factor": 0.25}, 64)])
def test_a_model_without_weights_has_tables_of_the_same_shape(hf, head_dim):
    real, shape = table(hf, head_dim, 7), build_rope(rope(hf, head_dim, 7), 7, torch.device("meta")).table
    assert (shape.shape, shape.dtype, shape.device.type) == (real.shape, real.dtype, "meta")


def test_yarn_stretches_the_context_that_the_file_states():
    """Qwen 2.5 files keep the trained length in max_position_embeddings and add a factor."""
    scaled = rope({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}})
    assert scaled.max_len == 131072


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        ({"rope_scaling": {"type": "longrope"}}, "rope_scaling.type is 'longrope'; the options are default, linear"),
        ({"rope_scaling": {"type": "linear"}}, "the key 'rope_scaling.factor' is missing"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "rope_scaling.factor is nan"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "rope_scaling.factor is '4'; it must be a number"),
        ({"rope_scaling": ["linear"]}, "rope_scaling is .*; it must be an object"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_parameters.rope_theta is 0; it must be from"),
        ({"rope_theta": 10**400}, "rope_theta is 10000.*; it must be from 1e-12 to"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differ by kind of layer"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
        ({"partial_rotary_factor": 0.01}, "take 0 of 32 dimensions"),
        ({"rope_scaling": {"type": "llama3", **LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor is 4.0"),
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 0}}, "embeddings is 0; it must be from"),
        ({"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_theta is 1.0; yarn needs"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 1.0, "beta_slow": 32.0}},
            "rope_scaling.beta_slow is 32.0; it must be at most beta_fast",
        ),
    ],
)
def test_invalid_values_are_named_with_their_key(hf, message):
    with pytest.raises(ConfigError, match=f"config.json: .*{message}"):
        rope(hf)
