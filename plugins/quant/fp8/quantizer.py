"""quant=fp8: W8A8 in E4M3, from plain weights quantized at load time or from an FP8 checkpoint. On GPUs without FP8
matmuls, and with quant.activations=model, inputs stay plain (W8A16).

Shapes: T tokens, I input, O output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch.nn.functional import pad

from dovetail.core.errors import CapabilityError
from dovetail.core.interfaces import (
    PLAIN,
    Activation,
    Checkpoint,
    ExpertMethod,
    ExpertShape,
    LinearMethod,
    LinearShape,
    Partial,
)
from dovetail.core.interfaces.tuning import Tunable
from dovetail.core.layers.looped_experts import linear_shapes
from dovetail.core.ops import decoded_matmul, scaled_matmul, unscaled_matmul
from dovetail.core.ops.tile_choice import BLOCK
from dovetail.core.ops.tiles import MOST_SHARED_TILES
from dovetail.core.tuning.matmul import matmul_tunables
from dovetail.plugins.quant.base import StoredOrRounded
from dovetail.plugins.quant.config import FP8Config
from dovetail.plugins.quant.fp8.blocks import rounded_blocks, stored_blocks
from dovetail.plugins.quant.fp8.checkpoint import Stored, read_stored
from dovetail.plugins.quant.fp8.checkpoint import stored as measure
from dovetail.plugins.quant.fp8.experts import (
    LEAST_GROUP,
    BlockFP8Experts,
    FP8Experts,
    RoundedBlockFP8Experts,
    check_scales,
    records_of,
    step_of,
)
from dovetail.plugins.quant.fp8.format import (
    E4M3,
    FP8_TENSOR,
    FP8_TOKEN,
    multiplies_fp8,
    quantize_rows,
    quantize_tensor,
)

MULTIPLE = 16
"""cuBLAS and CUTLASS need FP8 matrices whose dimensions are multiples of this."""


class FP8(StoredOrRounded[Stored]):
    config: FP8Config
    measure = staticmethod(measure)
    heads = ("auto", "fp8")

    def parse(self, checkpoint: Checkpoint) -> Stored | None:
        return read_stored(checkpoint.config())

    def rounded(self, path: str, shape: LinearShape) -> LinearMethod:
        if self.config.scales == "block":
            return rounded_blocks(Stored(block=(BLOCK, BLOCK)), self.config, shape)
        shape.check_multiple(MULTIPLE, "quant=fp8", path, self.config.skip)
        return FP8Linear(self.config)

    def of_checkpoint(self, path: str, shape: LinearShape, stored: Stored) -> LinearMethod:
        if stored.blocks:
            return stored_blocks(stored, self._config, shape)
        shape.check_multiple(MULTIPLE, "quant=fp8", path, None)
        return StoredFP8Linear(stored, self._config)

    @property
    def _config(self) -> FP8Config:
        """The options, in which inputs that the checkpoint leaves plain are so unless an option says otherwise."""
        plain = self.stored is not None and self.stored.plain_inputs and self.config.activations == "auto"
        return self.config.model_copy(update={"activations": "model"}) if plain else self.config

    def quantized_experts(self, path: str, shape: ExpertShape) -> ExpertMethod | None:
        # The others have products of single matrices only.
        plain = self._config.plain_inputs or not multiplies_fp8()
        if plain or self.config.scales == "tensor":
            return None
        if self.stored is None and self.config.scales == "block":
            fits = step_of(shape, BLOCK) >= LEAST_GROUP
            return RoundedBlockFP8Experts(Stored(block=(BLOCK, BLOCK))) if fits else None
        if self.stored is not None and self.stored.blocks:
            outputs, inputs = self.stored.block
            fits = outputs == inputs and step_of(shape, inputs) >= LEAST_GROUP
            return BlockFP8Experts(self.stored) if fits else None
        for linear in linear_shapes(shape, 0):
            linear.check_multiple(MULTIPLE, "quant=fp8", path, self.config.skip if self.stored is None else None)
        return FP8Experts(self.config.fast_accum, self.stored)

    def rounded_head(self, path: str, shape: LinearShape) -> LinearMethod | None:
        return fp8_head(self.config.head, path, shape, self.config)


def fp8_head(head: str, path: str, shape: LinearShape, config: FP8Config | None = None) -> LinearMethod | None:
    """Return the method of Quantizer.table for the value of an option `head`, for a table that is plain in the
    checkpoint. `config`: options of the matmul; None = the defaults."""
    if head != "fp8" or path != "lm_head":
        return None
    if shape.inp % MULTIPLE:
        raise CapabilityError(
            [
                f"quant.head=fp8: {path} has {shape.inp} inputs, which must divide by {MULTIPLE}. "
                "Would work: quant.head=auto"
            ]
        )
    return FP8Head(config or FP8Config())


class FP8Linear(LinearMethod):
    def __init__(self, config: FP8Config) -> None:
        self.fast_accum, self.by_device = config.fast_accum, config.activations == "auto"
        rows = config.scales != "tensor"  # Logits have rows, also beside blocks.
        self.input = PLAIN if config.plain_inputs else FP8_TOKEN if rows else FP8_TENSOR
        self.quantize = quantize_rows if rows else quantize_tensor

    def create(self, shape: LinearShape, device: torch.device) -> dict[str, torch.Tensor]:
        self.dtype = shape.dtype
        if self.by_device and not multiplies_fp8(device):
            self.input = PLAIN
        return {
            "weight": torch.empty(shape.out, shape.inp, dtype=E4M3, device=device),
            "scale": torch.empty(shape.out, dtype=torch.float32, device=device),
            "counts": torch.zeros(MOST_SHARED_TILES, dtype=torch.int32, device=device),
            "one": torch.ones(1, dtype=torch.float32, device=device),
        }

    def load(self, params: dict[str, torch.Tensor], part: slice, tensors: Mapping[str, torch.Tensor]) -> None:
        values_OI, scale_O1 = self.quantize(tensors["weight"].to(params["weight"].device).float())
        params["weight"][part] = values_OI
        params["scale"][part] = scale_O1.squeeze(-1)

    def apply(self, params: dict[str, torch.Tensor], x: Activation, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.input is PLAIN:
            return decoded_matmul(x.values, params["weight"], params["scale"], bias, params["counts"])
        return scaled_matmul(
            x.values, params["weight"], x.scale, params["scale"], bias, self.dtype, params["counts"], self.fast_accum
        )

    def partial(self, params: dict[str, torch.Tensor], x: Activation) -> Partial:
        # In float16 a sum without scales would overflow.
        if self.dtype is torch.bfloat16 and self.input is not PLAIN:
            values = unscaled_matmul(x.values, params["weight"], params["one"], self.fast_accum)
            if values is not None:
                return Partial(values, (x.scale, params["scale"]))
        return Partial(self.apply(params, x))

    def rows(self, params: dict[str, torch.Tensor], ids_T: torch.Tensor) -> torch.Tensor:
        values_TI = params["weight"].view(torch.uint8)[ids_T].view(E4M3)
        return (values_TI.float() * params["scale"][ids_T, None]).to(self.dtype)

    def tunables(self, params: dict[str, torch.Tensor], rows: int, *, defers: bool = False) -> Sequence[Tunable]:
        if self.input is PLAIN:
            return ()
        return matmul_tunables(params["weight"], rows, self.dtype, defers=defers, fast_accum=self.fast_accum)


class FP8Head(FP8Linear):
    """Logits of any vocabulary: the matrix has rows of zeros up to a multiple of MULTIPLE. Their logits are dropped."""

    def create(self, shape: LinearShape, device: torch.device) -> dict[str, torch.Tensor]:
        self.outputs, self.more = shape.out, -shape.out % MULTIPLE
        params = super().create(replace(shape, out=shape.out + self.more), device)
        if self.more:
            params["weight"].view(torch.uint8)[shape.out :] = 0
            params["scale"][shape.out :] = 1.0
        return params

    def apply(self, params: dict[str, torch.Tensor], x: Activation, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not self.more:
            return super().apply(params, x, bias)
        bias = bias if bias is None else pad(bias, (0, self.more))
        return super().apply(params, x, bias)[..., : self.outputs].contiguous()

    def partial(self, params: dict[str, torch.Tensor], x: Activation) -> Partial:
        return Partial(self.apply(params, x))


class StoredFP8Linear(FP8Linear):
    """E4M3 weights of the checkpoint, with one scale per matrix or row.

    Parts of a merged layer keep their scales. Static `input_scale`s are ignored: dynamic scales per token, computed as
    the input is written, are more precise and cost no pass.
    """

    def __init__(self, stored: Stored, config: FP8Config) -> None:
        super().__init__(config)
        self.tensors = records_of(stored)

    def load(self, params: dict[str, torch.Tensor], part: slice, tensors: Mapping[str, torch.Tensor]) -> None:
        scale_O = tensors["weight_scale"].float()
        check_scales("weight_scale", scale_O)
        params["weight"][part] = tensors["weight"]
        params["scale"][part] = scale_O
