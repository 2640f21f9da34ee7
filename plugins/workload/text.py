"""Workload of prompts cut from a text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cached_property

from dovetail.core.errors import ConfigError
from dovetail.core.held_out import held_out_texts
from dovetail.core.interfaces import SamplingParams, TimedRequest, Workload, WorkloadContext
from dovetail.plugins.workload.config import TextConfig
from dovetail.plugins.workload.files import read
from dovetail.plugins.workload.synthetic import check_length


class Text(Workload):
    config: TextConfig

    def requests(self, ctx: WorkloadContext) -> Sequence[TimedRequest]:
        config, rng = self.config, random.Random(ctx.seed)
        begin, ids = self._ids(ctx)
        check_length("text", len(begin) + config.prompt_tokens, config.output_tokens, ctx)
        if len(ids) < config.prompt_tokens:
            raise ConfigError(f"workload.prompt_tokens={config.prompt_tokens}: the text has only {len(ids)} tokens")
        sampling = SamplingParams(**config.sampling)
        starts = (rng.randint(0, len(ids) - config.prompt_tokens) for _ in range(config.requests))
        return [
            TimedRequest((*begin, *ids[at : at + config.prompt_tokens]), config.output_tokens, sampling=sampling)
            for at in starts
        ]

    @cached_property
    def _text(self) -> str:
        if self.config.path is not None:
            return read(self.config.path)
        return "\n".join(held_out_texts("workload.path is not set, and the default text"))

    def _ids(self, ctx: WorkloadContext) -> tuple[tuple[int, ...], Sequence[int]]:
        """Return the tokens with which the tokenizer begins a text, such as BOS, and those of the text."""
        try:
            begin, ids = tuple(ctx.encode("")), ctx.encode(self._text)
        except ValueError as error:
            raise ConfigError(f"workload=text has text: {error}; use a model folder with tokenizer.json") from None
        return (begin, ids[len(begin) :]) if tuple(ids[: len(begin)]) == begin else ((), ids)
