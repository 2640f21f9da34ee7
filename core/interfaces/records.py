"""Records shared by several contracts: what a request asks for, and one sequence as scheduler, allocator and engine see
it. Importing this module loads no torch. Each mutable field names its writer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from dovetail.core.errors import RequestError
from dovetail.core.interfaces import request_values
from dovetail.core.interfaces.grammar import Grammar
from dovetail.core.interfaces.logprobs import TokenLogprobs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Pooling = Literal["last", "mean"]
"""How the hidden states of a prompt become one embedding: the last token's state (E5-Mistral, Wang et al. 2024) or the
mean of all."""


def _int32_token(token: int) -> int:
    if not 0 <= token < 2**31:
        raise ValueError(f"token id {token} is not in [0, 2**31)")
    return token


TokenId = Annotated[int, AfterValidator(_int32_token)]


MOST_EXTRA_BYTES = 1 << 16
"""Maximum size of SamplingParams.extra as JSON."""


MOST_BIASES = 1024
"""Limit of the entries of SamplingParams.logit_bias."""
MOST_PREDICTED = 1 << 20
"""Limit of the tokens of SamplingParams.prediction."""
MOST_LOGPROBS = 64
"""Limit of SamplingParams.logprobs and prompt_logprobs."""
LEAST_TEMPERATURE = 1e-5
"""Least temperature at which tokens are drawn."""


class SamplingParams(BaseModel):
    """How to sample tokens from logits, and when to stop. Names and meanings follow the OpenAI API if it has them."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        strict=False,
        # `model_copy(update=...)` checks nothing, so `model_validate` checks an instance too, when it is submitted.
        revalidate_instances="always",
    )

    n: int = Field(1, ge=1, le=128)
    """Samples per prompt. They share the prompt's KV pages (copy-on-write)."""
    max_tokens: int | None = Field(128, ge=1, lt=2**31)
    """Maximum number of output tokens; None = until the context is full."""
    min_tokens: int = Field(0, ge=0, lt=2**31)
    """Number of output tokens before EOS or a stop token may be sampled."""
    temperature: float = Field(1.0, ge=0.0, le=100.0)
    """0 = greedy. A value below 1e-5 counts as 0, since it makes the same choice and divided logits may overflow."""
    top_k: int = Field(0, ge=0, lt=2**31)
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
        default_factory=dict, max_length=MOST_BIASES
    )
    """Added to the logits of these token ids."""
    seed: int | None = Field(None, ge=0, lt=2**63)
    """Equal seed, prompt and parameters give equal tokens, whatever else is in the batch. None = drawn from
    engine.seed."""
    stop: tuple[str, ...] = Field((), max_length=64)
    """Strings that end the output. They are removed from it unless include_stop is set."""
    stop_token_ids: tuple[TokenId, ...] = Field((), max_length=64)
    """Token ids that end the output, in addition to the model's EOS."""
    include_stop: bool = False
    """Keep the stop string or stop token in the output."""
    ignore_eos: bool = False
    """Continue past the model's EOS (for benchmarks)."""
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    """Report the log-probability of each output token and of this many most likely tokens, at most the vocabulary. They
    are taken from the model's distribution, before penalties, bias and temperature."""
    prompt_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    """The same for prompt tokens. Such a request recomputes its prompt instead of reading the prefix cache."""
    extra: dict[str, JsonValue] = Field(default_factory=dict, max_length=64)
    """Parameters of selected logits processors, by name, such as {"no_repeat_ngram": 3}: plain JSON values, at most 64
    KiB. A name that no selected processor declares is rejected."""
    prediction: tuple[TokenId, ...] = Field((), max_length=MOST_PREDICTED)
    """Tokens that the output probably has, such as the text that it edits. spec_decode=suffix drafts from them; they
    change no output."""
    grammar: Grammar | None = None
    """Required form of the output, for instance {"kind": "regex", "value": "[a-z]+"}. The output ends when the grammar
    allows no further token."""

    @field_validator("temperature")
    @classmethod
    def _tiny_is_greedy(cls, value: float) -> float:
        return value if value >= LEAST_TEMPERATURE else 0.0

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, data: object) -> object:
        for name in data if isinstance(data, dict) else ():
            if name not in cls.model_fields:
                close = get_close_matches(str(name), cls.model_fields, n=1)
                hint = f" Did you mean `{close[0]}`?" if close else ""
                raise ValueError(
                    f"SamplingParams has no field `{name}`.{hint} "
                    f'A parameter of a logits processor is given as extra={{"{name}": ...}}'
                )
        return data

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
            raise ValueError(f"extra: {size} bytes of JSON; the maximum is {MOST_EXTRA_BYTES}")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options of a request in addition to its prompt and sampling parameters. Raises RequestError for a value of a
    wrong type; NumPy's numbers become Python's."""

    priority: int = 0
    """Lower values run first, with a scheduler that uses priorities."""
    deadline: float | None = None
    """Time by which the request should be complete, in seconds of this process's `time.perf_counter()`."""
    user: str = ""
    """Name by which fair schedulers and routers group requests."""
    cache_salt: str = ""
    """Only requests with equal salts share prefix pages."""
    hints: Mapping[str, float] = field(default_factory=dict)
    """Numbers from the client or an annotator (for instance the expected output length), for schedulers."""
    pooling: Pooling | None = None
    """How the prompt is embedded; None = the request generates text."""
    adapter: str = ""
    """Name of the adapter to run with; "" = the base model."""

    def __post_init__(self) -> None:
        write = object.__setattr__
        write(self, "priority", request_values.integer("priority", self.priority))
        if self.deadline is not None:
            write(self, "deadline", request_values.number("deadline", self.deadline))
        for name in ("user", "cache_salt", "adapter"):
            request_values.text(name, getattr(self, name))
        write(self, "hints", request_values.numbers_by_name("hints", self.hints))
        if self.pooling is not None and self.pooling not in get_args(Pooling):
            raise RequestError(f"pooling={self.pooling!r}: there are {', '.join(get_args(Pooling))}")


@dataclass(frozen=True, slots=True)
class Request(RequestOptions):
    """One accepted prompt. Immutable.

    The engine rewrites two of the caller's options: `adapter` becomes the adapter's name and load count, such as
    "sql@2", and `cache_salt` includes the adapter. With `pooling` the engine clears SAMPLE in the request's rows, and
    the ranks return pooled states instead of tokens. For the scheduler it is a request for one token.
    """

    uid: int
    """Unique in the engine, ascending with arrival."""
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    eos_ids: tuple[int, ...] = ()
    """The model's end-of-sequence ids (empty when ignore_eos)."""
    arrival: float = 0.0
    """Engine clock in seconds."""
    processors: tuple[str, ...] = ()
    """Names of the logits processors that want the request. Written by the engine when it arrives."""

    @property
    def feeds_all(self) -> bool:
        """Whether every prompt token must be fed, so that none may come from the prefix cache."""
        return self.params.prompt_logprobs is not None or self.pooling == "mean"

    stop_ids: frozenset[int] = field(init=False, repr=False, compare=False)
    """All token ids that end the output."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_ids", frozenset(self.eos_ids + self.params.stop_token_ids))


class Status(Enum):
    WAITING = "waiting"
    """Not on the device: new or preempted. May enter a plan when inflight == 0."""
    RUNNING = "running"
    """Owns a slot and pages."""
    FINISHED = "finished"
    """Owns neither slot nor pages. Late results are dropped."""


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    REJECTED = "rejected"


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a request, as the host knows it. With plans in flight the device may be ahead.

    Invariants: known_len <= max_len; computed <= max_len; inflight == 0 implies max_len == known_len.
    """

    uid: int
    """Unique among all sequences."""
    request: Request
    sample: int = 0
    """Index of the sample, 0 .. n-1."""
    parent: Sequence | None = None
    """Set for sample > 0: the sequence whose prompt pages this one forks."""

    tokens: list[int] = field(default_factory=list)
    """The prompt and all output tokens received so far. Written by the engine from results, before scheduler.update."""
    status: Status = Status.WAITING
    """Written by the scheduler."""
    slot: int = -1
    """Row of the persistent device state while RUNNING. Written by the scheduler."""
    epoch: int = 0
    """Number of entries to the device; (uid, epoch) identifies one stay. Written by the scheduler."""
    limit: int = 0
    """Maximum length: prompt + max_tokens, limited by the context. Written by the engine."""
    max_len: int = 0
    """Upper bound of the length after every launched plan (all drafts accepted). Written by the scheduler."""
    computed: int = 0
    """Upper bound of the tokens whose KV is in the cache after every launched plan. Written by the scheduler."""
    inflight: int = 0
    """Launched plans with a row of this sequence whose result has not arrived. Written by the scheduler."""
    cached: int = 0
    """Prompt tokens taken from the prefix cache at the first entry. Written by the scheduler."""
    preemptions: int = 0
    """Number of preemptions. Written by the scheduler."""

    def __post_init__(self) -> None:
        if not self.tokens:
            self.tokens = list(self.request.prompt_ids)
        self.max_len = len(self.tokens)
        if not self.limit:
            self.limit = self.prompt_len + (self.request.params.max_tokens or 0)

    @property
    def known_len(self) -> int:
        """Number of tokens that the host has."""
        return len(self.tokens)

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def salt(self) -> str:
        return self.request.cache_salt

    @property
    def remaining(self) -> int:
        """Tokens left to feed: more than 1 means prefill (new, or recomputing after preemption), 1 means decode."""
        return self.max_len - self.computed


class RowResult(NamedTuple):
    """Result of one plan row. `tokens` is empty for a prefill chunk that does not sample, and for a LATE row without
    late inputs: its last token must be fed again."""

    row: int
    uid: int
    epoch: int
    tokens: tuple[int, ...] = ()
    """Accepted drafts, then the token sampled by the target: -1 if some logit is NaN or +inf, which ends the
    sequence."""
    logprobs: Seq[TokenLogprobs] = ()
    """One per token, if requested. The engine reads its length and slices; clients read the entries."""
    prompt_logprobs: Seq[TokenLogprobs] = ()
    """For each prompt token fed by this chunk, the logprobs of the token that follows it, if requested."""
    pooled_C: NDArray[np.float32] | None = None
    """Final hidden states of a request with pooling: the prompt's last token, or the sum over this row's tokens."""
    drafted: int = 0
    """Drafts that the row verified: at most Row.draft, and fewer if the drafter had no more."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of one plan. They arrive in plan order."""

    step: int
    rows: tuple[RowResult, ...]
    device_seconds: float = 0.0
    """Device time of the plan; 0 = the executor cannot measure it."""
    idle_seconds: float = 0.0
    """Idle time of the device between the previous plan and this one; 0 if device_seconds is 0."""
    draft_seconds: float = 0.0
    """Part of device_seconds in which the drafter worked before the layers; 0 where both are one CUDA graph."""
    draw_seconds: float = 0.0
    """Part of device_seconds after the layers: logits, draws and verification; 0 without a drafter."""
    expert_loads: tuple[float, float] | None = None
    """Pairs of token and routed expert in a step and layer, on the busiest expert rank and on the mean of all, averaged
    over layers and over the steps since they were last reported. None = this result reports none."""
