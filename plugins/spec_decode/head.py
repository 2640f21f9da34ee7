"""Layers of a drafter that is trained for one target: what its weights have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from dovetail.core.checkpoint import located
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import BuildContext, Bundle, ModelSource, TargetView
from dovetail.core.layers import Linear, Taker, check_headers, dummy_weights, load_weights
from dovetail.core.layers.linear import Part
from dovetail.core.ops import encode


class Head(ABC):
    """Layers with weights of their own. Embedding and, unless it has its own, logits are the target's."""

    ignored: tuple[str, ...] = ("embed_tokens.weight",)
    """Ends of names of published tensors that have no use; the embedding is a copy of the target's."""

    def __init__(self, build: BuildContext) -> None:
        self.build = build

    @abstractmethod
    def linears(self) -> Iterator[Linear]:
        """Yield the linear layers."""

    @abstractmethod
    def others(self) -> Iterator[Taker]:
        """Yield the tensors of all other layers."""

    def weights(self) -> Iterator[Taker]:
        for linear in self.linears():
            yield from linear.weights()
        yield from self.others()

    def load(self, weights: Iterable[tuple[str, Callable[[], Any]]]) -> None:
        """Model.load"""
        load_weights(self.weights(), weights, self.ignored)
        for linear in self.linears():
            linear.finish()

    def init_dummy(self, seed: int) -> None:
        """Model.init_dummy"""
        self.load(dummy_weights(self.weights(), seed, self.build.dtype, self.build.device))


def check_tensors(head: Head, source: ModelSource) -> None:
    """Compare the headers of the files with what the head loads. Raises ConfigError naming file and tensor."""
    if source.weights is not None:
        with located(source.weights):
            check_headers(head.weights(), source.weights.tensors(), source.weights, head.ignored)


def replicated(name: str, build: BuildContext, inp: int, out: int, bias: bool = False) -> Linear:
    """Return a linear layer that every rank has whole."""
    return Linear(name, build, (Part(name, out, 0, out),), inp, bias=bias)


def apply(linear: Linear, x_TC: torch.Tensor) -> torch.Tensor:
    """Multiply a plain activation."""
    return linear(encoded(linear, x_TC))


def encoded(linear: Linear, x_TC: torch.Tensor) -> Bundle:
    """Return a plain activation in the format that the layer reads."""
    return encode(x_TC, linear.inputs)


def check_head(name: str, hidden: int, vocab: int, target: TargetView) -> None:
    """Raise ConfigError for a head that was made for another target."""
    spec = target.build.spec
    for what, found, wanted in (("hidden size", hidden, spec.hidden), ("vocabulary", vocab, spec.vocab)):
        if found != wanted:
            raise ConfigError(
                f"spec_decode={name}: the head was made for a model with a {what} of {found}, and this model has "
                f"{wanted}: set spec_decode.path to a head of this model"
            )
