"""Shards over ranks add up to the whole model."""

from __future__ import annotations

import pytest
import torch

from dovetail.core.errors import ConfigError
from dovetail.core.testing.rank_threads import ThreadCollective, on_threads
from dovetail.plugins.model.config import LlamaConfig

from .checkpoints import random_tokens, save_random
from .driver import Driver, build_model, load_model


def logits_of(model, tokens: list[int]) -> torch.Tensor:
    driver = Driver(model)
    return torch.cat([*driver.step([("a", tokens[:-1])]), *driver.step([("a", tokens[-1:])], num_decode=1)])


TOKENS = random_tokens(50, seed=3)


@pytest.mark.parametrize(
    ("variant", "size"),
    [("gqa", 2), ("mqa", 2), ("biases", 2), ("tied", 2), ("mistral_window", 2), ("gqa", 4), ("mha", 8)],
)
def test_ranks_together_equal_one(variant, size, tmp_path):
    """199 words do not divide by 2; mqa and gqa over 4 ranks repeat kv heads."""
    save_random(tmp_path, variant)
    expected = logits_of(load_model(tmp_path), TOKENS)
    for got in on_threads(size, lambda collective: logits_of(load_model(tmp_path, collective=collective), TOKENS)):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def dummy(collective: ThreadCollective | None = None, seed: int = 5) -> torch.Tensor:
    hf = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 199,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    model = build_model(LlamaConfig(hf=hf, load="dummy"), collective=collective)
    model.init_dummy(seed)
    return logits_of(model, TOKENS)


def test_dummy_weights_are_one_model_on_any_layout():
    expected = dummy()
    assert expected.isfinite().all() and 0.01 < expected.std() < 10
    assert not torch.equal(expected, dummy(seed=6))
    for got in on_threads(2, dummy):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_ranks_that_do_not_divide_are_refused_with_options(tmp_path):
    save_random(tmp_path, "gqa")
    with pytest.raises(ConfigError, match=r"engine\.tp=3 .*8 query heads.*one of 1, 2, 4, 8"):
        on_threads(3, lambda collective: load_model(tmp_path, collective=collective))
