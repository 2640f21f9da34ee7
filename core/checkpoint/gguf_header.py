"""Parser of GGUF headers: metadata and the table of tensors (ggml-org, docs/gguf.md, versions 2 and 3).

The package `gguf` states the block sizes of formats. Its GGUFReader is not used: it makes several arrays of each of
the vocabulary's strings, which takes seconds, and it does not check the table against the size of the file.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.core.errors import ConfigError, shown

MAGIC = b"GGUF"
PLAIN = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8")
"""Types of single values. Their names are also those of safetensors."""
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MOST_DIMENSIONS = 4
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Number of a metadata type -> its format in struct."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file."""

    file: Path
    type: str
    """Name of the GGUF type, such as "F32" or "Q4_K"."""
    shape: tuple[int, ...]
    """Logical shape, rows first."""
    row_bytes: int
    """Bytes of the last axis."""
    offset: int
    """Position of the first byte in the file."""

    @property
    def plain(self) -> bool:
        return self.type in PLAIN


@dataclass(frozen=True, slots=True)
class Header:
    """Content of one file but the values of its tensors."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Stored]
    """GGUF name -> tensor."""


def has_magic(path: Path) -> bool:
    """Whether a file begins as GGUF files do."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_header(path: Path) -> Header:
    """Raises ConfigError naming the file, and the tensor for a type that is unknown or values that are cut off."""
    with path.open("rb") as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Parser(path, data).header()
        except (struct.error, ValueError, UnicodeDecodeError, OSError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{shown(path)}: the GGUF header is truncated or damaged ({shown(error)})") from None


class _Parser:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0

    def header(self) -> Header:
        magic, version, tensors, entries = self._values("4sIQQ")
        if magic != MAGIC or version not in _VERSIONS:
            raise ConfigError(
                f"{shown(self._path)}: GGUF version {version}, in little-endian order; versions 2 and 3 are read"
            )
        metadata = {}
        for _ in range(entries):
            key = self._string()
            metadata[key] = self._value(self._values("I")[0])
        table = [self._tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ConfigError(f"{shown(self._path)}: general.alignment is {shown(alignment)}")
        start = -(-self._at // alignment) * alignment
        found: dict[str, Stored] = {}
        for name, dims, number, offset in table:
            if name in found:
                raise ConfigError(f"{shown(self._path)}: tensor {shown(name)} is listed twice")
            found[name] = self._stored(name, start, dims, number, offset)
        return Header(metadata, found)

    def _stored(self, name: str, start: int, dims: tuple[int, ...], number: int, offset: int) -> Stored:
        where = f"{shown(self._path)}: tensor {shown(name)}"
        sizes = block_sizes()
        if number not in sizes:
            raise ConfigError(
                f"{where} has the unknown GGUF type {number}. Update the package gguf, or use another file"
            )
        kind, block, size = sizes[number]
        shape = tuple(reversed(dims)) or (1,)
        if shape[-1] % block:
            raise ConfigError(
                f"{where} has rows of {shape[-1]} values, not a multiple of the {block} of a {kind} block"
            )
        row_bytes = shape[-1] // block * size
        end = start + offset + prod(shape[:-1]) * row_bytes
        if end > len(self._data):
            raise ConfigError(
                f"{where} ends at byte {end} of a file of {len(self._data)} bytes: truncated (an interrupted download?)"
            )
        return Stored(self._path, kind, shape, row_bytes, start + offset)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (count,) = self._values("I")
        if count > _MOST_DIMENSIONS:
            raise ConfigError(f"{shown(self._path)}: tensor {shown(name)} has {count} dimensions")
        dims = self._values(f"{count}Q")
        number, offset = self._values("IQ")
        return name, dims, number, offset

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            (value,) = self._values(self._scalar(kind))
            # The shortest decimal number of a float32 is the one that config.json had: 1e-5, not 9.99999974e-6.
            return float(str(np.float32(value))) if kind == _FLOAT32 else value
        kind, count = self._values("IQ")
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        return list(self._values(f"{count}{self._scalar(kind)}"))

    def _scalar(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ConfigError(f"{shown(self._path)}: the GGUF header has a value of the unknown type {kind}")
        return _SCALARS[kind]

    def _string(self) -> str:
        (length,) = self._values("Q")
        if length > len(self._data) - self._at:
            raise ValueError("a string passes the end of the file")
        text = self._data[self._at : self._at + length].decode()
        self._at += length
        return text

    def _values(self, form: str) -> tuple[Any, ...]:
        form = "<" + form
        found = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return found


def block_sizes() -> dict[int, tuple[str, int, int]]:
    """Return (name, values of a block, bytes of a block) by the number of a GGUF type."""
    try:
        from gguf import GGML_QUANT_SIZES
    except ImportError as error:
        raise ConfigError(f"GGUF files need the package gguf ({error}): pip install 'dovetail[gguf]'") from None
    return {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
