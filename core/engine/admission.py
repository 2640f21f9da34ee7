"""What the chosen logits processors say to a request, asked on the host when it arrives: what one of them raises here
fails that request alone. In a step it would end the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from pydantic import ValidationError

from dovetail.core.compose import Selected
from dovetail.core.compose.wording import did_you_mean, listing
from dovetail.core.errors import CapabilityError, PluginError, RequestError
from dovetail.core.interfaces import LogitsProcessor, Request, SamplingParams

PROCESSED = {"repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens"}
"""Fields of SamplingParams that logits processors carry out."""


class Admission:
    def __init__(self, parts: Mapping[str, Selected], vocab: int) -> None:
        self._parts, self._vocab = parts, vocab
        self._processors: dict[str, LogitsProcessor] = {name: part.build() for name, part in parts.items()}
        self._served = {field for processor in self._processors.values() for field in processor.serves}
        self._owners = self._parameter_owners()
        for name, processor in self._processors.items():
            with parts[name].registered.blamed("could not allocate a slot"):
                processor.allocate(1, vocab, torch.device("cpu"))

    def _parameter_owners(self) -> dict[str, str]:
        """Name of a parameter in SamplingParams.extra -> the processor that has it."""
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

    def admit(self, request: Request) -> Request:
        """The request, with the processors that it wants. RequestError where it asks for what they cannot do;
        PluginError where one of them fails on it."""
        self._check_served(request.params)
        self._check_names(request.params)
        wanted = []
        for name, processor in self._processors.items():
            with self._parts[name].registered.blamed("failed on a request"):
                self._check_values(processor, request)
                processor.validate(request, self._vocab)
                if processor.wants(request):
                    processor.join(0, request)  # rehearsed: every rank does the same when the request enters
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
            faults = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False))
            raise RequestError(f"extra: {'; '.join(faults)}") from error
