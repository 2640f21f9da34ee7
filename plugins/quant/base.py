"""Base of quantizers that read quantized checkpoints and quantize plain weights as they load."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from typing import Any, Generic, Protocol, TypeVar

from dovetail.core.compose import Config
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import (
    PLAIN,
    ActFormat,
    Checkpoint,
    ExpertMethod,
    ExpertShape,
    LinearMethod,
    LinearShape,
    Quantizer,
)
from dovetail.core.interfaces.checkpoint import StoredMatrix, TensorHeader
from dovetail.core.layers.packed import PackedLinear
from dovetail.core.layers.plain import PlainLinear
from dovetail.core.layers.plain_experts import PlainExperts
from dovetail.core.startup_notes import note
from dovetail.plugins.quant.compressed import Inputs
from dovetail.plugins.quant.config import PackedConfig
from dovetail.plugins.quant.fp8.format import FP8_TOKEN, multiplies_fp8
from dovetail.plugins.quant.parsing import kv_scale_names, stored_config


class StoredLayers(Protocol):
    """Description of a quantized checkpoint, as a parser of quantization_config returns it."""

    def skips(self, names: tuple[str, ...], path: str) -> bool: ...


Stored = TypeVar("Stored", bound=StoredLayers)


def input_format(quant: str, activations: str, stated: Inputs | None) -> ActFormat:
    """Return the input format for a value of the option `activations`. auto: FP8 if the checkpoint states floats of 8
    bits, and otherwise the model's dtype, which is at least as precise. `quant`: name of the quantizer."""
    if activations != "auto":
        return FP8_TOKEN if activations == "fp8" else PLAIN
    return FP8_TOKEN if stated is not None and stated.is_fp8 and multiplies_fp8(quant=quant) else PLAIN


def note_inputs(quant: str, activations: str, stated: Inputs | None) -> None:
    """Note inputs that `input_format` selects in another format than the checkpoint states."""
    if activations != "auto" or stated is None or (stated.is_fp8 and stated.strategy == "token"):
        return
    have, other = ("FP8 with a scale per token", "model") if stated.is_fp8 else ("the model's dtype", "fp8")
    note(
        f"quant={quant}: config.json states {stated} as inputs of layers; they are in {have}, unless "
        f"quant.activations={other} is set"
    )


def with_many_rows(method: LinearMethod, config: Config) -> LinearMethod:
    """Return the method with the option `many_rows` of a config, if both have it."""
    if isinstance(method, PackedLinear) and isinstance(config, PackedConfig):
        method.exact, method.kept = config.many_rows == "exact", config.many_rows == "kept"
    return method


class StoredOrRounded(Quantizer, Generic[Stored]):
    """Layers that match `config.skip`, or that a quantized checkpoint leaves plain, are plain. Others come from
    `rounded` or from `of_checkpoint`."""

    config: Any
    """A config with the option `skip`."""
    stored: Stored | None = None
    """Description of the quantized checkpoint; None = plain weights."""
    measure: Callable[[Mapping[str, Any], str, Mapping[str, TensorHeader]], StoredMatrix | None]
    """The function of Component.stored."""
    heads: tuple[str, ...] = ("auto",)
    """Values of an option `head` that a checkpoint with quantized logits admits."""
    slot_paths = True

    def read_checkpoint(self, checkpoint: Checkpoint) -> None:
        self.stored, self._hf, self._headers = self.parse(checkpoint), checkpoint.config(), checkpoint.tensors()
        self.kv_scale_tensors = kv_scale_names(stored_config(self._hf))
        if self.stored is not None and self.config.skip:
            raise ConfigError("quant.skip keeps layers plain, but this checkpoint is quantized: set quant.skip=[]")

    def linear(self, path: str, shape: LinearShape) -> LinearMethod:
        if any(fnmatch(path, pattern) for pattern in self.config.skip):
            return PlainLinear()
        if self.stored is None:
            return with_many_rows(self.rounded(path, shape), self.config)
        if self.stored.skips(shape.names, path):
            return PlainLinear()
        return with_many_rows(self.of_checkpoint(path, shape, self.stored), self.config)

    def experts(self, path: str, shape: ExpertShape) -> ExpertMethod | None:
        plain = {self._plain(path, shape, expert) for expert in range(shape.experts)}
        if plain == {True}:
            return PlainExperts()
        return self.quantized_experts(path, shape) if plain == {False} else None

    def _plain(self, path: str, shape: ExpertShape, expert: int) -> bool | None:
        """Whether an expert's matrices are plain; None = some are."""
        matrices = tuple(f"{shape.path_of(path, expert)}.{matrix}" for matrix in ("gate_up", "down"))
        skipped = {any(fnmatch(matrix, pattern) for pattern in self.config.skip) for matrix in matrices}
        if skipped == {False} and self.stored is not None:
            gate, up, down = shape.names[expert]
            sides = zip(((gate, up), (down,)), matrices, strict=True)
            skipped = {self.stored.skips(names, matrix) for names, matrix in sides}
        return skipped.pop() if len(skipped) == 1 else None

    def quantized_experts(self, path: str, shape: ExpertShape) -> ExpertMethod | None:
        """Return the method of `experts` for a layer whose experts are all quantized."""
        return None

    def table(self, path: str, shape: LinearShape, *, lookup: bool) -> LinearMethod | None:
        """The tensors of the file decide whether a table is quantized: checkpoints differ in whether they list
        lm_head."""
        if self.stored is None or not self._has(shape.names[0]):
            return self.rounded_head(path, shape) if path == "lm_head" else None
        if path == "lm_head" and (head := getattr(self.config, "head", "auto")) not in self.heads:
            raise ConfigError(f"quant.head={head}: the checkpoint has quantized logits; set quant.head=auto")
        return self.table_of_checkpoint(path, shape, self.stored)

    def _has(self, matrix: str) -> bool:
        """Whether a matrix is quantized in the checkpoint."""
        prefix = f"{matrix}."
        found = {name.removeprefix(prefix): each for name, each in self._headers.items() if name.startswith(prefix)}
        return self.measure(self._hf, matrix, found) is not None

    def rounded_head(self, path: str, shape: LinearShape) -> LinearMethod | None:
        """Return the method for a matrix of logits that is plain in the checkpoint; None = the model's dtype."""
        return None

    def table_of_checkpoint(self, path: str, shape: LinearShape, stored: Stored) -> LinearMethod:
        """Return the method that reads a quantized table."""
        return self.of_checkpoint(path, shape, stored)

    @abstractmethod
    def parse(self, checkpoint: Checkpoint) -> Stored | None:
        """Return the description of a quantized checkpoint; None = its weights are plain."""

    @abstractmethod
    def rounded(self, path: str, shape: LinearShape) -> LinearMethod:
        """Return the method that quantizes plain weights as they load."""

    @abstractmethod
    def of_checkpoint(self, path: str, shape: LinearShape, stored: Stored) -> LinearMethod:
        """Return the method that reads quantized weights."""
