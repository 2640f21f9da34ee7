"""Weight loading: each layer lists the checkpoint tensors it takes, and a source supplies tensors by name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch

from dovetail.core.checkpoint import LazyTensor
from dovetail.core.errors import ConfigError, TensorError, shown
from dovetail.core.interfaces.checkpoint import Checkpoint, TensorHeader

DUMMY_STD = 0.02
PLAIN_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
STORED_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""TensorHeader.dtype -> dtype of the tensor that is read."""


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
    def check(self, headers: Mapping[str, TensorHeader]) -> None: ...
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

    def check(self, headers: Mapping[str, TensorHeader]) -> None:
        (stored,) = self.stored
        header = headers[stored.name]
        _check_shape(stored, header.shape)
        check_dtype(stored.name, header_dtype(stored.name, header), PLAIN_DTYPES)

    def take_all(self, tensors: Mapping[str, LazyTensor]) -> None:
        self.take(tensors[self.stored[0].name])


@dataclass(frozen=True, slots=True)
class WeightSet:
    """Checkpoint tensors that a layer takes together, for instance packed codes and their scales."""

    stored: tuple[Stored, ...]
    check: Callable[[Mapping[str, TensorHeader]], None]
    """Raises TensorError if the headers by name do not fit; optional tensors may be missing."""
    take_all: Callable[[Mapping[str, LazyTensor]], object]
    """Receives the tensors by name; optional ones may be missing."""


def load_weights(
    weights: Iterable[Taker],
    source: Iterable[tuple[str, Callable[[], Any]]],
    ignore: tuple[str, ...] = (),
    ignore_below: tuple[str, ...] = (),
) -> None:
    """Pass the source's tensors to the layers, in the order of the source. Nothing is read before all names are known.
    Unexpected names that end in one of `ignore` or begin with one of `ignore_below` are skipped."""
    takers = _by_name(weights)
    openers = dict(source)
    if differences := _differences(takers, openers, ignore, ignore_below):
        raise ConfigError(_unlike(*differences))
    for taker in {id(takers[name]): takers[name] for name in openers if name in takers}.values():
        tensors = {stored.name: openers[stored.name]() for stored in taker.stored if stored.name in openers}
        for stored in taker.stored:
            if stored.name in tensors:
                _check_shape(stored, tuple(tensors[stored.name].get_shape()))
        taker.take_all(tensors)


def check_headers(
    weights: Iterable[Taker],
    headers: Mapping[str, TensorHeader],
    checkpoint: Checkpoint,
    ignore: tuple[str, ...] = (),
    ignore_below: tuple[str, ...] = (),
) -> None:
    """Check names, shapes and dtypes as `load_weights` does, from headers alone. `headers`: those of `checkpoint`,
    under the names that the layers take. Raises ConfigError naming file and tensor."""
    takers = _by_name(weights)
    if differences := _differences(takers, headers, ignore, ignore_below):
        missing, unexpected = differences
        beside = {name.rpartition(".")[0]: header.file for name, header in headers.items()}
        files = [beside.get(name.rpartition(".")[0], checkpoint.path) for name in missing]
        files += [headers[name].file for name in unexpected]
        raise ConfigError(f"{shown(files[0])}: {_unlike(missing, unexpected)}")
    for taker in {id(taker): taker for taker in takers.values()}.values():
        found = {stored.name: headers[stored.name] for stored in taker.stored if stored.name in headers}
        if found:
            try:
                taker.check(found)
            except TensorError as error:
                raise ConfigError(f"{shown(headers[error.name].file)}: {error}") from None


def check_tied(openers: Mapping[str, Callable[[], LazyTensor]], embedding: str, head: str) -> None:
    """Compare some rows of the embedding and of a matrix of logits in the checkpoint of a model whose logits use the
    embedding. Raises TensorError if they differ: the model has no use for that matrix, and transformers uses it."""
    if embedding not in openers or head not in openers:
        return
    tables = openers[embedding](), openers[head]()
    shape, other = (list(table.get_shape()) for table in tables)
    if shape != other or len(shape) != 2:
        return
    for row in range(0, shape[0], max(1, shape[0] // _TIED_ROWS)):
        one, two = (table[row : row + 1] for table in tables)
        if one.dtype == two.dtype and one.dtype in PLAIN_DTYPES and not torch.allclose(one, two, equal_nan=True):
            raise TensorError(
                head,
                f"differs from {shown(embedding)}, and config.json ties them. Set tie_word_embeddings=false there to "
                "use both, or remove the tensor",
            )


_TIED_ROWS = 64
"""Rows of tied matrices that are compared. Matrices that are trained apart differ in all rows."""


def _by_name(weights: Iterable[Taker]) -> dict[str, Taker]:
    return {stored.name: taker for taker in weights for stored in taker.stored}


def _differences(
    takers: Mapping[str, Taker],
    found: Mapping[str, object],
    ignore: tuple[str, ...],
    ignore_below: tuple[str, ...],
) -> tuple[list[str], list[str]] | None:
    """Return the names of missing and of unexpected tensors; None = there are none."""
    needed = {stored.name for taker in takers.values() for stored in taker.stored if not stored.optional}
    missing = [name for name in takers if name in needed and name not in found]
    kept = (name for name in found if not name.endswith(ignore) and not name.startswith(ignore_below))
    unexpected = [name for name in kept if name not in takers]
    return (missing, unexpected) if missing or unexpected else None


def _unlike(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    return (
        "the checkpoint does not fit the model that its config.json describes: "
        f"{_listed('missing', missing)}; {_listed('unexpected', unexpected)}"
    )


def header_dtype(name: str, header: TensorHeader) -> torch.dtype:
    """Return the dtype of a header. Raises TensorError for one that torch lacks."""
    if header.dtype not in STORED_DTYPES:
        raise TensorError(name, f"has the dtype {shown(header.dtype)}; there are {', '.join(STORED_DTYPES)}")
    return STORED_DTYPES[header.dtype]


def check_dtype(name: str, dtype: torch.dtype, allowed: tuple[torch.dtype, ...]) -> None:
    if dtype not in allowed:
        names = " or ".join(str(option).removeprefix("torch.") for option in allowed)
        raise TensorError(name, f"is {str(dtype).removeprefix('torch.')} in the checkpoint; it must be {names}")


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


def _check_shape(stored: Stored, shape: tuple[int, ...]) -> None:
    if stored.shape is not None and shape != stored.shape:
        raise TensorError(
            stored.name, f"has shape {shown(shape)} in the checkpoint; config.json makes it {stored.shape}"
        )


def _listed(what: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{len(names)} {what}" + (f" ({', '.join(map(shown, names[:5]))}{more})" if names else "")
