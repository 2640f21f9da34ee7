"""Quantizer contract: how each linear layer stores its weight, which input format it needs, and how it multiplies."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from dovetail.core.errors import CapabilityError, TextError, shown
from dovetail.core.interfaces.activation import PLAIN, ActFormat, Activation, Partial, Sums
from dovetail.core.interfaces.tensor_record import PLAIN_WEIGHT, TensorRecord
from dovetail.core.interfaces.tuning import Tunable

if TYPE_CHECKING:
    import torch

    from dovetail.core.interfaces.checkpoint import Checkpoint
    from dovetail.core.interfaces.expert import ExpertMethod, ExpertShape


@dataclass(frozen=True, slots=True)
class LinearShape:
    """This rank's share of a linear layer. Merged layers (q|k|v, gate|up) stack their parts along `out`."""

    inp: int
    out: int
    parts: tuple[int, ...]
    """Output rows of each merged part; sums to `out`."""
    shard: Literal["column", "row", "none"] = "none"
    """Dimension split by tensor parallelism."""
    dtype: torch.dtype | None = None
    """The model's dtype, used for outputs and unquantized weights."""
    names: tuple[str, ...] = ()
    """Checkpoint prefix of each part, for instance "model.layers.3.mlp.down_proj"."""
    shares: Mapping[int, int] = field(default_factory=dict, hash=False)
    """Numbers of ranks that can share the model, fewer than now -> greatest common divisor of the sides of a rank's
    matrices: ModelSpec.shares(), and for logits and embedding those of their own sides."""
    whole_inp: int = 0
    """Input width of the whole matrices; 0 = `inp`."""
    first_inp: int = 0
    """This rank's first input column in the whole matrices."""

    def __post_init__(self) -> None:
        if not self.whole_inp:
            object.__setattr__(self, "whole_inp", self.inp)

    def group_step(self, group: int) -> int:
        """Return the largest number of consecutive columns of this rank, counted from its first one, that share a scale
        if `group` columns of the whole matrix do; 0 = all columns, as in `group`. The last step may be shorter."""
        return math.gcd(group, self.first_inp) if group else 0

    def spread_groups(self, values: torch.Tensor, group: int, axis: int = -1) -> torch.Tensor:
        """Return one entry for each step of `group_step`, from one entry for each group that this rank has columns of.
        Values repeat if this rank's first column is inside a group."""
        import torch

        step = self.group_step(group)
        if step == group:
            return values
        first = self.first_inp // group
        steps = [at // group - first for at in range(self.first_inp, self.first_inp + self.inp, step)]
        return values.index_select(axis, values.new_tensor(steps, dtype=torch.int64))

    def check_multiple(
        self,
        multiple: int,
        quant: str,
        path: str,
        skip: Sequence[str] | None,
        sides: Sequence[Literal["inp", "out"]] = ("inp", "out"),
    ) -> None:
        """Raise CapabilityError, with alternatives, if a side of this share is not a multiple of `multiple`. `quant` is
        the choice ("quant=int8") and `path` the layer. `skip` holds the patterns of layers already left unquantized;
        None = the quantizer has no such option. `sides`: ("inp",) for a format with groups of input channels."""
        if all(getattr(self, side) % multiple == 0 for side in sides):
            return
        works = [f"engine.tp={ranks}" for ranks, divisor in self.shares.items() if divisor % multiple == 0]
        works = [" or ".join(works)] if works else []
        if skip is not None:
            # Skip the whole block of this layer, whose matrices share channels, at every depth.
            pattern = re.sub(r"\.\d+\.", ".*.", f"{path.rpartition('.')[0]}.*")
            works += [f"quant.skip={[*skip, pattern]}", "quant=none"]
        who = "both" if len(sides) == 2 else {"inp": "its input", "out": "its output"}[sides[0]]
        raise CapabilityError(
            [
                f"{quant}: {path} is {self.inp} x {self.out} on each rank; {who} must divide by {multiple}. "
                f"Would work: {', '.join(works) or 'a checkpoint in another format'}"
            ]
        )


class LinearMethod(ABC):
    """Weight format and matmul of one layer.
    Lifecycle: create -> load (once per part, in any order) -> finish -> apply."""

    input: ActFormat = PLAIN
    """Input format of apply. Producers emit it."""
    sums: Sums | None = None
    """Sums of the encoded values that `apply` can use (`Activation.sums`). Known by the end of `create`. Producers that
    cannot add up leave them out."""
    tensors: tuple[TensorRecord, ...] = (PLAIN_WEIGHT,)
    """Checkpoint tensors of each part."""

    def tensors_of(self, name: str) -> tuple[TensorRecord, ...]:
        """Return the checkpoint tensors of the part with this checkpoint prefix, for layers whose parts differ."""
        return self.tensors

    @abstractmethod
    def create(self, shape: LinearShape, device: torch.device) -> dict[str, torch.Tensor]:
        """Allocate this rank's uninitialized tensors by name. The layer owns them and passes them back as `params`."""

    @abstractmethod
    def load(self, params: dict[str, torch.Tensor], part: slice, tensors: Mapping[str, torch.Tensor]) -> None:
        """Store this rank's share of one part in the output rows `part`. `tensors` has every tensor of `tensors_of`,
        without optional ones that the checkpoint lacks. Along an axis that counts outputs, a tensor has one entry per
        row of `part`; along inputs, one per column of this rank, or the groups that have columns of this rank (see
        LinearShape.spread_groups). Besides the result, at most one part may be in memory. Raises TensorError for values
        that cannot be used."""

    def finish(self, params: dict[str, torch.Tensor]) -> None:
        """Pack, transpose or check the weights. Called once, after the last load."""

    @abstractmethod
    def apply(self, params: dict[str, torch.Tensor], x: Activation, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return y_TO = x_TI @ weight_OI^T (+ bias_O) in the model's dtype. Capturable; no host sync."""

    def partial(self, params: dict[str, torch.Tensor], x: Activation) -> Partial:
        """Like apply without a bias, for a consumer that can apply scales left to it (Partial.scale)."""
        return Partial(self.apply(params, x))

    def rows(self, params: dict[str, torch.Tensor], ids_T: torch.Tensor) -> torch.Tensor:
        """Return rows weight_OI[ids_T] in the model's dtype, for embedding tables. Capturable; no host sync."""
        raise NotImplementedError(f"{type(self).__name__} does not look up rows: override `rows`")

    def tunables(self, params: dict[str, torch.Tensor], rows: int, *, defers: bool = False) -> Sequence[Tunable]:
        """Return the operations of `apply` for `rows` rows that can be tuned; of `partial` if `defers`. Only shapes
        and dtypes of `params` count: they are as `create` returned them, perhaps on the meta device."""
        return ()


class Quantizer(ABC):
    """Selects a LinearMethod for each layer."""

    kv_scale_tensors: tuple[str, ...] = ()
    """Checkpoint names of the K and V scale below the attention layer's prefix, such as ("k_scale", "v_scale"). () =
    the checkpoint has none, and kv_scales gives them."""
    slot_paths: bool = False
    """Whether `experts` matches patterns with the path of each slot (`ExpertShape.path_of`), and returns None if slots
    have unlike formats. Otherwise it gets routed experts alone, and shared ones are a layer of their own."""

    def __init__(self, config: object) -> None:
        self.config = config

    def read_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Read config.json, the files beside it and the headers of tensors of the checkpoint that the weights come
        from. Called once, before `linear` and before a device is used, unless weights are dummies.
        `quantization_config` describes existing quantization, which the default refuses. Raises ConfigError, or
        TextError and TensorError, to which the file is added."""
        if (existing := checkpoint.config().get("quantization_config")) is not None:
            method = existing.get("quant_method") if isinstance(existing, Mapping) else existing
            raise TextError(
                "config.json",
                f"the checkpoint is quantized already (quant_method {shown(method)}), and {type(self).__name__} takes "
                "plain weights. Choose a quantizer that reads it, or another checkpoint",
            )

    @abstractmethod
    def linear(self, path: str, shape: LinearShape) -> LinearMethod:
        """Return the method for the layer at this module path, for instance "layers.3.mlp.down". Raises CapabilityError
        for a shape that the format cannot store, naming alternatives."""

    def table(self, path: str, shape: LinearShape, *, lookup: bool) -> LinearMethod | None:
        """Return the method for the matrix of logits ("lm_head") or for a token embedding that no logits are tied to
        ("embed"); None = the model's dtype. `lookup`: LinearMethod.rows is called, also for tied logits."""
        return None

    def experts(self, path: str, shape: ExpertShape) -> ExpertMethod | None:
        """Return the method for the experts at this module path, for instance "layers.3.mlp.experts": the routed ones,
        and with `slot_paths` first also with shared ones behind them. None = two methods of `linear` for each expert,
        at paths such as "layers.3.mlp.experts.7.down". If all are PackedLinear with equal formats, their matrices are
        multiplied together; otherwise shared ones are a layer of their own, and every token is multiplied by every
        expert, which is slow, as a start-up note says. Raises CapabilityError like `linear`."""
        return None

    def kv_scales(self, layer: int) -> tuple[float, float]:
        """Return the static scales of K and V for a quantized KV cache."""
        return 1.0, 1.0
