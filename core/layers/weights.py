"""Weight loading: each layer lists the checkpoint tensors it takes, and a source supplies tensors by name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from dovetail.core.checkpoint import LazyTensor
from dovetail.core.errors import ConfigError, shown

DUMMY_STD = 0.02


@dataclass(frozen=True, slots=True)
class Weight:
    """One checkpoint tensor that a layer takes."""

    name: str
    take: Callable[[LazyTensor], object]
    """Copies this rank's part of the tensor."""
    shape: tuple[int, ...] | None = None
    """Shape of the whole tensor; None = known only to the quantizer."""
    init: Literal["normal", "ones", "zeros"] = "normal"
    """Values of dummy weights."""


def load_weights(
    weights: Iterable[Weight], source: Iterable[tuple[str, Callable[[], Any]]], ignore: tuple[str, ...] = ()
) -> None:
    """Pass each tensor of the source to its layer. Unexpected names that end in one of `ignore` are skipped."""
    wanted = {weight.name: weight for weight in weights}
    missing, unexpected = dict.fromkeys(wanted), []
    for name, opener in source:
        if name in wanted:
            missing.pop(name, None)
            _take(wanted[name], opener())
        elif not name.endswith(ignore):
            unexpected.append(name)
    if missing or unexpected:
        raise ConfigError(
            "the checkpoint does not fit the model that its config.json describes: "
            f"{_listed('missing', missing)}; {_listed('unexpected', unexpected)}"
        )


def dummy_weights(
    weights: Iterable[Weight], seed: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Callable[[], LazyTensor]]]:
    """Random tensors, made on the device. Each depends only on seed and name, so the model is the same for every tp."""
    for weight in weights:
        if weight.shape is None:
            raise ConfigError(
                f"model.load=dummy: the shape of {weight.name} is known only from a checkpoint. Use quant=none"
            )
        yield weight.name, partial(DummyTensor, weight, seed, dtype, device)


class DummyTensor:
    """LazyTensor without a file. It makes the whole tensor each time it is sliced."""

    def __init__(self, weight: Weight, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self.weight, self.seed, self.dtype, self.device = weight, seed, dtype, device

    def get_shape(self) -> list[int]:
        return list(self.weight.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        whole = torch.empty(self.weight.shape, dtype=self.dtype, device=self.device)
        if self.weight.init == "normal":
            # Uniform with the same standard deviation: several times faster to draw than normal.
            whole.uniform_(-DUMMY_STD * 3**0.5, DUMMY_STD * 3**0.5, generator=self._generator())
        else:
            whole.fill_(1.0 if self.weight.init == "ones" else 0.0)
        return whole[index]

    def _generator(self) -> torch.Generator:
        digest = hashlib.blake2b(f"{self.seed}:{self.weight.name}".encode(), digest_size=7).digest()
        return torch.Generator(self.device).manual_seed(int.from_bytes(digest, "little"))


def _take(weight: Weight, tensor: LazyTensor) -> None:
    shape = tuple(tensor.get_shape())
    if weight.shape is not None and shape != weight.shape:
        raise ConfigError(
            f"{weight.name} has shape {shown(shape)} in the checkpoint; config.json makes it {weight.shape}"
        )
    weight.take(tensor)


def _listed(what: str, names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{len(names)} {what}" + (f" ({', '.join(map(shown, names[:5]))}{more})" if names else "")
