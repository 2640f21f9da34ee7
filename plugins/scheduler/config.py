"""Options of the built-in schedulers."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from dovetail.core.compose import Config


class FCFSConfig(Config):
    """First come, first served, with chunked prefill beside decode."""

    max_chunk: int | None = Field(None, ge=1)
    """Prefill tokens of one sequence in a step, at most; None = whatever engine.token_budget leaves."""
    chunked: bool = True
    """Whether a prompt may be cut to fill a step (chunked prefill, Agrawal et al. 2023); false: it enters whole, in a
    step that has room for it, as in Orca; one longer than engine.token_budget is cut all the same. The baseline of
    ablations, with a budget that holds the longest prompt."""

    @model_validator(mode="after")
    def _chunks_of_chunks(self) -> Self:
        if self.max_chunk is not None and not self.chunked:
            raise ValueError(f"max_chunk={self.max_chunk} cuts prompts, and chunked=false forbids it: give one of them")
        return self


class StaticConfig(Config):
    """Static batching: a batch runs until its last sequence is done, then the next starts. The ablation baseline."""

    batch_size: int | None = Field(None, ge=1)
    """Sequences of a batch; None = engine.max_seqs."""


class PriorityConfig(Config):
    """Lowest Request.priority first; a waiting sequence takes the place of a running one of lower priority."""

    age_seconds: float | None = Field(None, gt=0)
    """A sequence goes ahead of one that is a level more urgent if it came so many seconds earlier. None = it never
    does, so the least urgent may starve."""


class LongestPrefixConfig(Config):
    """The longest cached prefix first, so that it is used before it is evicted."""

    window: int = Field(64, ge=1)
    """Sequences at the head of the queue that are compared in a step."""
    max_wait: float = Field(5.0, ge=0)
    """Seconds after which a sequence enters before those with a longer prefix, oldest first."""


class ShortestJobConfig(Config):
    """The least work first: prompt tokens plus the output expected."""

    max_wait: float = Field(30.0, ge=0)
    """Seconds after which a sequence enters before shorter ones, oldest first."""


class FairConfig(Config):
    """Users in turn, by tokens and not by requests; Request.user names them."""

    quantum: int = Field(2048, ge=1)
    """Tokens, prompt and output, of a user's turn, times the user's weight."""
    weights: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Weight of each user who is not to have 1.0."""


class DeadlineConfig(Config):
    """Earliest deadline first; with a cost model, what cannot be met is rejected."""

    margin: float = Field(1.0, gt=0)
    """Predicted seconds are multiplied by this before they are held against the deadline."""
