"""Rotary tables."""

import pytest
import torch

from dovetail.core.errors import ConfigError
from dovetail.core.layers import build_rope

CPU = torch.device("cpu")


def test_cos_and_sin_of_every_position():
    table = build_rope({"rope_theta": 100.0}, head_dim=4, max_len=8, device=CPU).table
    angles = torch.arange(8.0)[:, None] * torch.tensor([1.0, 0.1])
    torch.testing.assert_close(table, torch.cat((angles.cos(), angles.sin()), dim=-1))


def test_old_and_new_keys_mean_the_same():
    scaling = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = {"rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3", **scaling}}
    new = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **scaling}}
    assert torch.equal(build_rope(old, 32, 100, CPU).table, build_rope(new, 32, 100, CPU).table)


def test_partial_rotary():
    assert build_rope({"partial_rotary_factor": 0.25}, 64, 3, CPU).table.shape == (3, 16)


def test_unknown_scalings_are_named_with_the_options():
    with pytest.raises(ConfigError, match="'longrope'.*default, linear, llama3"):
        build_rope({"rope_scaling": {"type": "longrope"}}, 32, 10, CPU)
    with pytest.raises(ConfigError, match="'linear' needs the key 'factor'"):
        build_rope({"rope_scaling": {"type": "linear"}}, 32, 10, CPU)
