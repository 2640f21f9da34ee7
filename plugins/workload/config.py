"""Options of the built-in workloads."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dovetail.core.compose import Config

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class FixedConfig(Config):
    """Random prompts and outputs of one length, all at once."""

    requests: int = Field(8, ge=1)
    """How many arrive."""
    prompt_tokens: int = Field(32, ge=1)
    """Of each prompt (ISL)."""
    output_tokens: int = Field(16, ge=1)
    """Of each output (OSL)."""


class PoissonConfig(Config):
    """Random prompts and outputs of one length that arrive as a Poisson process; several rates give a load curve."""

    rates: tuple[Rate, ...] = Field((1.0, 2.0, 4.0, 8.0), min_length=1)
    """Mean arrivals, requests/s; each is a run of its own."""
    seconds: float = Field(30.0, gt=0)
    """For which requests arrive: rate times seconds requests, at least `at_least`."""
    at_least: int = Field(16, ge=1)
    """Requests of a run, however low its rate."""
    prompt_tokens: int = Field(32, ge=1)
    """Of each prompt."""
    output_tokens: int = Field(16, ge=1)
    """Of each output."""


class SharedPrefixConfig(Config):
    """Random prompts that begin with the same tokens, as those of one system prompt do; all at once."""

    requests: int = Field(512, ge=1)
    """How many arrive."""
    shared_tokens: int = Field(800, ge=1)
    """At the beginning of every prompt."""
    own_tokens: int = Field(200, ge=1)
    """After them, of each prompt."""
    output_tokens: int = Field(128, ge=1)
    """Of each output."""
    range_ratio: float = Field(0.0, ge=0, lt=1)
    """Each request's own tokens and output tokens are drawn evenly from [n (1 - r), n (1 + r)]; 0 = all alike."""


class ShareGPTConfig(Config):
    """First questions and the lengths of their answers from a ShareGPT file, in random order."""

    path: str
    """JSON file: a list of {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}."""
    requests: int = Field(200, ge=1)
    """How many arrive."""
    rates: tuple[Rate, ...] = ()
    """Mean arrivals of a Poisson process, requests/s, each a run of its own; empty = all at once."""
    min_tokens: int = Field(4, ge=1)
    """Conversations with a shorter question or answer are left out."""


class TraceConfig(Config):
    """Requests as a file has them: recorded traffic, or the same prompts for several engines."""

    path: str
    """JSONL file: {"prompt_ids": [...], "output_tokens": n} a line, with "arrival" in seconds, "priority", "user",
    "cache_salt" and "adapter" where wanted."""
    speed: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Arrivals come so many times as fast as recorded."""
