"""Options of the app `generate`."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, JsonValue

from dovetail.core.compose import ENGINE_NODES, AppConfig
from dovetail.core.interfaces import Grammar


class GenerateConfig(AppConfig):
    """Complete prompts given after `--`, in a file or on stdin. A single prompt streams to the terminal."""

    needs: ClassVar[tuple[str, ...]] = ENGINE_NODES
    takes_prompts: ClassVar[bool] = True

    prompts: str | None = None
    """File of prompts: *.jsonl with {"prompt": ...} per line, else one prompt per line; "-" reads one from stdin."""
    output: str | None = None
    """Write results to this JSONL file, one line per prompt, in the order of the prompts. During the run they are in
    `<output>.partial`, each from its completion on."""
    resume: bool | None = None
    """Results of a run that did not end: true = keep them and complete the other prompts, false = discard them, null =
    refuse to start."""
    max_tokens: int = Field(160, ge=1)
    """Maximum number of output tokens per sample."""
    temperature: float = Field(0.0, ge=0.0)
    """0 = greedy."""
    top_k: int = Field(0, ge=0)
    """Keep the k most likely tokens; 0 = all."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Keep the smallest set of tokens whose total probability reaches this."""
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    """Drop tokens less likely than min_p times the most likely one."""
    repetition_penalty: float = Field(1.0, gt=0.0)
    """Values above 1 reduce repetition."""
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    """Subtracted once from the logit of each token in the output so far."""
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    """Subtracted from the logit of a token for each occurrence in the output so far."""
    n: int = Field(1, ge=1)
    """Samples per prompt."""
    adapter: str = ""
    """Name of an adapter in adapter.load; empty: the base model."""
    seed: int | None = None
    """Seed; the same seed gives the same text. null: engine.seed."""
    stop: tuple[str, ...] = ()
    """Strings that end the output."""
    grammar: Grammar | None = None
    """Constraint on every output, such as {kind: choice, value: [yes, no]}; null: free text."""
    ignore_eos: bool = False
    """Continue after the end-of-sequence token."""
    extra: dict[str, JsonValue] = Field(default_factory=dict)
    """Parameters of the chosen logits processors, by name."""
