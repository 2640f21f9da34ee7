"""Weights of a model: from its checkpoint, or random."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from dovetail.core.checkpoint import located
from dovetail.core.interfaces import BuildContext, ModelSource, Progress, Quantizer
from dovetail.core.worker.weight_check import WeightCheck


class Filled(Protocol):
    """A model, or the layers of a drafter: what weights are loaded into. Its methods are those of Model."""

    build: BuildContext

    def load(self, weights: Iterable[tuple[str, Callable[[], Any]]]) -> None: ...
    def init_dummy(self, seed: int) -> None: ...


def read_headers(quantizer: Quantizer, source: ModelSource) -> None:
    """Let the quantizer read the headers of the weights. Uses no device, so that what the headers show to be wrong is
    refused first."""
    if source.weights is not None:
        source.weights.tensors()
        with located(source.weights):
            quantizer.read_checkpoint(source.weights)


def fill(model: Filled, source: ModelSource, seed: int = 0, progress: Progress = lambda phase, share: None) -> None:
    """Load the weights, or make dummies from `seed`."""
    progress("load weights", 0.0)
    if source.weights is None:
        model.init_dummy(seed)
        return
    weights = list(source.weights.open())
    check = WeightCheck(model.build.device, model.build.dtype)

    opened = itertools.count(1)

    def counted(opener: Callable[[], Any]) -> Any:
        progress("load weights", min(next(opened) / len(weights), 1.0))
        return opener()

    with located(source.weights):
        model.load((name, check.watch(name, partial(counted, opener))) for name, opener in weights)
    check.finish(source.weights)
