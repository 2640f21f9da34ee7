"""compare.py --stored: checkpoints of random weights that the engine loads."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from dovetail import LLM, ConfigError, SamplingParams, compose
from dovetail.plugins.quant.gguf.blocks import FORMATS, decode_blocks

from .conftest import TINY

SMALL = (
    "model=llama32_1b",
    "model.hf.hidden_size=256",
    "model.hf.intermediate_size=512",
    "model.hf.num_hidden_layers=2",
    "model.hf.num_attention_heads=4",
    "model.hf.num_key_value_heads=2",
    "model.hf.head_dim=64",
    "model.hf.vocab_size=600",
    "model.hf.eos_token_id=0",
    "model.hf.bos_token_id=1",
    "model.hf.tie_word_embeddings=false",
    "engine.device=cpu",
    "engine.max_len=64",
)


@pytest.mark.parametrize(("form", "words"), [("nf4", ()), ("gguf", ("quant=gguf", "quant.mix=Q5_K_M")), ("gguf", ())])
def test_both_formats_generate(compare: ModuleType, tmp_path, form, words):
    given = [*SMALL, *words]
    stored = compare.stored_weights.stored(compose(given, app="bench"), given, form, tmp_path)
    assert not [word for word in stored if word.startswith("model.hf") or word in words]
    composition = compose(stored, app="bench")
    jobs = compare.make_jobs({"2x5/3": compose([*stored, *compare.words_of("2x5/3")], app="bench")}, 1, tmp_path)
    assert composition.part("quant").name == form
    shared = compare.shared_settings(composition, "vllm", tmp_path)
    assert not shared.dummy and (tmp_path / "config.json").is_file()
    with LLM(overrides=stored) as llm:
        prompts = [request.prompt_ids for request in jobs["2x5/3"][-1].requests]
        answers = llm.generate(prompts, SamplingParams(max_tokens=3, ignore_eos=True))
    assert all(len(answer.token_ids) == 3 for answer in answers)


@pytest.mark.parametrize("kind", FORMATS)
def test_random_blocks_are_about_as_large_as_weights(compare: ModuleType, kind):
    import numpy as np

    weights = compare.stored_weights
    blocks = weights._blocks(np.random.default_rng(0), kind, (64, 2048))
    values = decode_blocks(kind, torch.from_numpy(blocks)).values_RC()
    assert values.shape == (64, 2048) and 0.7 < values.std() / weights.SPREAD < 1.5
    assert values.mean().abs() < 0.15 * weights.SPREAD


def test_models_that_cannot_be_stored_are_refused(compare: ModuleType, tmp_path):
    stored = compare.stored_weights.stored
    with pytest.raises(ConfigError, match="has weights already"):
        stored(compose(TINY, app="bench"), TINY, "nf4", tmp_path)
    experts = ["model=small_moe", "engine.device=cpu"]
    with pytest.raises(ConfigError, match="GGUF files are read for LlamaForCausalLM.*not Qwen3Moe"):
        stored(compose(experts, app="bench"), experts, "gguf", tmp_path)
