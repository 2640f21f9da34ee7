"""Options of the built-in workloads."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import AfterValidator, Field, field_validator, model_validator

from dovetail.core.compose import Config
from dovetail.core.interfaces import Grammar, SamplingParams

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class FixedConfig(Config):
    """Random prompts and outputs of equal length that arrive at once."""

    requests: int = Field(8, ge=1)
    """Number of requests."""
    prompt_tokens: int = Field(32, ge=1)
    """Tokens per prompt (ISL)."""
    output_tokens: int = Field(16, ge=1)
    """Tokens per output (OSL)."""


class PoissonConfig(Config):
    """Random prompts and outputs of equal length that arrive as a Poisson process; several rates give a load curve."""

    rates: tuple[Rate, ...] = Field((1.0, 2.0, 4.0, 8.0), min_length=1)
    """Mean arrival rates, requests/s; each is a separate run."""
    seconds: float = Field(30.0, gt=0)
    """Duration of the arrivals: a run has rate x seconds requests, but at least `at_least`."""
    at_least: int = Field(16, ge=1)
    """Least requests per run."""
    prompt_tokens: int = Field(32, ge=1)
    """Tokens per prompt."""
    output_tokens: int = Field(16, ge=1)
    """Tokens per output."""


class SharedPrefixConfig(Config):
    """Random prompts with a common prefix, such as a system prompt, that arrive at once."""

    requests: int = Field(512, ge=1)
    """Number of requests."""
    shared_tokens: int = Field(800, ge=1)
    """Tokens of the common prefix."""
    own_tokens: int = Field(200, ge=1)
    """Tokens of each prompt after the common prefix."""
    output_tokens: int = Field(128, ge=1)
    """Tokens per output."""
    range_ratio: float = Field(0.0, ge=0, lt=1)
    """Spread r: own tokens and output tokens of each request are uniform in [n (1 - r), n (1 + r)]; 0 = all equal."""


class LengthsConfig(Config):
    """Log-normal distribution of a number of tokens."""

    median: int = Field(ge=1)
    """Median, before `most` cuts off the greatest numbers."""
    sigma: float = Field(0.0, ge=0, le=3)
    """Standard deviation of the logarithm; 0 = all equal to the median."""
    most: int | None = Field(None, ge=1)
    """Greatest number; a greater one is drawn again. Required if sigma is not 0."""

    @model_validator(mode="after")
    def _check(self) -> LengthsConfig:
        if self.sigma and self.most is None:
            raise ValueError(f"sigma={self.sigma:g} has no greatest number of tokens: set most")
        if self.most is not None and self.most < self.median:
            raise ValueError(f"most={self.most} is less than median={self.median}")
        return self

    @property
    def bound(self) -> int:
        """The greatest number that is drawn."""
        return self.median if self.most is None else self.most


FIXED_BY_THE_RUN = ("n", "max_tokens", "min_tokens", "ignore_eos", "stop", "stop_token_ids", "grammar")


def _sampling(value: dict[str, Any]) -> dict[str, Any]:
    if fixed := [name for name in FIXED_BY_THE_RUN if name in value]:
        raise ValueError(f"{', '.join(fixed)}: set by the run; other fields of SamplingParams can be given")
    SamplingParams(**value)
    return value


Sampling = Annotated[dict[str, Any], AfterValidator(_sampling)]
"""Fields of SamplingParams."""


class ChatsConfig(Config):
    """Random prompts with log-normal lengths, as single requests or conversations, at once or as a Poisson process. The
    prompt of a further round is the previous prompt, the model's answer and a new message."""

    conversations: int = Field(64, ge=1)
    """Number of conversations."""
    rounds: int = Field(1, ge=1)
    """Requests of each conversation; 1 = independent requests."""
    pause: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Seconds between an answer and the next message of a conversation."""
    shared_tokens: int = Field(0, ge=0)
    """Tokens with which all conversations begin, such as a system prompt."""
    message: LengthsConfig = LengthsConfig(median=32)
    """Tokens of each message."""
    output: LengthsConfig = LengthsConfig(median=16)
    """Tokens of each answer."""
    rates: tuple[Rate, ...] = ()
    """Mean rates at which conversations begin (Poisson), 1/s, each a separate run; empty = all begin at once."""
    burstiness: float = Field(1.0, gt=0, allow_inf_nan=False)
    """With rates: shape of the Gamma distribution of the times between arrivals, whose coefficient of variation is
    1 / sqrt(burstiness); 1 = Poisson, less = bursts."""
    seconds: float | None = Field(None, gt=0, allow_inf_nan=False)
    """With rates: a run has rate x seconds conversations, but at least `at_least`; null = `conversations`."""
    at_least: int = Field(16, ge=1)
    """Least conversations of a run with rates and seconds."""
    sampling: Sampling = Field(default_factory=lambda: {"temperature": 0.0})
    """SamplingParams of every request, such as {temperature: 0.8, top_p: 0.95}. End-of-sequence is always ignored."""
    json_schema: dict[str, Any] | None = None
    """JSON Schema of every output; null = free text. An output that is complete before its drawn length ends there."""

    @field_validator("json_schema")
    @classmethod
    def _schema(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None:
            Grammar(kind="json_schema", value=json.dumps(value))
        return value

    @model_validator(mode="after")
    def _check(self) -> ChatsConfig:
        if self.seconds is not None and not self.rates:
            raise ValueError(f"seconds={self.seconds:g} is for arrivals at a rate: set rates, or seconds=null")
        if self.burstiness != 1 and not self.rates:
            raise ValueError(f"burstiness={self.burstiness:g} is for arrivals at a rate: set rates, or burstiness=1")
        if self.pause and self.rounds == 1:
            raise ValueError(f"pause={self.pause:g} is between rounds, and rounds is 1: set rounds, or pause=0")
        return self


class TextConfig(Config):
    """Prompts cut from a text at random places, of equal length, that arrive at once. Unlike random tokens they let
    drafters and models predict."""

    path: str | None = None
    """UTF-8 text file; null = modules of Python's standard library, held out from the training of the bundled model."""
    requests: int = Field(16, ge=1)
    """Number of requests."""
    prompt_tokens: int = Field(64, ge=1)
    """Tokens per prompt, without those with which the tokenizer begins each text."""
    output_tokens: int = Field(64, ge=1)
    """Tokens per output."""
    sampling: Sampling = Field(default_factory=lambda: {"temperature": 0.0})
    """SamplingParams of every request, such as {temperature: 0.8, top_p: 0.95}. End-of-sequence is always ignored."""


class ShareGPTConfig(Config):
    """First questions of a ShareGPT file and the lengths of their answers, in random order."""

    path: str
    """JSON file: a list of {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}."""
    requests: int = Field(200, ge=1)
    """Number of requests."""
    rates: tuple[Rate, ...] = ()
    """Mean arrival rates of a Poisson process, requests/s, each a separate run; empty = all arrive at once."""
    min_tokens: int = Field(4, ge=1)
    """Least tokens of a question and of an answer; shorter ones are skipped."""


class TraceConfig(Config):
    """Requests from a file: recorded traffic, or the same prompts for several engines."""

    path: str
    """JSONL file. Each line: {"prompt_ids": [...], "output_tokens": n}, optionally with "arrival" in seconds,
    "deadline" in seconds after it, "priority", "user", "cache_salt", "hints" and "adapter"."""
    speed: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Arrival rate relative to the recording; 2 = twice as fast."""


class RecordingConfig(Config):
    """Requests that an engine recorded (engine.record): their arrivals, prompts, output lengths and sampling. Prompts
    recorded without their tokens become other ids that share prefixes in the same way."""

    path: str
    """The recording. Requests that were rejected, or had no output when it ended, are left out."""
    start: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Leave out the first seconds of the recording, such as a server's warm-up."""
    seconds: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Take the arrivals of so many seconds; null = all that follow."""
    speed: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Arrival rate relative to the recording; 2 = twice as fast."""
