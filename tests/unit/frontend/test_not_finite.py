"""A request whose logits are not finite fails alone, with the reason, however its tokens are sampled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.core.engine.results import NOT_FINITE
from dovetail.core.errors import RequestError
from dovetail.plugins.model.llama.decoder import Llama

BROKEN = 7
"""The token whose embedding is NaN."""
ENGINES = {"plain": (), "deep": ("engine.depth=2",), "drafts": ("spec_decode=ngram", "kv_cache=radix")}


@pytest.fixture(params=ENGINES)
def llm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    embed = Llama.embed

    def broken(self: Llama, tokens_T: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return embed(self, tokens_T, *args, **kwargs).masked_fill((tokens_T == BROKEN)[:, None], float("nan"))

    monkeypatch.setattr(Llama, "embed", broken)
    with LLM("tiny", overrides=["engine.device=cpu", "engine.max_len=128", *ENGINES[request.param]]) as llm:
        yield llm


def test_a_request_without_finite_logits_fails_alone(llm: LLM) -> None:
    sound, broken = [40, 41, 42, 40, 41, 42], [40, 41, BROKEN, 40, 41, 42]
    length = {"max_tokens": 12, "ignore_eos": True}
    for options in (
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 3},
        {"temperature": 0.9, "top_p": 0.8, "top_k": 20, "seed": 3},
        {"temperature": 0.0, "logprobs": 2, "repetition_penalty": 1.2},
    ):
        params = SamplingParams(**options, **length)
        alone = llm.generate([sound], params)[0].token_ids
        with pytest.raises(RequestError, match=NOT_FINITE) as caught:
            llm.generate([broken], params)
        assert caught.value.status == 500
        found = dict(llm.generate_each([sound, broken, sound], params))
        assert str(found[1]) == NOT_FINITE
        assert [found[index].token_ids for index in (0, 2)] == [alone, alone]
