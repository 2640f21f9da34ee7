"""The logits-processor seam: changes logits before sampling, for the requests that ask for it."""

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
    """Where each row of logits stands. N logits rows: one per sampled position, draft positions included."""

    slots_N: torch.Tensor
    """int64"""
    lengths_N: torch.Tensor
    """int64: tokens before the one to be sampled; drafts ahead of a draft position count."""
    tokens_SL: torch.Tensor
    """int32: tokens_SL[slot, :length] is that history, drafts included."""
    prompt_len_S: torch.Tensor
    """int64"""
    max_length: int
    """Host bound of lengths_N."""


class LogitsProcessor(ABC):
    """State lives in tensors with a row per slot, so that a step needs no Python per request.

    Beside the one on each rank there is one on the host, with a single slot on the CPU. It is asked about each request
    that arrives: `validate`, `wants`, and for those that want it a `join`. What one of these raises fails that request
    alone; later, in a step, it would end the engine.
    """

    serves: tuple[str, ...] = ()
    """Fields of SamplingParams that this processor carries out. A request that sets a field which no chosen processor
    serves is refused."""
    params: type[BaseModel] | None = None
    """Parameters of a request beyond SamplingParams: a pydantic model whose fields have defaults and names of their own
    among the chosen processors. A request gives them in `SamplingParams.extra`; `parameters` reads them."""
    graph_safe: bool = True
    """apply makes no host sync and no data-dependent shapes."""

    def __init__(self, config: object) -> None:
        self.config = config

    @abstractmethod
    def allocate(self, slots: int, vocab: int, device: torch.device) -> None:
        """Create the per-slot state."""

    def parameters(self, request: Request) -> Any:
        """An instance of `params` with what the request gave, checked as strictly as options are."""
        if self.params is None:
            raise TypeError(f"{type(self).__name__} declares no `params`")
        mine = {name: value for name, value in request.params.extra.items() if name in self.params.model_fields}
        return self.params.model_validate_json(json.dumps(mine), strict=True)

    def validate(self, request: Request, vocab: int) -> None:
        """Raise RequestError for what the request may not ask; its `parameters` are valid already. Pure; called on the
        host when the request arrives. `vocab` is the model's: a token id is below it."""

    @abstractmethod
    def wants(self, request: Request) -> bool:
        """Whether this request needs the processor. Pure; called on the host when the request arrives."""

    @abstractmethod
    def join(self, slot: int, request: Request) -> None:
        """A sequence takes the slot: of a request that wants the processor, or of one that does not, where the slot's
        state is another's (reset it)."""

    @abstractmethod
    def apply(self, logits_NV: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Changed logits (in place is fine). Rows of slots that do not want the processor must come out unchanged."""
