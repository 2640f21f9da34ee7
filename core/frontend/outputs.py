"""Results for users, and how tokens become text: incremental detokenization and stop strings."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dovetail.core.interfaces import FinishReason, SamplingParams, TokenLogprobs
from dovetail.core.tokenizer import Detokenizer, Tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Delta(NamedTuple):
    """New output of one sample."""

    sample: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: Sequence[TokenLogprobs] = ()
    """One per token, if requested."""
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: str | None = None
    """"stop", "length" or "abort"; None while the sample runs."""
    pooled_C: NDArray[np.float32] | None = None
    """Embedding of the prompt, not normalized."""


@dataclass(slots=True)
class Completion:
    """One finished sample."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(slots=True)
class Timing:
    """Times from time.perf_counter(), in seconds."""

    arrival: float
    first_token: float = 0.0
    finished: float = 0.0

    @property
    def ttft(self) -> float:
        """Seconds from arrival to first token."""
        return self.first_token - self.arrival


@dataclass(slots=True)
class Generation:
    """Result of one request: n completions of one prompt."""

    prompt: str | None
    prompt_ids: tuple[int, ...]
    completions: list[Completion]
    timing: Timing
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of the prompt tokens from the second on."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.completions[0].token_ids


class StopStringMatcher:
    """Decodes one sample. Finds stop strings, and holds back text that may be the beginning of one."""

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer | None, keep: Collection[str] = ()) -> None:
        """`keep`: special tokens whose text is part of the output."""
        self.stop, self.include = params.stop, params.include_stop
        self._detokenizer: Detokenizer | None = tokenizer.stream(keep) if tokenizer else None
        self._held = ""
        self.tokens = 0
        """Output tokens pushed."""

    def push(self, tokens: Sequence[int]) -> tuple[str, bool]:
        """Return (new text without what is held back, whether a stop string was found). `tokens` then counts up to the
        token that completed the stop string."""
        if self._detokenizer is None:
            self.tokens += len(tokens)
            return "", False
        if not self.stop:
            self.tokens += len(tokens)
            push = self._detokenizer.push
            return push(tokens[0]) if len(tokens) == 1 else "".join(map(push, tokens)), False
        shown = ""
        for token in tokens:
            self.tokens += 1
            self._held += self._detokenizer.push(token)
            found = [(at, s) for s in self.stop if (at := self._held.find(s)) >= 0]
            if found:
                at, stop = min(found)
                return shown + self._held[: at + len(stop) * self.include], True
            safe = len(self._held) - self._tail()
            shown, self._held = shown + self._held[:safe], self._held[safe:]
        return shown, False

    def _tail(self) -> int:
        """Return the length of the longest suffix of the held text with which a stop string begins."""
        longest = min(len(self._held), max(len(s) for s in self.stop) - 1)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(self._held[-n:]) for s in self.stop)), 0)

    def flush(self) -> str:
        """Return the held text, once the output has ended without a stop string. An incomplete character is U+FFFD."""
        held, self._held = self._held, ""
        return held if self._detokenizer is None else held + self._detokenizer.finish()


REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.REJECTED: "rejected",
}


def truncate_and_normalize(
    vectors: NDArray[np.float32], *, normalize: bool, dimensions: int | None
) -> NDArray[np.float32]:
    """Keep the first `dimensions` (Matryoshka, Kusupati et al. 2022), then scale each vector to length 1."""
    vectors = vectors[..., :dimensions]
    if not normalize:
        return vectors
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
