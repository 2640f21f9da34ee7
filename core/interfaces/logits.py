"""Logits-processor contract: changes logits before sampling, for the requests that ask for it."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel

    from dovetail.core.interfaces.records import Request


@dataclass(slots=True)
class LogitsContext:
    """History of each row of logits. Shapes: N sampled positions (draft positions included), S slots, L tokens."""

    slots_N: torch.Tensor
    """int64"""
    lengths_N: torch.Tensor
    """int64: number of tokens before the one to sample, including drafts that precede a draft position."""
    tokens_SL: torch.Tensor
    """int32: tokens_SL[slot, :length] is that history, drafts included."""
    prompt_len_S: torch.Tensor
    """int64: prompt length of each slot's request."""
    max_length: int
    """Upper bound of lengths_N, known on the host."""


class LogitsProcessor(ABC):
    """Keeps its state in tensors with one row per slot, so that a step needs no Python per request.

    In addition to the instance on each rank there is one on the host, with a single slot on the CPU. It checks each
    arriving request: `validate`, `wants`, and then `join` if wanted. An exception there fails only that request. An
    exception in a step ends the engine.
    """

    serves: tuple[str, ...] = ()
    """Fields of SamplingParams that it implements. A request for a field that no selected one serves is rejected."""
    params: type[BaseModel] | None = None
    """Additional request parameters: a pydantic model whose fields all have defaults and names that are unique among
    the selected processors. Requests set them in `SamplingParams.extra`; `parameters` reads them."""
    graph_safe: bool = False
    """Whether CUDA graphs may capture apply: its operations, their shapes and the addresses of the state that it reads
    are the same in every step, whatever joined meanwhile. It is then captured with the longest possible `max_length`,
    and also runs in steps in which rows want other processors only. Steps in which a row wants a processor that is not
    graph_safe launch each kernel of the sampling half from the host."""

    def __init__(self, config: object) -> None:
        self.config = config

    @abstractmethod
    def allocate(self, slots: int, vocab: int, device: torch.device) -> None:
        """Create the per-slot state."""

    def parameters(self, request: Request) -> Any:
        """Return an instance of `params` with the request's values, validated as strictly as config options."""
        if self.params is None:
            raise TypeError(f"{type(self).__name__} declares no `params`")
        mine = {name: value for name, value in request.params.extra.items() if name in self.params.model_fields}
        return self.params.model_validate_json(json.dumps(mine), strict=True)

    def validate(self, request: Request, vocab: int) -> None:
        """Raise RequestError if the request's values are not allowed. `parameters` is already valid, and token ids are
        below `vocab`, the model's vocabulary. Pure; called on the host when the request arrives."""

    @abstractmethod
    def wants(self, request: Request) -> bool:
        """Whether this request uses the processor. Pure; called on the host when the request arrives."""

    @abstractmethod
    def join(self, slot: int, request: Request) -> None:
        """Set the slot's state for a sequence that takes it. Also called for a request that does not want the
        processor, if the slot holds the state of another request: reset it."""

    @abstractmethod
    def apply(self, logits_NV: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Return the logits, changed in place or not, without waiting for the device. Rows whose request does not want
        the processor stay unchanged."""
