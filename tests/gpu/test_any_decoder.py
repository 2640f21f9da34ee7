"""Decoders of transformers on a GPU: steps run as CUDA graphs, and tokens are those of the library on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dovetail import LLM, SamplingParams

from ..numerics.decoders import save_decoder


@pytest.mark.parametrize("kind", ("gpt2", "gpt_neox", "phi3", "olmo2", "granite", "cohere2"))
def test_greedy_tokens_of_graphs_are_the_librarys(kind: str, tmp_path: Path) -> None:
    reference = save_decoder(tmp_path, kind)
    random = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 96, (count,), generator=random).tolist() for count in (5, 90, 31)]
    engine = ["engine.device=cuda", "engine.dtype=float32", "attention=triton", "engine.depth=2", "engine.max_len=256"]
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    with LLM(str(tmp_path), overrides=[*engine, "engine.token_budget=64", "engine.kv_pages=200"]) as llm:
        assert llm.info is not None and not [note for note in llm.info.notes if "CUDA graphs" in note]
        results = llm.generate(prompts, params)
    for prompt, result in zip(prompts, results, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + list(result.token_ids)])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
        # Sums in another order may part a tie.
        assert (logits.max(dim=1).values - chosen).max() < 1e-3
