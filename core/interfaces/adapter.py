"""The adapter seam: small changes to a model's linear layers that each request chooses by name, such as LoRA (Hu et
al. 2021).

An adapter is a folder. Every rank reads its share into host memory (`read`), and copies it into one of the device's
slots when a sequence that uses it joins (`place`). Slots are allocated once, so that captured steps serve whatever they
hold. Rows of one step may use different adapters, or none.

Shapes: T tokens, I input, O output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from dovetail.core.interfaces.quant import LinearShape


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """What a component takes of each device, told without building it: `Component.facts` names a function of its config
    that gives one."""

    slots: int
    numbers: Callable[[int, int], int]
    """numbers(inputs, outputs): what one slot holds, in the model's dtype, for a rank's share of one matrix."""


class LinearSite(Protocol):
    """A linear layer of the model as adapters see it: this rank's share of one matrix, or of several stacked ones."""

    @property
    def shape(self) -> LinearShape:
        """Of this rank; `names` are the checkpoint's, one a part."""

    @property
    def whole(self) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of each part's whole matrix."""

    def output_share(self, part: int, tensor: Any) -> torch.Tensor:
        """Of a lazily sliced tensor with a row for each output of the part's whole matrix: the rows of this rank, in
        the layer's order."""

    def input_share(self, tensor: Any) -> torch.Tensor:
        """Of one with a column for each input: this rank's columns."""


class LayerAdapters(ABC):
    """Every slot of one layer."""

    @abstractmethod
    def apply(self, x_TI: torch.Tensor, y_TO: torch.Tensor, slots_T: torch.Tensor) -> None:
        """Change y, the layer's output for the plain input x, in place: each row as the adapter in its slot says.

        slots_T is int32; rows of slot -1 stay as they are to the bit, and no row depends on another. Under tensor
        parallelism a row-parallel layer's x is a share of the inputs and its y is summed over ranks later, so what is
        added must be that share's. Capturable; no host sync.
        """


class Adapters(ABC):
    """One on every rank. Life: attach (once a layer, while the model is built) -> allocate -> the rest in any order."""

    slots_T: torch.Tensor | None = None
    """Each token's slot, int32, -1 = none; None = no row of this step has an adapter, and layers do not call `apply`.
    Written by the core around the model's forward."""

    def __init__(self, config: Any, device: torch.device, dtype: torch.dtype) -> None:
        """`dtype` is the model's."""
        self.config, self.device, self.dtype = config, device, dtype

    @classmethod
    @abstractmethod
    def initial(cls, config: Any) -> Mapping[str, str]:
        """Adapters to load at start-up: name -> folder."""

    @property
    @abstractmethod
    def slots(self) -> int:
        """Different adapters in one step at most; 0 = this engine has none, and nothing else here is called."""

    @abstractmethod
    def attach(self, site: LinearSite) -> LayerAdapters:
        """For one layer of the model, whose `apply` is called after its product."""

    @abstractmethod
    def allocate(self) -> None:
        """Every layer is attached: take the slots' memory, all of them without effect."""

    @abstractmethod
    def read(self, key: str, folder: Path) -> None:
        """Read this rank's share of an adapter into host memory, under a key never used before.

        Called from a thread of its own while steps run. The folder is not to be trusted: run nothing from it, check
        shapes before reading. Raises RequestError that names what does not fit; then nothing of it is kept, and equal
        on every rank.
        """

    @abstractmethod
    def place(self, slot: int, key: str) -> None:
        """From the next step on, the slot holds this adapter, which was read. Copies after what is enqueued already;
        nothing where the slot holds it anyway."""

    @abstractmethod
    def drop(self, key: str) -> None:
        """Forget the host's copy; unknown keys are ignored. Slots keep what they hold."""
