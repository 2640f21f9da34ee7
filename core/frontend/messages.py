"""Messages between the front-end and the engine: typed, msgpack on the wire, without pickle. Both ends come from one
installation, which is checked first (`identity`), so the messages carry no version."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec.msgpack import Ext
from numpy.typing import NDArray

from dovetail.core.errors import RequestError
from dovetail.core.interfaces import EmbeddingSpec, LogprobColumns, RequestOptions, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    _Logprobs = Sequence[TokenLogprobs]
else:
    # On the wire, LogprobColumns are an Ext.
    _Logprobs = Sequence[TokenLogprobs] | Ext


class Add(msgspec.Struct, array_like=True, tag=0):
    """Queue a request."""

    id: int
    """Number of the request. The numbers that an engine receives rise."""
    prompt_ids: Sequence[int]
    params: Any
    """SamplingParams; on the wire a dict of the fields that were set."""
    options: RequestOptions
    """On the wire, `deadline` is in seconds from now."""


class Abort(msgspec.Struct, array_like=True, tag=1):
    """Drop a request."""

    id: int


class Finish(msgspec.Struct, array_like=True, tag=2):
    """End a sample after `tokens` output tokens, with which a stop string was complete."""

    id: int
    sample: int
    tokens: int


class Control(msgspec.Struct, array_like=True, tag=3):
    """Run a rare operation; answered by a Reply."""

    id: int
    op: str
    arguments: dict[str, Any] = {}


Command = Add | Abort | Finish | Control


class Attach:
    """Never sent: a CommandSource yields it when a user has connected."""


class Detach:
    """Never sent: a CommandSource yields it when a user has disconnected."""


class SampleUpdate(msgspec.Struct, array_like=True, gc=False):
    """Output of one step for one sample."""

    id: int
    """Number of the request."""
    sample: int
    tokens: tuple[int, ...]
    reason: str | None = None
    """"stop", "length", "abort" or "rejected"; None while the sample runs."""
    hidden: bool = False
    """The last token ended the output and is not part of its text."""
    logprobs: _Logprobs = ()
    prompt_logprobs: _Logprobs = ()
    cached: int = 0
    """Prompt tokens found in the prefix cache."""
    detail: str = ""
    """Why the request was rejected."""
    status: int = 0
    """HTTP status of a rejection."""
    pooled: NDArray[np.float32] | None = None
    """Embedding of the prompt, not normalized; on the wire float32, little-endian."""


class EngineStats(msgspec.Struct, array_like=True):
    """Counters since the engine started, and its current state."""

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
    """Pages that running sequences own."""
    pages_cached: int = 0
    prefix_queries: int = 0
    """Prompt tokens of admitted requests."""
    prefix_hits: int = 0
    """The part of `prefix_queries` that was found in the prefix cache."""
    evictions: int = 0
    tokens_owned: int = 0
    """Slots of the pages that running sequences own."""
    tokens_used: int = 0
    """The part of `tokens_owned` that holds a key and a value."""

    @property
    def kv_usage(self) -> float:
        """Share of KV pages that running sequences own."""
        return self.pages_owned / self.pages if self.pages else 0.0


def total(stats: Iterable[EngineStats]) -> EngineStats:
    """Return the sums over several engines."""
    return EngineStats(*map(sum, zip(*map(msgspec.structs.astuple, (EngineStats(), *stats)), strict=True)))


class StepMessage(msgspec.Struct, array_like=True, tag=0):
    """The updates of one step. `stats` is sent a few times a second, even if a step has no updates."""

    updates: list[SampleUpdate]
    stats: EngineStats | None = None
    taken: int = 0
    """Commands of this link that have been executed."""
    idle: bool = False
    """The engine has no work, so that no message need follow."""


class Reply(msgspec.Struct, array_like=True, tag=1):
    id: int
    value: Any = None
    error: str = ""
    status: int = 400
    """HTTP status of an error."""


Output = StepMessage | Reply


def encode_command(command: Command) -> bytes:
    """Raises RequestError for values that msgpack cannot represent."""
    if isinstance(command, Add) and command.options.deadline is not None:
        command = Add(command.id, command.prompt_ids, command.params, _shifted(command.options, -time.perf_counter()))
    try:
        return _encoder.encode(command)
    except (OverflowError, TypeError, ValueError, RecursionError) as error:
        # JSON, unlike msgpack, allows integers above 64 bits, lone surrogates and deep nesting.
        raise RequestError(f"a value cannot be sent to the engine: {error}") from None


def decode_command(data: bytes) -> Command:
    command = _command_decoder.decode(data)
    if isinstance(command, Add) and command.options.deadline is not None:
        command.options = _shifted(command.options, time.perf_counter())
    return command


def encode_output(message: Output) -> bytes:
    return _encoder.encode(message)


def decode_output(data: bytes) -> Output:
    message = _output_decoder.decode(data)
    if isinstance(message, StepMessage):
        for update in message.updates:
            if type(update.logprobs) is Ext:
                update.logprobs = _columns(update.logprobs)
            if type(update.prompt_logprobs) is Ext:
                update.prompt_logprobs = _columns(update.prompt_logprobs)
    return message


def _columns(value: Any) -> LogprobColumns:
    data = memoryview(value.data)
    packed_NC = np.frombuffer(data[2:], "<i4").reshape(-1, int.from_bytes(data[:2], "little"))
    return LogprobColumns(packed_NC, range(len(packed_NC)), value.code)


def _shifted(options: RequestOptions, seconds: float) -> RequestOptions:
    assert options.deadline is not None
    return replace(options, deadline=options.deadline + seconds)


def _to_wire(value: object) -> object:
    if isinstance(value, SamplingParams):
        return value.model_dump(exclude_unset=True)
    if isinstance(value, LogprobColumns):
        packed_NC = value.packed
        return Ext(value.top, packed_NC.shape[1].to_bytes(2, "little") + packed_NC.astype("<i4", copy=False).tobytes())
    if isinstance(value, np.ndarray):
        return value.astype("<f4", copy=False).tobytes()
    raise TypeError(f"{type(value).__name__} has no form in messages")


def _from_wire(kind: type, value: Any) -> object:
    # The embedding is the only field of a type that msgspec does not support.
    return np.frombuffer(value, "<f4")


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_wire)
_command_decoder = msgspec.msgpack.Decoder(Command)
_output_decoder = msgspec.msgpack.Decoder(Output, dec_hook=_from_wire)


class EngineInfo(msgspec.Struct):
    """Description of an engine that is ready, for a front-end."""

    model: str
    """Name of the checkpoint, or of the model's component if it has none."""
    checkpoint: str | None
    """Path of the checkpoint, which has the tokenizer and the chat template."""
    vocab: int
    max_len: int
    """Maximum tokens of a sequence, prompt and output."""
    max_seqs: int
    device: str
    start_seconds: float
    embedding: EmbeddingSpec | None
    """Embedding settings of the checkpoint."""
    hidden: int
    """Size of an embedding."""
    head: bool
    """Whether the model can generate."""
    notes: list[str]
    """Notes of the start-up, such as slower paths that were chosen."""
    adapters: dict[str, str] = {}
    """Adapters loaded at start-up: name -> folder."""
    num_pages: dict[int, int] = {}
    """KV pages by group."""
    lookahead: int = 0
    """Draft tokens per step."""
    phases: dict[str, float] = {}
    """Start-up seconds by phase."""
    tuning: str = ""
    """ExecutorInfo.tuning; those of several replicas are joined by "+" if they differ."""
