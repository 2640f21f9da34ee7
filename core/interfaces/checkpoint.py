"""Checkpoint contract: a model on disk as named texts and tensors. Importing it loads no torch.

Texts have the names of the Hugging Face layout: config.json, generation_config.json, tokenizer.json,
tokenizer_config.json, chat_template.jinja. A format that stores these differently makes them of its own metadata.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dovetail.core.config_json import LARGEST, ConfigJson
from dovetail.core.errors import ConfigError, shown
from dovetail.core.files import parse_object


class LazyTensor(Protocol):
    """A checkpoint tensor that reads only the requested slices (safetensors' get_slice)."""

    def get_shape(self) -> list[int]: ...
    def __getitem__(self, index: Any) -> Any: ...


WeightSource = Iterator[tuple[str, Callable[[], LazyTensor]]]
"""(name, opener) of every tensor. Openers stay valid after the iteration."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Entry of a file's header for one tensor."""

    dtype: str
    """Type of the stored values, as safetensors calls it: "BF16", "F32", "F8_E4M3", "I32", "U8"."""
    shape: tuple[int, ...]
    """Shape of the stored values, in `dtype`."""
    file: Path
    blocks: str = ""
    """Format of blocks that are stored as U8 [rows, bytes of a row], such as "Q4_K"; "" = plain values. The config of
    a checkpoint with blocks has a quantization_config."""


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A quantized matrix of a checkpoint, as it is in memory once it is loaded."""

    weights: int
    bits: float
    """Bits of a weight, its share of scales included."""
    product: str | None = None
    """Number format of its matmuls, as the capability `product`; None = the one that the component states. A component
    whose options set it states `fixed_product=True`, and then its `product` holds instead; a tuple of formats, if
    matrices with others keep theirs."""


QUANTIZATION_FILES = {"quantize_config.json": "gptq", "hf_quant_config.json": "modelopt"}
"""Files beside config.json that describe quantization -> the `quant_method` that they do not name."""


class Checkpoint(ABC):
    """A model on disk. Everything but slices of opened tensors comes from headers and texts, and loads no torch."""

    def __init__(self, path: Path) -> None:
        """`path` exists and is recognized. Reads nothing."""
        self.path = path

    @classmethod
    @abstractmethod
    def recognizes(cls, path: Path) -> bool:
        """Whether this class reads the file or folder at an existing path. Exactly one class must. Reads a few bytes
        at most; returns False for what cannot be read."""

    @abstractmethod
    def text(self, name: str) -> str | None:
        """Return the text of this name, for instance "tokenizer.json"; None = the checkpoint has none. Raises
        ConfigError naming file and reason for one that cannot be read."""

    @abstractmethod
    def tensors(self) -> Mapping[str, TensorHeader]:
        """Return the header of every tensor, by its Hugging Face name. Reads no values. Raises ConfigError naming the
        file for missing, truncated or misplaced files."""

    @abstractmethod
    def open(self) -> WeightSource:
        """Iterate over all tensors of `tensors()`. Each rank calls it, and reads the slices that it needs."""

    @property
    def name(self) -> str:
        """Name of the model, which a server's answers state by default."""
        return self.path.resolve().name

    def where(self, name: str) -> str:
        """Return the place of a text, for messages."""
        return shown(self.path / name)

    def json(self, name: str) -> dict[str, Any] | None:
        """Return the JSON object in the text of this name, such as "quantize_config.json". Raises ConfigError for any
        other content."""
        text = self.text(name)
        return None if text is None else parse_object(text, self.where(name))

    def config(self) -> dict[str, Any]:
        """Return the content of config.json. An eos_token_id or bos_token_id of generation_config.json replaces its
        value. `quantization_config` may come from a file beside it, as GPTQ's first tools and ModelOpt write it."""
        config = self.json("config.json")
        if config is None:
            raise ConfigError(f"model.path={self.path}: no config.json")
        for file, method in QUANTIZATION_FILES.items() if "quantization_config" not in config else ():
            if (beside := self.json(file)) is not None:
                config["quantization_config"] = {"quant_method": method, **beside}
        generation = "generation_config.json"
        ids, vocab = ConfigJson(self.json(generation) or {}, self.where(generation)), config.get("vocab_size")
        largest = vocab - 1 if isinstance(vocab, int) and vocab > 0 else LARGEST
        for key in ("eos_token_id", "bos_token_id"):
            if ids.get(key) is not None:
                # The engine ends outputs at an EOS token; a BOS token that the model lacks is common and harmless.
                ids.counts(key, at_most=largest if key == "eos_token_id" else LARGEST)
                config[key] = ids.get(key)
        return config
