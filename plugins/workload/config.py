"""Options of the built-in workloads."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dovetail.core.compose import Config

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
