"""Records that cross seams: what a request asks for, and one sequence's life as scheduler, allocator and engine see it.

Light on purpose: no torch. Each mutable field says who writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator

from dovetail.core.interfaces.grammar import Grammar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Pooling = Literal["last", "mean"]
"""How the hidden states of a prompt become one embedding: those of its last token (E5-Mistral, Wang et al. 2024), or
their mean."""


def _int32_token(token: int) -> int:
    if not 0 <= token < 2**31:
        raise ValueError(f"token id {token} is not in [0, 2**31)")
    return token


TokenId = Annotated[int, AfterValidator(_int32_token)]


MOST_EXTRA_BYTES = 1 << 16
"""Of SamplingParams.extra, as JSON."""


class SamplingParams(BaseModel):
    """How to turn logits into tokens, and when to stop. Names and meaning follow the OpenAI API where it has them."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, strict=False
    )

    n: int = Field(1, ge=1, le=128)
    """Samples drawn for one prompt; they share the prompt's KV pages (copy-on-write)."""
    max_tokens: int | None = Field(128, ge=1)
    """Output tokens at most; None = until the context is full."""
    min_tokens: int = Field(0, ge=0)
    """Output tokens before which neither EOS nor a stop token may be sampled."""
    temperature: float = Field(1.0, ge=0.0, le=100.0)
    """0 = greedy."""
    top_k: int = Field(0, ge=0)
    """Keep the k most likely tokens; 0 = all."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Keep the smallest set of tokens whose probability reaches top_p (nucleus sampling, Holtzman et al. 2019)."""
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    """Drop tokens less likely than min_p times the most likely one."""
    repetition_penalty: float = Field(1.0, gt=0.0, le=10.0)
    """Divides positive and multiplies negative logits of tokens seen in prompt or output (CTRL, Keskar et al. 2019)."""
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    """Subtracted once from the logit of each token seen in the output."""
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    """Subtracted from a token's logit once per occurrence in the output."""
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100.0, le=100.0)]] = Field(
        default_factory=dict, max_length=1024
    )
    """Added to the logits of these token ids."""
    seed: int | None = Field(None, ge=0, lt=2**63)
    """Same seed, prompt and parameters: same tokens, whatever else is in the batch. None = drawn from engine.seed."""
    stop: tuple[str, ...] = Field((), max_length=64)
    """Strings that end the output; not part of it unless include_stop."""
    stop_token_ids: tuple[TokenId, ...] = Field((), max_length=64)
    """Token ids that end the output, beside the model's own EOS."""
    include_stop: bool = False
    """Keep the stop string or stop token in the output."""
    ignore_eos: bool = False
    """Go on past the model's EOS (benchmarks)."""
    logprobs: int | None = Field(None, ge=0, le=64)
    """Report the log-probability of each output token and of this many most likely ones. Of the model's own
    distribution: before penalties, bias and temperature."""
    prompt_logprobs: int | None = Field(None, ge=0, le=64)
    """The same for prompt tokens. Such a request recomputes its prompt: it does not read the prefix cache."""
    extra: dict[str, JsonValue] = Field(default_factory=dict, max_length=64)
    """Parameters of chosen logits processors by their names, such as {"no_repeat_ngram": 3}; plain JSON values, 64 KiB
    at most. A name that no chosen processor has is refused."""
    grammar: Grammar | None = None
    """The form that the output must have; {"kind": "regex", "value": "[a-z]+"} for instance. It ends the output when
    nothing more may follow."""

    @model_validator(mode="before")
    @classmethod
    def _one_stop_string(cls, data: object) -> object:
        if isinstance(data, dict) and isinstance(data.get("stop"), str):
            return {**data, "stop": (data["stop"],)}
        return data

    @model_validator(mode="after")
    def _check(self) -> SamplingParams:
        if any(not s for s in self.stop):
            raise ValueError("stop: an empty stop string would end every output at once; leave it out")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        if self.extra and (size := len(json.dumps(self.extra, allow_nan=False))) > MOST_EXTRA_BYTES:
            raise ValueError(f"extra: {size} bytes of JSON, of at most {MOST_EXTRA_BYTES}")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """What a caller may say of a request besides its prompt and sampling parameters."""

    priority: int = 0
    """Lower runs first, with a scheduler that reads it."""
    deadline: float | None = None
    """Time on this process's `time.perf_counter()` by which the request should be complete, in seconds."""
    user: str = ""
    """Name that fair schedulers and routers group requests by."""
    cache_salt: str = ""
    """Prefix pages are shared only between requests of equal salt."""
    hints: Mapping[str, float] = field(default_factory=dict)
    """Numbers from the client or an annotator (for instance expected output length); schedulers may read them."""
    pooling: Pooling | None = None
    """How the prompt's hidden states become one embedding; None = the request generates text."""
    adapter: str = ""
    """Name of the adapter to run with; "" = the base model."""


@dataclass(frozen=True, slots=True)
class Request(RequestOptions):
    """One prompt as the engine accepted it. Immutable.

    The engine rewrites two of the caller's options. `adapter` becomes the adapter's name and load, as "sql@2".
    `cache_salt` includes the adapter. With `pooling`, the engine clears SAMPLE on the request's rows and the ranks
    return pooled states in place of tokens; to a scheduler it is a request for one token.
    """

    uid: int
    """Engine-wide, rising with arrival."""
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    eos_ids: tuple[int, ...] = ()
    """The model's end-of-sequence ids (empty when ignore_eos)."""
    arrival: float = 0.0
    """Engine clock, seconds."""
    processors: tuple[str, ...] = ()
    """Logits processors that it wants. Written by the engine, which asked each of them on arrival."""

    @property
    def feeds_all(self) -> bool:
        """Every prompt token must be fed, so that none may come from the prefix cache."""
        return self.params.prompt_logprobs is not None or self.pooling == "mean"

    stop_ids: frozenset[int] = field(init=False, repr=False, compare=False)
    """Every token id that ends the output."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_ids", frozenset(self.eos_ids + self.params.stop_token_ids))


class Status(Enum):
    WAITING = "waiting"
    """Not on the device: new, or preempted. May enter a plan when inflight == 0."""
    RUNNING = "running"
    """Owns a slot and pages."""
    FINISHED = "finished"
    """Owns nothing; late results are dropped."""


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    REJECTED = "rejected"


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a request. The host's view: with plans in flight the device may be ahead of it.

    Invariants: known_len <= max_len; computed <= max_len; inflight == 0 implies max_len == known_len.
    """

    uid: int
    """Unique among all sequences."""
    request: Request
    sample: int = 0
    """0 .. n-1."""
    parent: Sequence | None = None
    """Set for sample > 0: the sequence whose prompt pages this one forks."""

    tokens: list[int] = field(default_factory=list)
    """Prompt and every output token the host has. Written by the engine, from results, before scheduler.update."""
    status: Status = Status.WAITING
    """Written by the scheduler."""
    slot: int = -1
    """Row of the persistent device state while RUNNING. Written by the scheduler."""
    epoch: int = 0
    """Counts entries to the device; with uid it names one stay. Written by the scheduler."""
    limit: int = 0
    """Tokens it may grow to: prompt and max_tokens, at most the context. Written by the engine."""
    max_len: int = 0
    """Upper bound of the length once every launched plan has run (all drafts accepted). Written by the scheduler."""
    computed: int = 0
    """Upper bound of tokens whose KV is in the cache once every launched plan has run. Written by the scheduler."""
    inflight: int = 0
    """Launched plans with a row of this sequence whose result has not come. Written by the scheduler."""
    cached: int = 0
    """Prompt tokens taken from the prefix cache at the first entry. Written by the scheduler."""
    preemptions: int = 0
    """Written by the scheduler."""

    def __post_init__(self) -> None:
        if not self.tokens:
            self.tokens = list(self.request.prompt_ids)
        self.max_len = len(self.tokens)
        if not self.limit:
            self.limit = self.prompt_len + (self.request.params.max_tokens or 0)

    @property
    def known_len(self) -> int:
        """Tokens the host has."""
        return len(self.tokens)

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def salt(self) -> str:
        return self.request.cache_salt

    @property
    def remaining(self) -> int:
        """Tokens still to feed: more than 1 is prefill (new, or recomputing after preemption), 1 is decode."""
        return self.max_len - self.computed


class TokenLogprobs(NamedTuple):
    """Log-probability of one token and of the most likely ones, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class RowResult(NamedTuple):
    """What one plan row brought. tokens is empty for a prefill chunk that does not sample, and for a LATE row whose
    late inputs did not come: its last token is to be fed again."""

    row: int
    uid: int
    epoch: int
    tokens: tuple[int, ...] = ()
    """Accepted drafts, then the token the target sampled itself."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token, when asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """One per prompt token fed by this chunk, of the token that follows it, when asked for."""
    pooled_C: NDArray[np.float32] | None = None
    """Final hidden states, where the request has a pooling: of the prompt's last token, or the sum over this row's."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of one plan; arrive in plan order."""

    step: int
    rows: tuple[RowResult, ...]
    device_seconds: float = 0.0
    """Time the device spent on the plan, where the executor can tell; 0 = unknown."""
    idle_seconds: float = 0.0
    """Time for which the device had nothing to do before it, since the plan before was done; 0 where device_seconds
    is."""
