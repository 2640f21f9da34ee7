"""Validates what a caller asks for and builds the request's sequences."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import fields, replace
from typing import TYPE_CHECKING

import torch
from pydantic import ValidationError

from dovetail.core.compose import Selected
from dovetail.core.compose.wording import did_you_mean, listing
from dovetail.core.errors import CapabilityError, PluginError, RequestError
from dovetail.core.interfaces import (
    LogitsProcessor,
    ModelSpec,
    Pooling,
    Request,
    RequestOptions,
    SamplingParams,
    Sequence,
)
from dovetail.core.interfaces.request_values import faults, token_ids

if TYPE_CHECKING:
    from dovetail.core.compose import Composition

_EMBEDDING_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)
"""Parameters of a prompt that is embedded. To the scheduler it ends with its first token, which is never sampled."""

_OPTIONS = tuple(field.name for field in fields(RequestOptions))


class RequestBuilder:
    def __init__(self, composition: Composition, spec: ModelSpec, max_len: int, longest: int | None = None) -> None:
        """`longest`: maximum length of a sequence without max_tokens; None = `max_len`."""
        self._longest = max_len if longest is None else longest
        self._composition, self._spec, self._max_len = composition, spec, max_len
        processors = composition.many("logits") if "logits" in composition.parts else {}
        self._processors = ProcessorTable(processors, spec.vocab)
        self._next = 0

    def sequences(
        self,
        prompt_ids: Seq[int],
        params: SamplingParams,
        options: RequestOptions,
        *,
        number: int | None = None,
        arrival: float = 0.0,
    ) -> list[Sequence]:
        """Build the sequences of a new request, one per sample. `number` identifies the request; None = the next one.
        `arrival`: seconds of the engine's clock.
        Raises RequestError for what can never run, PluginError if a logits processor fails on the request."""
        request = self.request(prompt_ids, params, options, number=number, arrival=arrival)
        self._next = max(self._next, request.uid + 1)
        params = request.params
        if params.max_tokens is None:
            # The output ends where the KV cache does. A prompt that leaves no room is refused by the scheduler.
            limit = min(self._max_len, max(self._longest, len(request.prompt_ids) + 1))
        else:
            limit = min(self._max_len, len(request.prompt_ids) + params.max_tokens)
        found: list[Sequence] = []
        for sample in range(params.n):
            parent = found[0] if sample else None
            found.append(Sequence(request.uid << 8 | sample, request, sample, parent, limit=limit))
        return found

    def request(
        self,
        prompt_ids: Seq[int],
        params: SamplingParams,
        options: RequestOptions,
        *,
        number: int | None = None,
        arrival: float = 0.0,
    ) -> Request:
        """Check a request as `sequences` does."""
        if options.pooling is not None:
            params = _EMBEDDING_PARAMS
        ids = token_ids(prompt_ids)
        self._validate(ids, params, options.pooling)
        request = Request(
            uid=self._next if number is None else number,
            prompt_ids=ids,
            params=params,
            eos_ids=() if params.ignore_eos else self._spec.eos_ids,
            arrival=arrival,
            **{name: getattr(options, name) for name in _OPTIONS},
        )
        return self._processors.select(request)

    def _validate(self, prompt_ids: Seq[int], params: SamplingParams, pooling: Pooling | None) -> None:
        spec, vocab, limit = self._spec, self._spec.vocab, self._max_len
        if not prompt_ids:
            raise RequestError("the prompt is empty: give at least one token (most models take their BOS token)")
        if len(prompt_ids) >= limit:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens and the context is {limit} (engine.max_len): shorten it"
            )
        outside = [t for t in (min(prompt_ids), max(prompt_ids)) if not 0 <= t < vocab]
        if outside:
            raise RequestError(f"prompt token id {outside[0]} is not in the model's vocabulary of {vocab}")
        if pooling is None and not spec.head:
            raise RequestError(f"this {spec.architecture} has no head: it embeds text and generates none")
        if params.grammar is not None and "grammar" not in self._composition.parts:
            raise RequestError(f"grammar: app={self._composition.app} was composed without the part `grammar`")
        for what in ("logit_bias", "stop_token_ids", "prediction"):
            wrong = [t for t in getattr(params, what) if t >= vocab]
            if wrong:
                raise RequestError(f"{what}: token id {wrong[0]} is not in the model's vocabulary of {vocab}")
        for what, top in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if top is not None and top > vocab:
                raise RequestError(f"{what}={top}: the model's vocabulary has only {vocab} tokens")


PROCESSED = {"repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens"}
"""Fields of SamplingParams that logits processors implement."""


class ProcessorTable:
    """The chosen logits processors. Checks each new request against them."""

    def __init__(self, parts: Mapping[str, Selected], vocab: int) -> None:
        self._parts, self._vocab = parts, vocab
        self._processors: dict[str, LogitsProcessor] = {name: part.build() for name, part in parts.items()}
        self._served = {field for processor in self._processors.values() for field in processor.serves}
        self._owners = self._parameter_owners()
        for name, processor in self._processors.items():
            with parts[name].registered.blamed("could not allocate a slot"):
                processor.allocate(1, vocab, torch.device("cpu"))

    def _parameter_owners(self) -> dict[str, str]:
        """Return (parameter in SamplingParams.extra -> name of the processor that declares it)."""
        owners: dict[str, str] = {}
        for name, processor in self._processors.items():
            if processor.params is None:
                continue
            with self._parts[name].registered.blamed("has request parameters without defaults"):
                processor.params()
            for field in processor.params.model_fields:
                if field in SamplingParams.model_fields:
                    reason = f"logits={name}: its request parameter `{field}` has the name of a sampling parameter"
                    raise PluginError(str(self._parts[name].package), reason)
                if (other := owners.setdefault(field, name)) != name:
                    raise CapabilityError(
                        [f"logits={other} and logits={name} both have a request parameter `{field}`: leave one out"]
                    )
        return owners

    def select(self, request: Request) -> Request:
        """Return the request with the processors that it uses. Raises RequestError for parameters that no processor
        serves or accepts, PluginError if a processor fails."""
        self._check_served(request.params)
        self._check_names(request.params)
        wanted = []
        for name, processor in self._processors.items():
            with self._parts[name].registered.blamed("failed on a request"):
                self._check_values(processor, request)
                processor.validate(request, self._vocab)
                if processor.wants(request):
                    processor.join(0, request)  # a trial: every rank does the same when the request enters
                    wanted.append(name)
        return replace(request, processors=tuple(wanted))

    def _check_served(self, params: SamplingParams) -> None:
        for field in sorted(PROCESSED - self._served):
            value = getattr(params, field)
            if value != SamplingParams.model_fields[field].get_default(call_default_factory=True):
                raise RequestError(f"{field}={value}: no chosen logits processor serves it; add one to logits=[...]")

    def _check_names(self, params: SamplingParams) -> None:
        for name in params.extra:
            if name not in self._owners:
                there = f"There are: {listing(self._owners)}." if self._owners else "None of them has any."
                meant = did_you_mean(name, self._owners)
                raise RequestError(f"extra: no chosen logits processor has a parameter `{name}`.{meant} {there}")

    @staticmethod
    def _check_values(processor: LogitsProcessor, request: Request) -> None:
        if processor.params is None:
            return
        try:
            processor.parameters(request)
        except ValidationError as error:
            raise RequestError(f"extra: {faults(error)}") from error


def salted(given: str, adapter: str) -> str:
    """Return the salt of the prefix cache. Adapters never share pages, whatever salt a client gives."""
    return f"{adapter}\0{given}" if adapter or "\0" in given else given
