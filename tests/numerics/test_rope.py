"""Rotary tables against transformers, for every kind of scaling and every place where a config.json may state it."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dovetail.core.layers import build_rope
from dovetail.core.rope import KINDS
from dovetail.core.startup_notes import collect_notes
from dovetail.plugins.model.llama.families import read_model

from .checkpoints import SHAPE as CHECKPOINT_SHAPE
from .checkpoints import VARIANTS

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "theta": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "linear_partial": {"rope_type": "linear", "factor": 2.5, "partial_rotary_factor": 0.5},
    "llama3": LLAMA3,
    "llama3_trained": {**LLAMA3, "original_max_position_embeddings": 64},
    "yarn": YARN,
    "yarn_trained": {**YARN, "original_max_position_embeddings": 64},
    "yarn_no_factor": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64},
    "yarn_attention_factor": {**YARN, "attention_factor": 1.25},
    "yarn_mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn_mscale_alone": {**YARN, "mscale": 0.707},
    "yarn_betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn_step": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0},
    "yarn_whole": {**YARN, "truncate": False},
    "yarn_partial": {**YARN, "partial_rotary_factor": 0.5, "rope_theta": 5e5},
}
OTHER = {"rope_type": "default", "rope_theta": 70000}
PLACES: dict[str, Any] = {
    "rope_parameters": lambda scaling: {"rope_parameters": scaling},
    "rope_scaling": lambda scaling: {"rope_scaling": scaling, "rope_theta": 3e4},
    "type": lambda scaling: {"rope_scaling": {("type" if k == "rope_type" else k): v for k, v in scaling.items()}},
    "both": lambda scaling: {"rope_parameters": OTHER, "rope_scaling": scaling},
    "both_and_theta": lambda scaling: {"rope_parameters": OTHER, "rope_scaling": scaling, "rope_theta": 3e4},
    "empty_scaling": lambda scaling: {"rope_parameters": scaling, "rope_scaling": {}},
    "trained_outside": lambda scaling: {"rope_parameters": scaling, "original_max_position_embeddings": 128},
    "partial_outside": lambda scaling: {"rope_scaling": scaling, "partial_rotary_factor": 0.25},
}
"""Where config.json states the scaling, and what it states beside it."""


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_table_equals_transformers(scaling, place):
    hf = SHAPE | PLACES[place](SCALINGS[scaling])
    if scaling in ("default", "theta"):
        hf.pop("partial_rotary_factor", None)  # transformers' Llama ignores it without a scaling
    theirs = LlamaConfig(**copy.deepcopy(hf))
    rope = read_model(hf, "config.json")[1].rope
    assert rope.kind == theirs.rope_parameters["rope_type"]

    cos, sin = LlamaRotaryEmbedding(theirs)(torch.zeros(1), torch.arange(600)[None])

    expected = torch.cat([part[0, :, : rope.dim // 2] for part in (cos, sin)], dim=-1)
    assert cos.shape[-1] == rope.dim
    # Angles go up to 600, where the last bit of a float32 frequency makes 4e-5.
    torch.testing.assert_close(build_rope(rope, 600, torch.device("cpu")).table, expected, atol=1e-4, rtol=0)


FLAT = [name for name, (family, _) in VARIANTS.items() if family not in ("Gemma2", "Gemma3", "Phi3", "GPTJ", "Olmo3")]


@pytest.mark.parametrize("variant", {VARIANTS[name][0]: name for name in FLAT}.values())
@pytest.mark.parametrize("stated", [{}, {"rope_parameters": None}])
def test_a_config_without_rotary_keys_has_the_defaults_of_its_class(variant, stated):
    family, options = VARIANTS[variant]
    kept = {key: value for key, value in options.items() if not key.startswith(("rope_", "partial_"))}
    theirs = getattr(transformers, f"{family}Config")(**{**CHECKPOINT_SHAPE, **kept})
    hf = json.loads(theirs.to_json_string(use_diff=False)) | {"architectures": [f"{family}ForCausalLM"]}
    rope = read_model({key: value for key, value in hf.items() if key != "rope_parameters"} | stated, "here")[1].rope
    expected = theirs.rope_parameters
    assert (rope.theta, rope.kind) == (expected["rope_theta"], expected["rope_type"])
    assert rope.factor == expected.get("factor", 1.0)


def test_every_kind_is_compared():
    assert {scaling["rope_type"] for scaling in SCALINGS.values()} == set(KINDS)


def test_theta_that_rope_scaling_drops_is_reported():
    with collect_notes() as notes:
        read_model(SHAPE | PLACES["both"](YARN), "config.json")
    (note,) = notes
    assert note == (
        "config.json: rope_scaling replaces rope_parameters, as in transformers, so rope_theta is 10000, not 70000. "
        "Write rope_theta into rope_scaling to change that"
    )
    with collect_notes() as notes:
        read_model(SHAPE | PLACES["both"]({**YARN, "rope_theta": 7e4}), "config.json")
    assert not notes
