"""Workload contract: the requests of a benchmark and their arrival times."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dovetail.core.interfaces.records import RequestOptions, SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class SLO:
    """Service-level objective of one request; None = no objective."""

    ttft: float | None = None
    """Maximum time to first token, seconds."""
    tpot: float | None = None
    """Maximum time per output token after the first, seconds."""


@dataclass(frozen=True, slots=True)
class TimedRequest(RequestOptions):
    """One request of a benchmark. It ignores EOS tokens, so the work does not depend on the model's answer.

    A request that continues another is the next round of a conversation: its prompt is that request's prompt, the
    model's answer to it, and then `prompt_ids`. If the other request fails, it fails, too.

    `deadline` is in seconds after the request's arrival. `pooling` must be None, since a benchmark measures generation.
    """

    prompt_ids: tuple[int, ...]
    output_tokens: int
    """Exact number of generated tokens, at least 1. With a grammar, the maximum: an output that the grammar completes
    ends there."""
    arrival: float = 0.0
    """Seconds after the start of the run; of a request that continues another, seconds after that one's last token.
    Other arrivals do not wait for answers (open loop)."""
    slo: SLO | None = None
    """None = the run's objective."""
    sampling: SamplingParams = GREEDY
    """How tokens are sampled, and the grammar. The run sets `max_tokens` and `ignore_eos`; `n` is 1, and nothing stops
    the output (`stop`, `stop_token_ids`)."""
    continues: int | None = None
    """Index, in the run, of the earlier request that this one continues; None = it begins a conversation."""


def no_tokenizer(text: str) -> Sequence[int]:
    raise ValueError("there is no tokenizer")


@dataclass(frozen=True, slots=True)
class WorkloadContext:
    """Limits and inputs for the requests of a run."""

    vocab: int
    """Prompt ids are in [0, vocab)."""
    max_len: int
    """Maximum number of tokens of prompt and output together."""
    seed: int
    """Differs between repeats of a run. Equal seeds give equal requests."""
    rate: float | None = None
    """Offered load in requests/s: one of `rates()`."""
    encode: Callable[[str], Sequence[int]] = no_tokenizer
    """The model's tokenizer. Raises ValueError if the model has none."""


class Workload(ABC):
    """Built as `Class(config)`. It imports no torch and needs no device."""

    def __init__(self, config: object) -> None:
        self.config = config

    def rates(self) -> Sequence[float | None]:
        """Offered loads in requests/s, measured one after another, each listed once; None = the workload sets no rate.
        Several loads give a load curve."""
        return (None,)

    @abstractmethod
    def requests(self, ctx: WorkloadContext) -> Sequence[TimedRequest]:
        """Return the requests of one run, at least one. Those that continue no other are in order of arrival. All
        random draws derive from ctx.seed. Raises ConfigError if requests cannot be made: too long for ctx.max_len, with
        the rounds before them, or from an unreadable file."""
