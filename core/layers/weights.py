"""Weight loading: each layer lists the checkpoint tensors it takes, and a source supplies tensors by name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch

from dovetail.core.checkpoint import LazyTensor
from dovetail.core.errors import ConfigError, shown

DUMMY_STD = 0.02


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...] | None = None
    """Shape of the whole tensor; None = known only to the quantizer."""
    init: Literal["normal", "ones", "zeros"] = "normal"
    """Values of dummy weights."""
    optional: bool = False


class Taker(Protocol):
    """One or several checkpoint tensors that a layer takes together."""

    @property
    def stored(self) -> tuple[Stored, ...]: ...
    def take_all(self, tensors: Mapping[str, LazyTensor]) -> object: ...


class Weight:
    """One checkpoint tensor that a layer takes. `take` copies this rank's part of it. The other arguments are those of
    Stored."""

    def __init__(
        self,
        name: str,
        take: Callable[[LazyTensor], object],
        shape: tuple[int, ...] | None = None,
        init: Literal["normal", "ones", "zeros"] = "normal",
    ) -> None:
        self.take = take
        self.stored = (Stored(name, shape, init),)

    def take_all(self, tensors: Mapping[str, LazyTensor]) -> None:
        self.take(tensors[self.stored[0].name])


@dataclass(frozen=True, slots=True)
class WeightSet:
    """Checkpoint tensors that a layer takes together, for instance packed codes and their scales."""

    stored: tuple[Stored, ...]
    take_all: Callable[[Mapping[str, LazyTensor]], object]
    """Receives the tensors by name; optional ones may be missing."""


def load_weights(
    weights: Iterable[Taker], source: Iterable[tuple[str, Callable[[], Any]]], ignore: tuple[str, ...] = ()
) -> None:
    """Pass the source's tensors to the layers, in the order of the source. Nothing is read before all names are known.
    Unexpected names that end in one of `ignore` are skipped."""
    takers = {stored.name: taker for taker in weights for stored in taker.stored}
    found: dict[str, Callable[[], Any]] = {}
    unexpected = []
    for name, opener in source:
        if name in takers:
            found[name] = opener
        elif not name.endswith(ignore):
            unexpected.append(name)
    wanted = {stored.name: stored for taker in takers.values() for stored in taker.stored}
    missing = [name for name, stored in wanted.items() if name not in found and not stored.optional]
    if missing or unexpected:
        raise ConfigError(
            "the checkpoint does not fit the model that its config.json describes: "
            f"{_listed('missing', missing)}; {_listed('unexpected', unexpected)}"
        )
    for taker in {id(takers[name]): takers[name] for name in found}.values():
        tensors = {stored.name: found[stored.name]() for stored in taker.stored if stored.name in found}
        for name, tensor in tensors.items():
            _check_shape(wanted[name], tensor)
        taker.take_all(tensors)


def dummy_weights(
    weights: Iterable[Taker], seed: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Callable[[], LazyTensor]]]:
    """Random tensors, made on the device. Each depends only on seed and name, so the model is the same for every tp."""
    for stored in (stored for taker in weights for stored in taker.stored if not stored.optional):
        if stored.shape is None:
            raise ConfigError(
                f"model.load=dummy: the shape of {stored.name} is known only from a checkpoint. Use quant=none"
            )
        yield stored.name, partial(DummyTensor, stored, seed, dtype, device)


class DummyTensor:
    """LazyTensor without a file. It makes the whole tensor each time it is sliced."""

    def __init__(self, stored: Stored, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self.stored, self.seed, self.dtype, self.device = stored, seed, dtype, device

    def get_shape(self) -> list[int]:
        return list(self.stored.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        whole = torch.empty(self.stored.shape, dtype=self.dtype, device=self.device)
        if self.stored.init == "normal":
            # Uniform with the same standard deviation: several times faster to draw than normal.
            whole.uniform_(-DUMMY_STD * 3**0.5, DUMMY_STD * 3**0.5, generator=self._generator())
        else:
            whole.fill_(1.0 if self.stored.init == "ones" else 0.0)
        return whole[index]

    def _generator(self) -> torch.Generator:
        digest = hashlib.blake2b(f"{self.seed}:{self.stored.name}".encode(), digest_size=7).digest()
        return torch.Generator(self.device).manual_seed(int.from_bytes(digest, "little"))


def _check_shape(stored: Stored, tensor: LazyTensor) -> None:
    shape = tuple(tensor.get_shape())
    if stored.shape is not None and shape != stored.shape:
        raise ConfigError(
            f"{stored.name} has shape {shown(shape)} in the checkpoint; config.json makes it {stored.shape}"
        )


def _listed(what: str, names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{len(names)} {what}" + (f" ({', '.join(map(shown, names[:5]))}{more})" if names else "")
