"""attention=flashinfer with its package: the contract suite, and an engine compared with the reference."""

from __future__ import annotations

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.core.interfaces import AttentionBackend
from dovetail.core.testing.attention import AttentionContract
from dovetail.plugins.attention.config import FlashInferConfig
from dovetail.plugins.attention.flashinfer.backend import FlashInfer

from .models import dummy_llama

pytest.importorskip("flashinfer", reason="the extra `flashinfer` is not installed")

pytestmark = pytest.mark.timeout(900)  # FlashInfer compiles kernels at first use.


class TestFlashInfer(AttentionContract):
    device = "cuda"
    dtype = torch.bfloat16
    kv_dtypes = (torch.float8_e4m3fn, torch.float8_e5m2)
    head_dims = (64, 128)
    tree = False

    def make(self) -> AttentionBackend:
        return FlashInfer(FlashInferConfig())


class TestFlashInferFloat16(TestFlashInfer):
    dtype = torch.float16
    kv_dtypes = ()
    head_dims = (128, 256)
    page_tokens = (16, 64)


MODEL = dummy_llama(
    "engine.dtype=bfloat16",
    "engine.kv_pages=600",
    "engine.max_seqs=16",
    "engine.cuda_graphs=false",
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    dtype="bfloat16",
)
PROMPTS = [[(7 * n + i * i) % 512 for i in range(5 + 40 * n)] for n in range(8)]
NEAR = 0.1
"""Largest difference in nats between log-probabilities of decode steps and of one prompt in bfloat16. A wrong key
causes a larger one."""


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["engine.depth=2"],
        ["engine.kv_dtype=fp8_e4m3"],
        ["spec_decode=ngram"],
        ["engine.token_budget=64", "engine.depth=2"],
    ],
    ids=" ".join,
)
def test_log_probabilities_equal_those_of_the_reference(options: list[str]) -> None:
    """The generated text is a prompt for the reference."""
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=1)
    with LLM(overrides=[*MODEL, *options, "attention=flashinfer"]) as llm:
        ours = [generation.completions[0] for generation in llm.generate(PROMPTS, params)]
    texts = [[*prompt, *one.token_ids] for prompt, one in zip(PROMPTS, ours, strict=True)]
    kv_dtype = [option for option in options if "kv_dtype" in option]
    with LLM(overrides=[*MODEL, *kv_dtype, "attention=sdpa"]) as llm:
        theirs = llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=1))
    for one, reference in zip(ours, theirs, strict=True):
        wanted = [token.logprob for token in reference.prompt_logprobs[-len(one.logprobs) :]]
        got = [token.logprob for token in one.logprobs]
        assert got == pytest.approx(wanted, abs=NEAR)
