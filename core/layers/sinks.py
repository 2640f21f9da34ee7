"""Attention sinks: a learned score of each head, which counts in the softmax's sum alone (gpt-oss, 2025). Shapes: H
query heads."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dovetail.core.checkpoint import LazyTensor
from dovetail.core.interfaces import BuildContext
from dovetail.core.layers.weights import Weight


class Sinks:
    """This rank's scores, which AttentionLayer.sinks takes."""

    def __init__(self, name: str, build: BuildContext, local: int) -> None:
        """`local`: number of this rank's query heads."""
        self.name, self.heads = name, local * build.collective.size
        self.first = local * build.collective.rank
        self.values_H = torch.zeros(local, dtype=torch.float32, device=build.device)

    def weights(self) -> Iterator[Weight]:
        def take(lazy: LazyTensor) -> None:
            self.values_H.copy_(lazy[self.first : self.first + len(self.values_H)])

        yield Weight(self.name, take, (self.heads,), "zeros")
