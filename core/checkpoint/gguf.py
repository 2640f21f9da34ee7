"""GGUF files of llama.cpp, whole or in splits, under the names and in the order of Hugging Face checkpoints.

Values that are not in blocks are ordinary tensors. Blocks stay as the file has them, as bytes [rows, bytes of a row].
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.core.checkpoint.gguf_header import Header, Stored, has_magic, read_header
from dovetail.core.checkpoint.gguf_metadata import (
    make_config,
    make_tokenizer,
    make_tokenizer_config,
    read_architecture,
)
from dovetail.core.errors import ConfigError, shown
from dovetail.core.files import path_kind
from dovetail.core.interfaces.checkpoint import Checkpoint, TensorHeader, WeightSource

_SPLIT = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)")
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FACTORS = "rope_freqs.weight"
"""Factors of rotary frequencies, which config.json states as settings."""
_HEADS = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
_PLAIN = ("F32", "F16", "BF16")


class GGUFCheckpoint(Checkpoint):
    """One GGUF file, or any file of a split one."""

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        return path.is_file() and has_magic(path)

    @property
    def name(self) -> str:
        split = _SPLIT.fullmatch(self.path.name)
        return split["stem"] if split else self.path.name.removesuffix(".gguf")

    def where(self, name: str) -> str:
        return f"{shown(self._files[0])}: {name} of its metadata"

    def text(self, name: str) -> str | None:
        if name == "config.json":
            return self._config
        if name == "tokenizer_config.json":
            return make_tokenizer_config(self._metadata)
        return _tokenizer(*_state(self._files[0])) if name == "tokenizer.json" else None

    def tensors(self) -> Mapping[str, TensorHeader]:
        return {name: _tensor_header(stored) for name, (_, stored) in self._stored.items()}

    def open(self) -> WeightSource:
        architecture, where = self._metadata["general.architecture"], str(shown(self._files[0]))
        permuted = read_architecture(self._metadata, where).permuted
        for name, (theirs, stored) in self._stored.items():
            layer = _LAYER.match(theirs)
            key = _HEADS.get(layer[2]) if layer and permuted else None
            order = None
            if key is not None:
                order = _unpermuted(stored.shape[0], self._metadata[f"{architecture}.{key}"], f"{where}: {theirs}")
            yield name, partial(MappedTensor, stored, order)

    @cached_property
    def _files(self) -> list[Path]:
        """All splits, the one with the metadata first."""
        split = _SPLIT.fullmatch(self.path.name)
        count = _header(self.path).metadata.get("split.count", 1)
        if count <= 1:
            return [self.path]
        if split is None or int(split["count"]) != count:
            raise ConfigError(
                f"{shown(self.path)}: this is one of {count} splits. Name the first <name>-00001-of-{count:05d}.gguf"
            )
        names = [f"{split['stem']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
        for name in names:
            if path_kind(self.path.parent / name) != "file":
                raise ConfigError(f"{shown(self.path.parent / name)}: this split is missing (an interrupted download?)")
        files = [self.path.parent / name for name in names]
        for number, file in enumerate(files):
            _check_split(_header(file).metadata, file, number, count)
        return files

    @property
    def _metadata(self) -> Mapping[str, Any]:
        return _header(self._files[0]).metadata

    @cached_property
    def _stored(self) -> dict[str, tuple[str, Stored]]:
        """Hugging Face name -> (GGUF name, tensor)."""
        read_architecture(self._metadata, str(shown(self._files[0])))
        found: dict[str, tuple[str, Stored]] = {}
        for file in self._files:
            for name, stored in _header(file).tensors.items():
                if name == _FACTORS:
                    continue
                where = f"{shown(file)}: tensor {shown(name)}"
                if (ours := _hf_name(name)) is None:
                    raise ConfigError(f"{where} is not part of the models that GGUF files are read for")
                if ours in found:
                    raise ConfigError(f"{where} is in another split, too")
                if stored.plain and stored.type not in _PLAIN:
                    raise ConfigError(f"{where} has the type {stored.type}; plain values are {', '.join(_PLAIN)}")
                if not stored.plain and len(stored.shape) != 2:
                    raise ConfigError(f"{where} is in {stored.type} and has {len(stored.shape)} dimensions, not 2")
                found[ours] = name, stored
        listed = self._metadata.get("split.tensors.count")
        if listed is not None and listed != (held := sum(len(_header(file).tensors) for file in self._files)):
            raise ConfigError(f"{shown(self._files[0])}: the splits have {held} tensors, and {listed} are stated")
        return dict(sorted(found.items()))

    @cached_property
    def _config(self) -> str:
        where = str(shown(self._files[0]))
        embedding = "model.embed_tokens.weight"
        if embedding not in self._stored:
            raise ConfigError(f"{where}: tensor 'token_embd.weight' is missing")
        types = {stored.type for _, stored in self._stored.values() if len(stored.shape) == 2}
        blocks = sorted({stored.type for _, stored in self._stored.values() if not stored.plain})
        # Norms are in F32 whatever the model is in. Blocks are made of models in BF16, as a rule.
        dtype = "float16" if types <= {"F16"} else "float32" if types <= {"F32"} else "bfloat16"
        vocab = self._stored[embedding][1].shape[0]
        factors = next((h.tensors[_FACTORS] for h in map(_header, self._files) if _FACTORS in h.tensors), None)
        values = [] if factors is None else _mapped(factors).view(np.float32).ravel().tolist()
        return make_config(self._metadata, list(self._stored), vocab, dtype, blocks, values, where)


class MappedTensor:
    """LazyTensor over a memory map. A slice reads the pages of its rows, or of its columns in them, alone."""

    def __init__(self, stored: Stored, order: np.ndarray | None = None) -> None:
        """`order`: row of the file for each row of the tensor; None = the same."""
        self._stored, self._order = stored, order

    def get_shape(self) -> list[int]:
        return list(_tensor_header(self._stored).shape)

    def __getitem__(self, index: Any) -> Any:
        import torch

        stored = _mapped(self._stored)
        if self._order is not None:
            rows, *columns = index if isinstance(index, tuple) else (index,)
            index = (self._order[rows], *columns)
        values = torch.from_numpy(np.array(stored[index]))
        return values.view(torch.bfloat16) if self._stored.type == "BF16" else values


def _mapped(stored: Stored) -> np.ndarray:
    """Return the tensor's values, those of BF16 as int16 and blocks as bytes."""
    dtype = {"F32": "<f4", "F16": "<f2", "BF16": "<i2"}.get(stored.type, "u1")
    shape = _tensor_header(stored).shape
    return np.memmap(stored.file, dtype, "r", stored.offset, shape)


def _tensor_header(stored: Stored) -> TensorHeader:
    if stored.plain:
        return TensorHeader(stored.type, stored.shape, stored.file)
    return TensorHeader("U8", (*stored.shape[:-1], stored.row_bytes), stored.file, stored.type)


def _hf_name(name: str) -> str | None:
    """Return the Hugging Face name of a GGUF tensor; None = unknown."""
    stem, _, suffix = name.rpartition(".")
    layer = _LAYER.fullmatch(stem)
    ours = _OF_LAYER.get(layer[2]) if layer else _WHOLE.get(stem)
    if ours is None or suffix not in ("weight", "bias"):
        return None
    return f"model.layers.{layer[1]}.{ours}.{suffix}" if layer else f"{ours}.{suffix}"


def _unpermuted(rows: int, heads: int, where: str) -> np.ndarray:
    """Return the file's row of each row of q or k. llama.cpp rotates adjacent rows of a head, and Hugging Face's order
    has the first of all pairs in front of the second ones."""
    if not heads or rows % (2 * heads):
        raise ConfigError(f"{where} has {rows} rows, which are not {heads} heads of an even size")
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _check_split(metadata: Mapping[str, Any], file: Path, number: int, count: int) -> None:
    """Raise ConfigError for a file that is another split than its name states, or one of another model."""
    for key, wanted in (("split.no", number), ("split.count", count)):
        if (found := metadata.get(key)) != wanted:
            raise ConfigError(
                f"{shown(file)}: {key} is {shown(found)} in its metadata, and {wanted} by its name: was it renamed?"
            )


def _state(path: Path) -> tuple[Path, int, int]:
    """Return a key that changes with the file."""
    stat = path.stat()
    return path, stat.st_size, stat.st_mtime_ns


def _header(path: Path) -> Header:
    return _cached_header(*_state(path))


@functools.lru_cache(maxsize=64)
def _cached_header(path: Path, size: int, changed: int) -> Header:
    return read_header(path)


@functools.lru_cache(maxsize=2)
def _tokenizer(path: Path, size: int, changed: int) -> str:
    return make_tokenizer(_header(path).metadata, str(shown(path)))
