"""What the front-end and the engine process say to each other: msgpack, typed, without pickle.

Both ends come from one installation and are compared before they speak (`identity`), so the messages carry no version.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from dovetail.core.errors import RequestError
from dovetail.core.interfaces import EmbeddingSpec, Pooling, SamplingParams, TokenLogprobs

LogprobWire = tuple[float, list[tuple[int, float]]]
"""Of one token, and of the most likely ones."""


def read_logprobs(logprobs: Sequence[LogprobWire]) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(logprob, tuple(top)) for logprob, top in logprobs)


def write_logprobs(logprobs: Sequence[TokenLogprobs]) -> list[LogprobWire]:
    return [(entry.logprob, list(entry.top)) for entry in logprobs]


class Add(msgspec.Struct, array_like=True, tag=0):
    """Queue a request."""

    id: int
    """The front-end's, rising."""
    prompt_ids: list[int]
    params: dict[str, Any]
    """SamplingParams, what was set of it."""
    priority: int = 0
    deadline: float | None = None
    """Seconds from now by which it should be complete."""
    user: str = ""
    cache_salt: str = ""
    hints: dict[str, float] = {}
    pooling: Pooling | None = None
    """The prompt is embedded."""
    adapter: str = ""
    """By name; "" = the base model."""


def encode_add(
    encoder: msgspec.msgpack.Encoder, id: int, prompt_ids: Sequence[int], params: SamplingParams, **request: Any
) -> bytes:
    """`request`: the other fields of Add. RequestError for what no message can hold."""
    add = Add(id, list(prompt_ids), params.model_dump(exclude_unset=True), **request)
    try:
        return encoder.encode(add)
    except (OverflowError, TypeError, ValueError, RecursionError) as error:
        # Numbers past 64 bits, half of a surrogate pair, a nest too deep: JSON has them, a message has not.
        raise RequestError(f"a value cannot be sent to the engine: {error}") from None


class Abort(msgspec.Struct, array_like=True, tag=1):
    """The client is gone."""

    id: int


class Finish(msgspec.Struct, array_like=True, tag=2):
    """A stop string ended one sample after so many output tokens."""

    id: int
    sample: int
    tokens: int


class Control(msgspec.Struct, array_like=True, tag=3):
    """Anything rare; answered by a Reply."""

    id: int
    op: str
    arguments: dict[str, Any] = {}


Command = Add | Abort | Finish | Control


class SampleUpdate(msgspec.Struct, array_like=True):
    """What a step brought for one sample."""

    id: int
    sample: int
    tokens: tuple[int, ...]
    reason: str | None = None
    """"stop", "length", "abort", "rejected"; None while it runs."""
    hidden: bool = False
    """The last token ended the output and is no part of its text."""
    logprobs: list[LogprobWire] = []
    prompt_logprobs: list[LogprobWire] = []
    cached: int = 0
    """Prompt tokens found in the prefix cache."""
    detail: str = ""
    """Why it was rejected."""
    status: int = 0
    """HTTP status of a rejection."""
    pooled: bytes = b""
    """Of a prompt that is embedded: float32, little-endian."""


class EngineStats(msgspec.Struct, array_like=True):
    """Counters since the engine started, and the state of the moment."""

    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    decode_rows: int = 0
    pages: int = 0
    pages_owned: int = 0
    """By running sequences."""
    pages_cached: int = 0
    prefix_queries: int = 0
    """Prompt tokens of requests that entered."""
    prefix_hits: int = 0
    """Of those, found in the prefix cache."""
    evictions: int = 0
    tokens_owned: int = 0
    """Slots of the pages that running sequences own."""
    tokens_used: int = 0
    """Of those slots, the ones that hold a key and a value."""

    @property
    def kv_usage(self) -> float:
        """Share of KV pages that running sequences own."""
        return self.pages_owned / self.pages if self.pages else 0.0


def total(stats: Iterable[EngineStats]) -> EngineStats:
    """Of several engines together."""
    return EngineStats(*map(sum, zip(*map(msgspec.structs.astuple, (EngineStats(), *stats)), strict=True)))


class StepMessage(msgspec.Struct, array_like=True, tag=0):
    """One step's news; `stats` rides along a few times a second, also where there is no news."""

    news: list[SampleUpdate]
    stats: EngineStats | None = None
    taken: int = 0
    """Commands of this link that were carried out."""
    idle: bool = False
    """Nothing is left to do: silence may follow."""


class Reply(msgspec.Struct, array_like=True, tag=1):
    id: int
    value: Any = None
    error: str = ""
    status: int = 400
    """HTTP status of an error."""


Output = StepMessage | Reply


class EngineInfo(msgspec.Struct):
    """What a front-end needs to know of an engine that is ready to serve."""

    model: str
    """The name of the model's folder, or of its component where it has none."""
    folder: str | None
    """Where tokenizer and chat template lie."""
    vocab: int
    max_len: int
    """Tokens of a sequence, prompt and output."""
    max_seqs: int
    device: str
    start_seconds: float
    embedding: EmbeddingSpec | None
    """What the checkpoint says of its embeddings."""
    hidden: int
    """Numbers in one."""
    head: bool
    """It can generate."""
    notes: list[str]
    """Slower paths that were chosen."""
    adapters: dict[str, str] = {}
    """Loaded at start-up: name -> folder."""
    num_pages: dict[int, int] = {}
    """KV pages by group."""
    lookahead: int = 0
    """Draft tokens per step."""
    phases: dict[str, float] = {}
    """Start-up seconds by phase."""
