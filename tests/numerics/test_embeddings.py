"""Embeddings against transformers' final hidden states: any chunking, mixed with decoding, all folder layouts."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from dovetail import LLM, RequestError, SamplingParams

from .checkpoints import random_tokens, save_random

TOLERANCE = 1e-4
PROMPTS = [random_tokens(n, seed=n) for n in (1, 130, 61, 16, 17)]
CPU = ["engine.device=cpu", "engine.page_size=8"]


@torch.no_grad()
def expected(model: torch.nn.Module, pooling: str, normalize: bool = True) -> np.ndarray:
    """Reference embeddings of PROMPTS, each run separately."""
    found = []
    for prompt in PROMPTS:
        states_TC = model.base_model(torch.tensor([prompt])).last_hidden_state[0].float()
        vector_C = states_TC[-1] if pooling == "last" else states_TC.mean(0)
        found.append((vector_C / vector_C.norm() if normalize else vector_C).numpy())
    return np.stack(found)


def save_headless(folder, variant: str) -> torch.nn.Module:
    """Save like E5-Mistral and Qwen3-Embedding: weights without the head and without the prefix of the body."""
    model = save_random(folder, variant, tie_word_embeddings=False)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    model.base_model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_equal_transformers(pooling, depth, tmp_path):
    reference = save_random(tmp_path, "qwen3")
    with LLM(str(tmp_path), overrides=[*CPU, "engine.token_budget=16", f"engine.depth={depth}"]) as llm:
        # 17 tokens leave a last chunk of one token, which is fed like a decode row.
        plain = llm.embed(PROMPTS, pooling=pooling, normalize=False)
        np.testing.assert_allclose(plain, expected(reference, pooling, normalize=False), atol=TOLERANCE)
        # In the second run the prefix cache has all pages but the last.
        again = llm.embed(PROMPTS, pooling=pooling)
        np.testing.assert_allclose(again, expected(reference, pooling), atol=TOLERANCE)
        cut = llm.embed(PROMPTS, pooling=pooling, dimensions=10)
        np.testing.assert_allclose(np.linalg.norm(cut, axis=1), 1, atol=1e-6)
        np.testing.assert_allclose(cut, plain[:, :10] / np.linalg.norm(plain[:, :10], axis=1)[:, None], atol=TOLERANCE)
        llm.engine.kv.check()


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_with_generation_and_preemption(pooling, tmp_path):
    """With few pages, prompts are preempted partway. Outputs and embeddings equal those of an unloaded engine."""
    reference = save_random(tmp_path, "gqa")
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    tight = ["engine.kv_pages=24", "engine.token_budget=16", "engine.depth=2", "engine.max_seqs=6"]
    with LLM(str(tmp_path), overrides=CPU) as llm:
        quiet = [result.token_ids for result in llm.generate(PROMPTS, params)]
    with LLM(str(tmp_path), overrides=[*CPU, *tight, "kv_cache=paged"]) as llm:
        with ThreadPoolExecutor(1) as pool:
            embedded = pool.submit(llm.embed, PROMPTS * 3, pooling=pooling)
            assert [result.token_ids for result in llm.generate(PROMPTS, params)] == quiet
            found = embedded.result()
        assert llm.engine.scheduler.stats().preemptions > 0
        np.testing.assert_allclose(found, np.concatenate([expected(reference, pooling)] * 3), atol=TOLERANCE)
        llm.engine.kv.check()


@pytest.mark.parametrize("variant", ["qwen3", "mistral_window", "qwen2", "gqa"])
def test_a_model_without_a_head(variant, tmp_path):
    reference = save_headless(tmp_path, variant)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"][0].endswith("Model")
    with LLM(str(tmp_path), overrides=[*CPU, "engine.token_budget=48"]) as llm:
        np.testing.assert_allclose(llm.embed(PROMPTS), expected(reference, "last"), atol=TOLERANCE)
        with pytest.raises(RequestError, match="no head"):
            llm.generate([PROMPTS[1]])
        assert llm.engine.info.spec.parameters.head == 0


def sentence_transformers(folder, mode: str, *, normalize: bool = True, **config) -> None:
    kinds = ["Transformer", "Pooling"] + ["Normalize"] * normalize
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=False))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", "lasttoken")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **modes}))
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))


@pytest.mark.parametrize(("mode", "pooling"), [("lasttoken", "last"), ("mean_tokens", "mean")])
def test_files_of_sentence_transformers_say_how(mode, pooling, tmp_path):
    """Qwen3-Embedding names itself Qwen3ForCausalLM, and its weights have neither head nor prefix."""
    reference = save_headless(tmp_path, "qwen3")
    normalize = mode == "lasttoken"
    sentence_transformers(
        tmp_path, mode, normalize=normalize, architectures=["Qwen3ForCausalLM"], matryoshka_dimensions=[16, 32]
    )
    with LLM(str(tmp_path), overrides=CPU) as llm:
        np.testing.assert_allclose(llm.embed(PROMPTS), expected(reference, pooling, normalize), atol=TOLERANCE)
        assert llm.engine.info.spec.embedding.dimensions == (16, 32) and not llm.engine.info.spec.head


@pytest.mark.nightly
def test_two_ranks(tmp_path):
    reference = save_headless(tmp_path, "gqa")
    with LLM(str(tmp_path), overrides=[*CPU, "executor=multiproc", "engine.tp=2", "engine.token_budget=32"]) as llm:
        np.testing.assert_allclose(llm.embed(PROMPTS), expected(reference, "last"), atol=TOLERANCE)
