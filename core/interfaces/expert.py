"""Expert contract: how the routed experts of a layer (Shazeer et al. 2017) store their matrices and multiply.

Shapes: T tokens, K experts of a token, E experts, C hidden channels, F channels of an expert, O output, I input.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from dovetail.core.interfaces.activation import PLAIN, ActFormat, Activation
from dovetail.core.interfaces.tensor_record import PLAIN_WEIGHT, TensorRecord

if TYPE_CHECKING:
    import torch

    from dovetail.core.interfaces.tuning import Tunable

ExpertPart = Literal["gate", "up", "down"]
"""Matrix of an expert: down(activation(gate(x), up(x)))."""
PARTS: tuple[ExpertPart, ...] = ("gate", "up", "down")


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How a router's logits select experts. All of it is computed in float32.

    Softmax over the selected logits alone is scores="softmax" with `normalize`: the results are equal.
    """

    experts: int
    active: int
    """Experts of a token."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = False
    """Whether the scores of a token's experts are divided by their sum."""
    scale: float = 1.0
    """Multiplies the scores at the end."""
    groups: int = 1
    """Groups of consecutive experts. A token selects experts of the `kept_groups` whose best `group_best` scores have
    the largest sums (DeepSeek-V3, 2024)."""
    kept_groups: int = 1
    group_best: Literal[1, 2] = 2
    """1: a group counts as much as its best expert (DeepSeek-V2, 2024)."""
    uniform: bool = False
    """Replace the logits by a hash of themselves, so that every expert is equally likely. For speed measurements with
    random weights, whose routers may choose a few experts for all tokens."""
    always: int = 0
    """Further experts that every token has, numbered from `experts` on, whose outputs count as they are (shared
    experts; DeepSeekMoE, 2024)."""

    def __post_init__(self) -> None:
        if not 1 <= self.active <= self.experts:
            raise ValueError(f"a token cannot have {self.active} of {self.experts} experts")
        if self.experts % self.groups or not 1 <= self.kept_groups <= self.groups:
            raise ValueError(
                f"{self.experts} experts cannot be in {self.groups} groups, of which {self.kept_groups} count"
            )
        if self.active > self.experts // self.groups * self.kept_groups:
            raise ValueError(f"{self.kept_groups} of {self.groups} groups have fewer than {self.active} experts")


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of each token, in any order."""

    experts_TK: torch.Tensor
    """int32; -1 = none. A token without experts is padding: its state may be NaN, and its result is zero."""
    weights_TK: torch.Tensor
    """float32: factor of each expert's output."""


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """gate * sigmoid(alpha * gate) * (up + offset). The default is SwiGLU (Shazeer 2020)."""

    alpha: float = 1.0
    limit: float | None = None
    """Maximum of gate, and of the magnitude of up, before; None = none (gpt-oss, 2025: 7)."""
    offset: float = 0.0

    def reference(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Compute it in the dtype of the operands."""
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * (self.alpha * gate).sigmoid() * (up + self.offset)


SWIGLU = GatedActivation()


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """This rank's share of the routed experts of a layer: all or some of the experts, and all or some of their
    channels. gate and up are [F, C], down is [C, F]."""

    experts: int
    """E: slots of this rank. Methods number experts by slot."""
    hidden: int
    """C"""
    intermediate: int
    """F: this rank's channels of an expert."""
    dtype: torch.dtype
    """The model's dtype, used for outputs and unquantized weights."""
    names: tuple[tuple[str, str, str], ...] = ()
    """Checkpoint prefix of each expert's gate, up and down."""
    shares: Mapping[int, int] = field(default_factory=dict, hash=False)
    """ModelSpec.shares() of the model, for fewer ranks than now."""
    whole_intermediate: int = 0
    """Channels of the whole experts; 0 = `intermediate`."""
    first_channel: int = 0
    """This rank's first channel in the whole experts."""
    ids: tuple[int, ...] = ()
    """Expert in each slot, as the checkpoint numbers the routed ones; () = 0, 1, and so on."""
    paths: tuple[str, ...] = ()
    """Path of each slot's matrices; () = that of the layer, followed by the expert's number. See `path_of`."""

    def __post_init__(self) -> None:
        if not self.whole_intermediate:
            object.__setattr__(self, "whole_intermediate", self.intermediate)
        if not self.ids:
            object.__setattr__(self, "ids", tuple(range(self.experts)))

    def path_of(self, path: str, slot: int) -> str:
        """Return the path of the matrices in a slot, which patterns match (`skip` of quantizers). `path`: that of the
        layer."""
        return self.paths[slot] if self.paths else f"{path}.{self.ids[slot]}"


@dataclass(frozen=True, slots=True)
class ExpertBias:
    """Biases of the products, in the model's dtype."""

    up: torch.Tensor
    """[E, 2F]: those of gate, then those of up, for F = ExpertMethod.channels."""
    down: torch.Tensor
    """[E, C]: zero on all ranks but one, since the ranks' results are summed."""


class ExpertMethod(ABC):
    """Weight format and products of a layer's routed experts.
    Lifecycle: create -> load (once for each part of each expert, in any order) -> finish -> apply."""

    input: ActFormat = PLAIN
    """Input format of apply. Producers emit it."""
    stacked: bool = False
    """Whether each tensor of `params` has one entry for each expert in its first dimension, and `apply` depends on an
    expert by these entries alone: experts that are copied to other entries work there, in CUDA graphs too. Placements
    that move experts between ranks need it."""

    def tensors_of(self, name: str) -> tuple[TensorRecord, ...]:
        """Return the checkpoint tensors of the matrix with this prefix."""
        return (PLAIN_WEIGHT,)

    def channels(self, shape: ExpertShape) -> int:
        """Return the channels of an expert that `create` stores: those of the shape, and possibly further ones whose
        weights are zero, so that a faster kernel fits. The layer's bias `up` has 2 F of them, zero where a channel is
        added."""
        return shape.intermediate

    def before(self, shape: ExpertShape) -> int:
        """Return how many of the channels that are added come before those of the shape, as where a block of values
        with one scale begins in another rank's channels."""
        return 0

    @abstractmethod
    def create(self, shape: ExpertShape, device: torch.device) -> dict[str, torch.Tensor]:
        """Allocate this rank's uninitialized tensors by name. The layer owns them and passes them back as `params`."""

    @abstractmethod
    def load(
        self, params: dict[str, torch.Tensor], expert: int, part: ExpertPart, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Store this rank's share of one matrix. `tensors` is as in LinearMethod.load: gate and up are cut along
        outputs, down along inputs. Raises TensorError for values that cannot be used."""

    def finish(self, params: dict[str, torch.Tensor]) -> None:
        """Pack, transpose or check the weights. Called once, after the last load."""

    def tunables(self, params: dict[str, torch.Tensor], rows: int, active: int, always: int = 0) -> Sequence[Tunable]:
        """Return the tunable operations of `apply` with `rows` tokens of `active` experts, the last `always` of which
        are the layer's last ones. They must not read weights."""
        return ()

    @abstractmethod
    def apply(
        self,
        params: dict[str, torch.Tensor],
        x: Activation,
        routing: Routing,
        activation: GatedActivation = SWIGLU,
        bias: ExpertBias | None = None,
    ) -> torch.Tensor:
        """Return [T, C] in the model's dtype: the weighted sum of each token's experts, over this rank's channels. The
        order of the sum does not depend on other tokens. Capturable; no host sync."""
