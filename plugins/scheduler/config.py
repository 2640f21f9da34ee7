"""Options of the built-in schedulers."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from dovetail.core.compose import Config


class FCFSConfig(Config):
    """First come, first served, with chunked prefill in the same steps as decode."""

    max_chunk: int | None = Field(None, ge=1)
    """Most prefill tokens of one sequence in a step; None = all that engine.token_budget leaves."""
    chunked: bool = True
    """Whether a prompt may be split to fill a step (chunked prefill, Agrawal et al. 2023). false: it enters whole, in a
    step with room for it, as in Orca; only prompts longer than engine.token_budget are split."""

    @model_validator(mode="after")
    def _chunks_of_chunks(self) -> Self:
        if self.max_chunk is not None and not self.chunked:
            raise ValueError(f"max_chunk={self.max_chunk} splits prompts and chunked=false forbids it: set one of them")
        return self


class StaticConfig(Config):
    """Static batching: a batch runs until its last sequence is done, then the next starts. The ablation baseline."""

    batch_size: int | None = Field(None, ge=1)
    """Sequences per batch; None = engine.max_seqs."""


class PriorityConfig(Config):
    """Lowest Request.priority first. A waiting sequence preempts a running one that is less urgent."""

    age_seconds: float | None = Field(None, gt=0)
    """Seconds of waiting that equal one priority level: a sequence that arrived this much earlier goes before one that
    is a level more urgent. None = no aging, so the least urgent may starve."""


class LongestPrefixConfig(Config):
    """Longest cached prefix first, so that prefixes are used before they are evicted."""

    window: int = Field(64, ge=1)
    """Number of sequences at the head of the queue that are compared in a step."""
    max_wait: float = Field(5.0, ge=0)
    """Seconds of waiting after which a sequence goes before those with a longer prefix, oldest first."""


class ShortestJobConfig(Config):
    """Least work first: prompt tokens plus expected output tokens."""

    max_wait: float = Field(30.0, ge=0)
    """Seconds of waiting after which a sequence goes before shorter ones, oldest first."""


class FairConfig(Config):
    """Deficit round robin between users (Request.user), counted in tokens."""

    quantum: int = Field(2048, ge=1)
    """Prompt and output tokens that a user of weight 1 may spend per round."""
    weights: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """User -> weight, a factor on the quantum; 1.0 for users not listed."""


class DeadlineConfig(Config):
    """Earliest deadline first. With a cost model, requests that cannot meet their deadline are rejected."""

    margin: float = Field(1.0, gt=0)
    """Factor on the predicted seconds before they are compared with the deadline."""
