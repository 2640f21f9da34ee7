"""Built-in processors against per-row Python, batched with rows that do not use them."""

from __future__ import annotations

import math

import pytest
import torch

from dovetail.core.interfaces import LogitsContext, LogitsProcessor, Request, SamplingParams
from dovetail.plugins.logits.config import LogitBiasConfig, MinTokensConfig, PenaltiesConfig
from dovetail.plugins.logits.logit_bias import LogitBias
from dovetail.plugins.logits.min_tokens import MinTokens
from dovetail.plugins.logits.penalties import Penalties

V, S, L = 12, 5, 20


def request(prompt: list[int], **params: object) -> Request:
    return Request(0, tuple(prompt), SamplingParams(**params), eos_ids=(2,))  # type: ignore[arg-type]


def context(slots: list[int], histories: list[list[int]], prompts: list[int]) -> LogitsContext:
    """Tokens past a history are random, so a processor that reads them gives a wrong result."""
    tokens = torch.randint(V, (S, L), dtype=torch.int32)
    prompt_len = torch.zeros(S, dtype=torch.long)
    for slot, history, prompt in zip(slots, histories, prompts, strict=True):
        tokens[slot, : len(history)] = torch.tensor(history, dtype=torch.int32)
        prompt_len[slot] = prompt
    lengths = torch.tensor([len(h) for h in histories])
    return LogitsContext(torch.tensor(slots), lengths, tokens, prompt_len, int(lengths.max()) + 3)


def test_penalties() -> None:
    processor = Penalties(PenaltiesConfig())
    processor.allocate(S, V, torch.device("cpu"))
    asked = request([1, 2, 3], repetition_penalty=1.5, presence_penalty=0.7, frequency_penalty=0.3)
    processor.join(3, asked)
    processor.join(1, request([4]))
    assert processor.wants(asked) and not processor.wants(request([4]))
    history = [1, 2, 3, 5, 5, 1]
    logits = torch.randn(2, V)
    out = processor.apply(logits.clone(), context([3, 1], [history, [4, 4]], [3, 1]))
    expected = logits[0].clone()
    for token in set(history):
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    for token in {5, 1}:
        expected[token] -= 0.7 + 0.3 * history[3:].count(token)
    assert torch.allclose(out[0], expected)
    assert torch.equal(out[1], logits[1])


def test_logit_bias_of_any_length() -> None:
    processor = LogitBias(LogitBiasConfig())
    processor.allocate(S, V, torch.device("cpu"))
    biases = [{}, {0: 1.0}, {t: -float(t) for t in range(9)}, {5: 100.0, 6: -100.0}, {}]
    for slot, bias in enumerate(biases):
        processor.join(slot, request([1], logit_bias=bias))
    processor.join(2, request([1], logit_bias={7: 2.0}))  # The slot's next sequence has fewer.
    logits = torch.randn(S, V)
    out = processor.apply(logits.clone(), context(list(range(S)), [[1]] * S, [1] * S))
    for slot, bias in enumerate([*biases[:2], {7: 2.0}, *biases[3:]]):
        expected = logits[slot].clone()
        for token, value in bias.items():
            expected[token] += value
        assert torch.equal(out[slot], expected)


def test_min_tokens() -> None:
    processor = MinTokens(MinTokensConfig())
    processor.allocate(S, V, torch.device("cpu"))
    processor.join(0, request([1, 1], min_tokens=3, stop_token_ids=(7,)))
    processor.join(1, request([1]))
    logits = torch.randn(3, V)
    # Two rows of slot 0: the next output token is the third, then the fourth.
    out = processor.apply(logits.clone(), context([0, 0, 1], [[1, 1, 5, 5], [1, 1, 5, 5, 5], [1]], [2, 2, 1]))
    assert out[0, 2] == out[0, 7] == -math.inf
    keep = [t for t in range(V) if t not in (2, 7)]
    assert torch.equal(out[0, keep], logits[0, keep])
    assert torch.equal(out[1:], logits[1:])


@pytest.mark.parametrize(
    ("processor", "params"),
    [
        (Penalties(PenaltiesConfig()), {"repetition_penalty": 1.3, "frequency_penalty": 1.0}),
        (LogitBias(LogitBiasConfig()), {"logit_bias": {3: 5.0}}),
        (MinTokens(MinTokensConfig()), {"min_tokens": 9}),
    ],
)
def test_a_slot_is_clean_for_its_next_sequence(processor: LogitsProcessor, params: dict[str, object]) -> None:
    processor.allocate(S, V, torch.device("cpu"))
    processor.join(0, request([1, 3], **params))
    ctx = context([0], [[1, 3, 3]], [2])
    logits = torch.randn(1, V)
    assert not torch.equal(processor.apply(logits.clone(), ctx), logits)
    processor.join(0, request([1, 3]))
    assert torch.equal(processor.apply(logits.clone(), ctx), logits)
