"""Records of the checkpoint tensors of a linear layer: what each axis counts, so that the layer can cut a rank's share.

Matrices of published formats are stored as [outputs, inputs] or transposed, with several values in an entry, with one
scale for a group of channels, or as blocks of bytes. The layer selects this rank's channels of any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dovetail.core.arithmetic import ceil_div

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Axis:
    """Meaning of one dimension of a checkpoint tensor."""

    counts: Literal["outputs", "inputs", "nothing"]
    """Channels of the whole matrix, or entries that no rank cuts, such as a codebook."""
    group: int = 1
    """Consecutive channels that share a value, for instance a scale; 0 = all channels."""
    packed: int = 1
    """Consecutive values in one entry, such as 8 codes of 4 bits in an int32. TensorRecord.unpack separates them."""
    entries: int = 1
    """Entries per group, for instance 144 bytes of a block of 256 inputs. With "nothing": the size of the axis."""

    def size(self, channels: int) -> int:
        """Number of entries for so many channels."""
        if self.counts == "nothing":
            return self.entries
        return ceil_div(self.values(channels), self.packed) * self.entries

    def values(self, channels: int) -> int:
        """Number of groups of so many channels."""
        return ceil_div(channels, self.group) if self.group else min(channels, 1)

    def __str__(self) -> str:
        if self.counts == "nothing":
            return str(self.entries)
        many = "all" if self.group == 0 else str(self.group * self.packed) if self.group * self.packed > 1 else ""
        per = f" per {many} {self.counts}" if many else f" per {self.counts.removesuffix('s')}"
        return f"{self.entries}{per}"


OUTPUTS, INPUTS = Axis("outputs"), Axis("inputs")


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One checkpoint tensor of a part of a linear layer. A tensor that does not fit its record is refused."""

    name: str
    """Name below the part's prefix, for instance "weight_scale". "bias" is read only for layers without a bias, whose
    checkpoints may have zeros there."""
    axes: tuple[Axis, ...] = (OUTPUTS, INPUTS)
    """Axes of size 1 may be absent from the tensor."""
    dtypes: tuple[torch.dtype, ...] = ()
    """Dtypes that the tensor may have; () = float16, bfloat16, float32, float64."""
    optional: bool = False
    unpack: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Separates the values of packed axes, before channels are selected: takes whole entries, returns a tensor with one
    entry for each value along every packed axis. Required if an axis is packed."""
    sources: tuple[str, ...] = ()
    """Names of the checkpoint tensors that this one is computed from, for layouts that no axes describe, such as flat
    blocks; () = the tensor `name` itself. They are read whole."""
    combine: Callable[[Mapping[str, torch.Tensor], int, int], torch.Tensor] | None = None
    """combine(tensors by name, outputs, inputs) -> a tensor with `axes`, from `sources`."""
    check: Callable[[Mapping[str, torch.Tensor], int, int], None] | None = None
    """check(tensors by name, outputs, inputs) raises TensorError if shapes or dtypes of `sources` do not fit. It is
    called before `combine`, and with tensors on the meta device before a device is used."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the checkpoint tensors that are read."""
        return self.sources or (self.name,)


PLAIN_WEIGHT = TensorRecord("weight")
"""An unquantized matrix [outputs, inputs]."""
