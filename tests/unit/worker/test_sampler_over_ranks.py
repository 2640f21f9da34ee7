"""Draws from a vocabulary split over ranks give the tokens of one rank, without gathering logits."""

from __future__ import annotations

import pytest
import torch

from dovetail.core.testing.model_driver import build_context
from dovetail.core.testing.rank_threads import ThreadCollective, on_threads
from dovetail.core.worker.sampler import SampleParams, sample, sample_over_ranks
from dovetail.plugins.model.config import LlamaConfig
from dovetail.plugins.model.llama.decoder import Llama

VOCAB, HIDDEN, ROWS = 67, 32, 40
CONFIG = LlamaConfig(
    load="dummy",
    hf={
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
    },
)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_draw_the_tokens_of_one_rank(size: int, temperature: float) -> None:
    torch.manual_seed(3)
    states, position = torch.randn(ROWS, HIDDEN), torch.randint(1 << 20, (ROWS,))
    params = SampleParams(
        temperature_N=torch.where(torch.arange(ROWS) % 2 == 0, temperature, 0.0),
        top_k_N=torch.zeros(ROWS, dtype=torch.int64),
        top_p_N=torch.ones(ROWS),
        min_p_N=torch.zeros(ROWS),
        key_N=torch.randint(1 << 62, (ROWS,)),
        random=temperature > 0,
        filtered=False,
    )

    def draws(collective: ThreadCollective) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
        model = Llama(CONFIG, build_context(Llama.spec(CONFIG), collective=collective))
        model.init_dummy(7)
        gathered, gather = [], collective.all_gather

        def counted(x: torch.Tensor) -> torch.Tensor:
            gathered.append(tuple(x.shape))
            return gather(x)

        collective.all_gather = counted  # type: ignore[method-assign]
        return sample_over_ranks(model, states, position, params), gathered

    alone = Llama(CONFIG, build_context(Llama.spec(CONFIG)))
    alone.init_dummy(7)
    expected = sample(alone.logits(states), position, params)
    assert len(expected.unique()) > 5
    for tokens, gathered in on_threads(size, draws):
        assert torch.equal(tokens, expected)
        assert gathered == ([(ROWS, 2)] if size > 1 else [])
