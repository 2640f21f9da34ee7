"""The quantizer seam: how each linear layer stores its weight, which input format it wants, and how it multiplies."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dovetail.core.errors import CapabilityError, ConfigError
from dovetail.core.interfaces.activation import PLAIN, ActFormat, Activation, Partial

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class LinearShape:
    """This rank's share of a linear layer. Merged layers (q|k|v, gate|up) stack their parts along `out`."""

    inp: int
    out: int
    parts: tuple[int, ...]
    """Output rows of each merged part; sums to `out`."""
    shard: Literal["column", "row", "none"] = "none"
    """Which dimension tensor parallelism split."""
    dtype: torch.dtype | None = None
    """Of the model: dtype of outputs and of unquantized weights."""
    names: tuple[str, ...] = ()
    """Checkpoint prefix of each part, for instance "model.layers.3.mlp.down_proj"."""
    shares: Mapping[int, int] = field(default_factory=dict, hash=False)
    """The model's: ModelSpec.shares()."""

    def check_multiple(self, multiple: int, quant: str, path: str, skip: Sequence[str] | None) -> None:
        """CapabilityError where a side of the share does not divide by `multiple`, with what would work. `quant` names
        the choice ("quant=int8"), `path` the layer; `skip` are the patterns of layers that stay plain already, None =
        none can."""
        if self.inp % multiple == 0 and self.out % multiple == 0:
            return
        works = [f"engine.tp={ranks}" for ranks, divisor in self.shares.items() if divisor % multiple == 0]
        works = [" or ".join(works)] if works else []
        if skip is not None:
            # With its neighbours in the block, which share its channels, in every layer.
            pattern = re.sub(r"\.\d+\.", ".*.", f"{path.rpartition('.')[0]}.*")
            works += [f"quant.skip={[*skip, pattern]}", "quant=none"]
        raise CapabilityError(
            [
                f"{quant}: {path} is {self.inp} x {self.out} on each rank; both must divide by {multiple}. "
                f"Would work: {', '.join(works) or 'a checkpoint in another format'}"
            ]
        )


class LinearMethod(ABC):
    """One layer's weight format and product. Life: create -> load (any order, once per part and tensor name) -> finish
    -> apply."""

    input: ActFormat = PLAIN
    """The format apply wants; producers emit it."""
    tensors: tuple[str, ...] = ("weight",)
    """Checkpoint tensor names read for each part."""

    @abstractmethod
    def create(self, shape: LinearShape, device: torch.device) -> dict[str, torch.Tensor]:
        """Allocate this rank's tensors, by name, unset. The layer owns them and passes them back as `params`."""

    @abstractmethod
    def load(self, params: dict[str, torch.Tensor], name: str, part: slice, tensor: torch.Tensor) -> None:
        """Copy or convert this rank's shard of one part, output rows `part`. At most one part is held beside the
        result."""

    def finish(self, params: dict[str, torch.Tensor]) -> None:
        """Every part is loaded: pack, transpose, check."""

    @abstractmethod
    def apply(self, params: dict[str, torch.Tensor], x: Activation, bias: torch.Tensor | None = None) -> torch.Tensor:
        """y_TO = x_TI @ weight_OI^T (+ bias_O), in the model's dtype. Capturable; no host sync."""

    def partial(self, params: dict[str, torch.Tensor], x: Activation) -> Partial:
        """As apply without a bias, for a consumer that multiplies by scales itself: they may be left to it."""
        return Partial(self.apply(params, x))


class Quantizer(ABC):
    """Chooses a method per layer."""

    kv_scale_tensors: tuple[str, ...] = ()
    """Checkpoint names of K's and V's scale after the attention layer's prefix, as ("k_scale", "v_scale"); () = the
    checkpoint has none, and kv_scales says them."""

    def __init__(self, config: object) -> None:
        self.config = config

    def read_checkpoint(self, hf: Mapping[str, Any]) -> None:
        """config.json of the checkpoint that the weights come from: called once, before `linear`, unless weights are
        dummies. `quantization_config` says what was quantized already; the default refuses it. Raises ConfigError."""
        if (said := hf.get("quantization_config")) is not None:
            method = said.get("quant_method") if isinstance(said, Mapping) else said
            raise ConfigError(
                f"config.json: the checkpoint is quantized already (quant_method {method!r}), and "
                f"{type(self).__name__} takes plain weights. Choose a quantizer that reads it, or another checkpoint"
            )

    @abstractmethod
    def linear(self, path: str, shape: LinearShape) -> LinearMethod:
        """The method for the layer at this module path, for instance "layers.3.mlp.down". Raises CapabilityError for
        shapes that the format cannot hold, naming what would."""

    def kv_scales(self, layer: int) -> tuple[float, float]:
        """Static scales of K and V for quantized KV caches."""
        return 1.0, 1.0
