"""Whole rows of prompt logits, for measurements in the process of rank 0: a step's result has no room for them.

Shapes: N rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

Receive = Callable[[Sequence[int], int, torch.Tensor], None]
"""receive(prompt ids, position, logits_NV): logits that follow the N prompt tokens from `position` on. Called in the
engine's thread; the tensor is valid only during the call. A preempted prompt is received again."""

_receivers: list[Receive] = []


@contextmanager
def receiving(receive: Receive) -> Iterator[None]:
    """Pass on the logits of every prompt with `SamplingParams.prompt_logprobs`, from any engine of this process."""
    _receivers.append(receive)
    try:
        yield
    finally:
        _receivers.remove(receive)


def send(prompt_ids: Sequence[int], position: int, logits_NV: torch.Tensor) -> None:
    for receive in _receivers:
        receive(prompt_ids, position, logits_NV)
