"""The workload seam: the requests of a benchmark and the times at which they arrive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SLO:
    """A service-level objective of one request; what is None is not asked for."""

    ttft: float | None = None
    """Time to first token at most, seconds."""
    tpot: float | None = None
    """Time per output token after the first at most, seconds."""


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """One request of a benchmark. End-of-sequence is ignored, so the work is the same whatever the model answers."""

    prompt_ids: tuple[int, ...]
    output_tokens: int
    """Exactly so many are generated, at least 1."""
    arrival: float = 0.0
    """Seconds after the run begins. Arrivals do not wait for answers (an open loop)."""
    slo: SLO | None = None
    """None = that of the run."""
    priority: int = 0
    """Lower runs first, with a scheduler that reads it."""
    user: str = ""
    cache_salt: str = ""
    adapter: str = ""
    """By name; "" = the base model."""


def no_tokenizer(text: str) -> Sequence[int]:
    raise ValueError("there is no tokenizer")


@dataclass(frozen=True, slots=True)
class WorkloadContext:
    """What requests are made for."""

    vocab: int
    """Prompt ids lie in [0, vocab)."""
    max_len: int
    """Tokens of prompt and output together at most."""
    seed: int
    """Differs between repeats of a run; equal seeds give equal requests."""
    rate: float | None = None
    """The offered load, requests/s: one of `rates()`."""
    encode: Callable[[str], Sequence[int]] = no_tokenizer
    """The model's tokenizer. Raises ValueError where it has none."""


class Workload(ABC):
    """Built as `Class(config)`. It imports no torch and needs no device."""

    def __init__(self, config: object) -> None:
        self.config = config

    def rates(self) -> Sequence[float | None]:
        """Offered loads to measure one after another, requests/s, each once; None = no rate is asked for. Several make
        a load curve."""
        return (None,)

    @abstractmethod
    def requests(self, ctx: WorkloadContext) -> Sequence[TimedRequest]:
        """The requests of one run, at least one, in order of arrival. Every random draw comes from ctx.seed. Raises
        ConfigError for requests that cannot be made: too long for ctx.max_len, a file that cannot be read."""
