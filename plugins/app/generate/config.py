"""Options of the app `generate`."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, JsonValue

from dovetail.core.compose import ENGINE_NODES, AppConfig
from dovetail.core.interfaces import Grammar


class GenerateConfig(AppConfig):
    """Complete prompts: those after `--`, or of a file, or of stdin. One prompt streams to the terminal."""

    needs: ClassVar[tuple[str, ...]] = ENGINE_NODES
    takes_prompts: ClassVar[bool] = True

    prompts: str | None = None
    """File of prompts: *.jsonl with {"prompt": ...} a line, else one prompt a line; "-" reads one prompt from stdin."""
    output: str | None = None
    """Write results to this JSONL file, one line a prompt in the order of prompts."""
    max_tokens: int = Field(160, ge=1)
    """Output tokens per sample, at most."""
    temperature: float = Field(0.0, ge=0.0)
    """0 = greedy."""
    top_k: int = Field(0, ge=0)
    """Keep the k most likely tokens; 0 = all."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Keep the smallest set of tokens with this probability."""
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    """Drop tokens less likely than min_p times the most likely one."""
    repetition_penalty: float = Field(1.0, gt=0.0)
    """Above 1: less repetition."""
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    """Taken once from every token of the output so far."""
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    """Taken per occurrence in the output so far."""
    n: int = Field(1, ge=1)
    """Samples per prompt."""
    adapter: str = ""
    """One of adapter.load, by name; empty: the base model."""
    seed: int | None = None
    """Same seed, same text; null: engine.seed."""
    stop: tuple[str, ...] = ()
    """Strings that end the output."""
    grammar: Grammar | None = None
    """The form of every output, such as {kind: choice, value: [yes, no]}; null: free."""
    ignore_eos: bool = False
    """Go on past the end-of-sequence token."""
    extra: dict[str, JsonValue] = Field(default_factory=dict)
    """Parameters of chosen logits processors, by name."""
