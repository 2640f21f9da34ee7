"""131072 tokens of context in chunks, in decode steps and over ranks, compared with the reference."""

from __future__ import annotations

import pytest
import torch

from dovetail import LLM, SamplingParams

from .models import dummy_llama

GPUS = torch.cuda.device_count()
CONTEXT, TOKENS = 131072, 24
MODEL = dummy_llama(
    "engine.device=cuda",
    "engine.kv_pages=9000",
    "engine.max_seqs=4",
    num_hidden_layers=2,
    max_position_embeddings=CONTEXT,
    rope_theta=500000.0,
)
PROMPTS = [[(11 * i + i * i // 7) % 512 for i in range(CONTEXT - TOKENS)], [(5 * i) % 512 for i in range(900)]]
NEAR = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest difference of log-probabilities in nats."""

pytestmark = pytest.mark.timeout(600)


def generated(*options: str) -> tuple[list[list[int]], list[list[float]]]:
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=1)
    with LLM(overrides=[*MODEL, "attention=triton", "engine.depth=2", *options]) as llm:
        found = [g.completions[0] for g in llm.generate(PROMPTS, params)]
    return [list(one.token_ids) for one in found], [[token.logprob for token in one.logprobs] for one in found]


@pytest.fixture(scope="module")
def alone() -> tuple[list[list[int]], list[list[float]]]:
    return generated("engine.dtype=float32", "engine.token_budget=8192")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_end_of_a_full_context_equals_the_reference(dtype: str) -> None:
    """The generated text, up to its last token, is a prompt for the reference."""
    tokens, ours = generated(f"engine.dtype={dtype}", "engine.token_budget=8192")
    texts = [[*prompt, *output][:-1] for prompt, output in zip(PROMPTS, tokens, strict=True)]
    small = ["attention=sdpa", "engine.token_budget=512", "engine.cuda_graphs=false", f"engine.dtype={dtype}"]
    with LLM(overrides=[*MODEL, *small]) as llm:
        theirs = llm.generate(texts, SamplingParams(temperature=0.0, max_tokens=1, logprobs=1, prompt_logprobs=1))
    for logprobs, reference in zip(ours, theirs, strict=True):
        assert reference.prompt_logprobs is not None
        wanted = [token.logprob for token in reference.prompt_logprobs[-(TOKENS - 1) :]]
        assert logprobs[:-1] == pytest.approx(wanted, abs=NEAR[dtype])


@pytest.mark.parametrize(
    "options",
    [
        ["engine.token_budget=500"],
        ["engine.token_budget=8192", "engine.cuda_graphs=false"],
        ["engine.token_budget=8192", "kv_cache=radix"],
        ["engine.token_budget=4096", "spec_decode=ngram"],
    ],
    ids=" ".join,
)
def test_every_way_of_feeding_the_context_gives_the_same_tokens(
    options: list[str], alone: tuple[list[list[int]], list[list[float]]]
) -> None:
    tokens, logprobs = generated("engine.dtype=float32", *options)
    assert tokens == alone[0]
    assert sum(logprobs, []) == pytest.approx(sum(alone[1], []), abs=1e-3)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_ranks_give_the_same_tokens(tp: int, alone: tuple[list[list[int]], list[list[float]]]) -> None:
    if tp > GPUS:
        pytest.skip(f"needs {tp} GPUs")
    ranks = ["executor=multiproc", f"engine.tp={tp}", "collective=symm_mem", "engine.token_budget=8192"]
    tokens, logprobs = generated("engine.dtype=float32", *ranks)
    assert tokens == alone[0]
    assert sum(logprobs, []) == pytest.approx(sum(alone[1], []), abs=1e-3)
