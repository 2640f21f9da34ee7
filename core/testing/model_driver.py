"""Driver that runs a model without the engine; it builds pages and step metadata itself.

Shapes: T tokens of the step, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dovetail.core.interfaces import (
    Adapters,
    AttentionBackend,
    BuildContext,
    Collective,
    ExpertPlacement,
    ForwardContext,
    Hidden,
    Model,
    ModelSpec,
    Quantizer,
)
from dovetail.core.interfaces.collective import Alone
from dovetail.core.testing.paging import Paging

__all__ = ["PAGES", "Alone", "Driver", "Lazy", "build_context"]

PAGES = 300


def build_context(
    spec: ModelSpec,
    *,
    quantizer: Quantizer | None = None,
    attention: AttentionBackend | None = None,
    collective: Collective | None = None,
    adapters: Adapters | None = None,
    placement: ExpertPlacement | None = None,
    dtype: torch.dtype = torch.float32,
    page_tokens: int = 8,
    max_len: int = 512,
    device: str | torch.device = "cpu",
) -> BuildContext:
    """Return what the engine gives a model, with attention=sdpa and quant=none as defaults."""
    from dovetail.core.testing.reference import build

    return BuildContext(
        spec=spec,
        device=torch.device(device),
        dtype=dtype,
        kv_dtype=dtype,
        page_tokens=page_tokens,
        max_len=max_len,
        quantizer=quantizer or build("quant", "none"),
        attention=attention or build("attention", "sdpa"),
        collective=collective or Alone(None),
        adapters=adapters,
        placement=placement,
    )


class Lazy:
    """Checkpoint tensor that offers only its shape and slices, as a safetensors slice does."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._tensor[index].clone()


class Driver:
    """Model with named sequences. Pages are shuffled and hold NaN at first, so that a wrong page or mask shows."""

    def __init__(self, model: Model, seed: int = 0, pages: int = PAGES) -> None:
        self.model, self.device = model, model.build.device
        self.forward: Callable[[torch.Tensor, ForwardContext, tuple[int, ...]], Hidden] = model.forward
        """Function that runs the layers."""
        self.paging = Paging(model.kv_groups, self.device, pages=pages, rng=random.Random(seed))
        model.build.attention.bind(self.paging.pools)
        self.hidden: Hidden
        """Output of the last step, padding included."""

    @torch.inference_mode()
    def step(
        self,
        rows: Sequence[tuple[str, Sequence[int]]],
        num_decode: int = 0,
        slack: int = 0,
        padding: int = 0,
        taps: tuple[int, ...] = (),
        gap: int = 0,
    ) -> list[torch.Tensor]:
        """Feed each row's tokens and return logits_TV of each row. The first num_decode rows are decode rows.

        `slack` makes the host's bounds loose; `padding` adds tokens that belong to no row; `gap` shifts positions
        relative to cache indices.
        """
        counts = [len(tokens) for _, tokens in rows]
        named = [(name, count) for (name, _), count in zip(rows, counts, strict=True)]
        step = self.paging.step(named, num_decode=num_decode, slack=slack, padding=padding, gap=gap)
        attention = self.model.build.attention
        planned = attention.plan_host(step.host)
        attn = {id: attention.plan_device(meta, step.host, planned) for id, meta in step.metas.items()}
        flat = [token for _, tokens in rows for token in tokens] + [0] * padding
        tokens_T = torch.tensor(flat, dtype=torch.int32, device=self.device)
        live_T = torch.arange(len(flat), device=self.device) < sum(counts)
        self.hidden = self.forward(self.model.embed(tokens_T), ForwardContext(step.positions_T, attn, live_T), taps)
        return list(self.model.logits(self.hidden.states[: sum(counts)]).split(counts))
