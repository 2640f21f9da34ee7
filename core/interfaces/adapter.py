"""Adapter contract: changes to linear layers that each request selects by name, such as LoRA (Hu et al. 2021).

An adapter is a folder. Every rank reads its share into host memory (`read`) and copies it into a device slot when a
sequence that uses it joins (`place`). Slots are allocated once, so captured CUDA graphs stay valid for any contents.
Rows of one step may use different adapters, or none.

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

    from dovetail.core.interfaces.model import ModelSpec
    from dovetail.core.interfaces.quant import LinearShape


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """Per-device memory of a component, computed from its config by the function that `Component.facts` names."""

    slots: int
    numbers: Callable[[int, int], int]
    """numbers(inputs, outputs): values in one slot, in the model's dtype, for a rank's share of one matrix."""


class LinearSite(Protocol):
    """A linear layer of the model as adapters see it: this rank's share of one matrix, or of several stacked ones."""

    @property
    def shape(self) -> LinearShape:
        """Shape on this rank; `names` are the checkpoint's names, one per part."""

    @property
    def whole(self) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of each part's unsharded matrix."""

    def output_share(self, part: int, tensor: Any) -> torch.Tensor:
        """Return this rank's rows, in the layer's order, of a lazily sliced tensor with a row per unsharded output."""

    def input_share(self, tensor: Any) -> torch.Tensor:
        """Return this rank's columns of a lazily sliced tensor with one column per input."""


class LayerAdapters(ABC):
    """All adapter slots of one layer."""

    @abstractmethod
    def apply(self, x_TI: torch.Tensor, y_TO: torch.Tensor, slots_T: torch.Tensor) -> None:
        """Change y, the layer's output for the plain input x, in place: apply to each row the adapter in its slot.

        slots_T is int32. Rows of slot -1 must stay bit-identical, and rows must not depend on each other. Under tensor
        parallelism the x of a row-parallel layer is a share of the inputs and y is summed over ranks later, so add only
        this rank's share. Capturable; no host sync.
        """


class Adapters(ABC):
    """Adapters of one rank. Lifecycle: attach (once per layer, as the model is built) -> allocate -> other calls."""

    slots_T: torch.Tensor | None = None
    """int32: adapter slot of each token, -1 = none; None = no row of this step has an adapter, and layers skip `apply`.
    Written by the core before the model's forward."""

    def __init__(self, config: Any, device: torch.device, dtype: torch.dtype) -> None:
        """`dtype` is the model's."""
        self.config, self.device, self.dtype = config, device, dtype

    @classmethod
    @abstractmethod
    def initial(cls, config: Any) -> Mapping[str, str]:
        """Return the adapters to load at start-up: name -> folder."""

    @classmethod
    def check(cls, config: Any, folder: Path, spec: ModelSpec) -> None:
        """Raise RequestError naming what an initial adapter changes and no model of this spec lets it change, before
        memory is taken. By headers alone; `read` checks the rest."""
        return

    @property
    @abstractmethod
    def slots(self) -> int:
        """Maximum number of different adapters in one step; 0 = adapters are off, and no other method is called."""

    @abstractmethod
    def attach(self, site: LinearSite) -> LayerAdapters:
        """Return the adapter slots of one linear layer. Their `apply` is called after the layer's matmul."""

    @abstractmethod
    def allocate(self) -> None:
        """Allocate the memory of all slots, initially without effect. Called once, after every layer is attached."""

    @abstractmethod
    def read(self, key: str, folder: Path) -> None:
        """Read this rank's share of an adapter into host memory, under a key not used before. Called from a separate
        thread while steps run. The folder is untrusted: execute nothing from it, and check shapes before reading.
        Raises RequestError naming what does not fit, equally on every rank, and then keeps nothing of the adapter."""

    @abstractmethod
    def place(self, slot: int, key: str) -> None:
        """Make the slot hold this adapter from the next step on. The adapter must have been read. The copy is ordered
        after the work already enqueued; nothing is copied if the slot already holds it."""

    @abstractmethod
    def drop(self, key: str) -> None:
        """Drop the host's copy. Unknown keys are ignored. Slots keep their contents."""
