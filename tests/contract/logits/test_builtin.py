"""Contract suite for every built-in logits processor."""

from __future__ import annotations

from dovetail.core.interfaces import LogitsProcessor, SamplingParams
from dovetail.core.testing.logits import LogitsProcessorContract
from dovetail.plugins.logits.config import LogitBiasConfig, MinTokensConfig, PenaltiesConfig
from dovetail.plugins.logits.logit_bias import LogitBias
from dovetail.plugins.logits.min_tokens import MinTokens
from dovetail.plugins.logits.penalties import Penalties


class TestPenalties(LogitsProcessorContract):
    def make(self) -> LogitsProcessor:
        return Penalties(PenaltiesConfig())

    def active_params(self) -> SamplingParams:
        return SamplingParams(repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=-0.2)

    def larger_params(self) -> SamplingParams:
        return SamplingParams(repetition_penalty=0.8)


class TestLogitBias(LogitsProcessorContract):
    def make(self) -> LogitsProcessor:
        return LogitBias(LogitBiasConfig())

    def active_params(self) -> SamplingParams:
        return SamplingParams(logit_bias={3: 2.5})

    def larger_params(self) -> SamplingParams:
        return SamplingParams(logit_bias={token: token / 2 - 3.25 for token in range(15)})


class TestMinTokens(LogitsProcessorContract):
    def make(self) -> LogitsProcessor:
        return MinTokens(MinTokensConfig())

    def active_params(self) -> SamplingParams:
        return SamplingParams(min_tokens=20)

    def larger_params(self) -> SamplingParams:
        return SamplingParams(min_tokens=10, stop_token_ids=tuple(range(3, 14)))
