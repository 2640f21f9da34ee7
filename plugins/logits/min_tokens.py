"""min_tokens: end-of-sequence and stop tokens are masked until the output has this many tokens."""

from __future__ import annotations

import torch

from dovetail.core.errors import RequestError
from dovetail.core.interfaces import LogitsContext, LogitsProcessor, Request
from dovetail.plugins.logits.ragged import SparseRows

MOST_STOPS = 256
"""End-of-sequence and stop tokens of a request; at most 64 are stop tokens."""


class MinTokens(LogitsProcessor):
    serves = ("min_tokens",)
    graph_safe = True

    def allocate(self, slots: int, vocab: int, device: torch.device) -> None:
        self.stops = SparseRows(slots, MOST_STOPS, device)

    def validate(self, request: Request, vocab: int) -> None:
        if self.wants(request) and len(request.stop_ids) > MOST_STOPS:
            raise RequestError(
                f"min_tokens: the request has {len(request.stop_ids)} end-of-sequence and stop tokens, "
                f"and at most {MOST_STOPS} can be masked"
            )

    def wants(self, request: Request) -> bool:
        return request.params.min_tokens > 0 and bool(request.stop_ids)

    def join(self, slot: int, request: Request) -> None:
        stops = request.stop_ids if self.wants(request) else ()
        until = len(request.prompt_ids) + request.params.min_tokens
        self.stops.set(slot, dict.fromkeys(stops, float("-inf")), until)

    def apply(self, logits_NV: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        return self.stops.add(logits_NV, ctx)
