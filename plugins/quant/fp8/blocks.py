"""E4M3 weights with a scale for each block of outputs and inputs (DeepSeek-V3, 2024, 128 x 128).

Inputs have a scale per token, not one per 128 columns as in the source: a whole row in E4M3 loses little, and the
matmul applies it once.

Shapes: T tokens, I input, O output, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dovetail.core.arithmetic import ceil_div
from dovetail.core.errors import TensorError
from dovetail.core.interfaces import PLAIN, Activation, LinearMethod, LinearShape
from dovetail.core.interfaces.tensor_record import PLAIN_WEIGHT, Axis, TensorRecord
from dovetail.core.interfaces.tuning import Tunable
from dovetail.core.layers.packed import PackedLinear
from dovetail.core.ops import block_scaled_matmul, weight_formats
from dovetail.core.ops.tile_choice import BLOCK
from dovetail.core.ops.tiles import MOST_SHARED_TILES
from dovetail.core.tuning.matmul import matmul_tunables
from dovetail.plugins.quant.config import FP8Config
from dovetail.plugins.quant.fp8.checkpoint import Stored
from dovetail.plugins.quant.fp8.experts import check_scales
from dovetail.plugins.quant.fp8.format import E4M3, FP8_TOKEN, decode_e8m0, multiplies_fp8, quantize_blocks

MULTIPLE = 16
"""Columns of a share that the block matmul can read: rows of whole 16 bytes."""


def stored_blocks(stored: Stored, config: FP8Config, shape: LinearShape) -> LinearMethod:
    """Return the method that reads `stored`."""
    return (BlockFP8Linear if _whole(stored, config, shape) else SpreadBlockFP8Linear)(stored, config)


def rounded_blocks(blocks: Stored, config: FP8Config, shape: LinearShape) -> LinearMethod:
    """Return the method that quantizes plain weights to such blocks."""
    return (RoundedBlockFP8Linear if _whole(blocks, config, shape) else RoundedSpreadBlockFP8Linear)(blocks, config)


def _whole(stored: Stored, config: FP8Config, shape: LinearShape) -> bool:
    """Whether blocks of this share are those of the block matmul: BLOCK x BLOCK, and every part, this rank's outputs
    and its columns begin with one."""
    begins = shape.parts if shape.shard == "column" else shape.parts[:-1]
    starts = (*begins, shape.group_step(BLOCK))
    whole = stored.block == (BLOCK, BLOCK) and all(start % BLOCK == 0 for start in starts)
    return whole and shape.inp % MULTIPLE == 0 and not config.plain_inputs and multiplies_fp8()


def _records(stored: Stored) -> tuple[TensorRecord, ...]:
    outputs, inputs = stored.block
    axes = Axis("outputs", outputs), Axis("inputs", inputs)
    scales = TensorRecord(stored.scale, axes, (torch.uint8,) if stored.exponents else ())
    return TensorRecord("weight", dtypes=(E4M3,)), scales


def _scales(stored: Stored, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return positive float32 scales [O, G]."""
    name = stored.scale
    scale_OG = decode_e8m0(name, tensors[name]) if stored.exponents else tensors[name].float()
    check_scales(name, scale_OG)
    return scale_OG


class BlockFP8Linear(LinearMethod):
    """E4M3 weights of the checkpoint, with a scale for each BLOCK x BLOCK."""

    input = FP8_TOKEN

    def __init__(self, stored: Stored, config: FP8Config) -> None:
        self.stored, self.tensors = stored, _records(stored)

    def create(self, shape: LinearShape, device: torch.device) -> dict[str, torch.Tensor]:
        self.dtype = shape.dtype
        blocks = ceil_div(shape.out, BLOCK), ceil_div(shape.inp, BLOCK)
        return {
            "weight": torch.empty(shape.out, shape.inp, dtype=E4M3, device=device),
            "scale": torch.empty(blocks, dtype=torch.float32, device=device),
            "counts": torch.zeros(MOST_SHARED_TILES, dtype=torch.int32, device=device),
        }

    def load(self, params: dict[str, torch.Tensor], part: slice, tensors: Mapping[str, torch.Tensor]) -> None:
        scale_OG = _scales(self.stored, tensors)
        of_blocks = scale_OG[::BLOCK]
        if not torch.equal(of_blocks.repeat_interleave(BLOCK, 0)[: len(scale_OG)], scale_OG):
            raise TensorError(self.stored.scale, f"differs within {BLOCK} outputs as this model orders them")
        self._store(params, part, tensors["weight"], of_blocks)

    def _store(self, params: dict[str, torch.Tensor], part: slice, weight: torch.Tensor, scale: torch.Tensor) -> None:
        params["weight"][part] = weight
        params["scale"][part.start // BLOCK : ceil_div(part.stop, BLOCK)] = scale

    def apply(self, params: dict[str, torch.Tensor], x: Activation, bias: torch.Tensor | None = None) -> torch.Tensor:
        weight, scale, counts = params["weight"], params["scale"], params["counts"]
        return block_scaled_matmul(x.values, weight, x.scale, scale, bias, self.dtype, counts)

    def rows(self, params: dict[str, torch.Tensor], ids_T: torch.Tensor) -> torch.Tensor:
        values_TI = params["weight"].view(torch.uint8)[ids_T].view(E4M3)
        scale_TI = params["scale"][ids_T // BLOCK].repeat_interleave(BLOCK, 1)[:, : values_TI.shape[1]]
        return (values_TI.float() * scale_TI).to(self.dtype)

    def tunables(self, params: dict[str, torch.Tensor], rows: int, *, defers: bool = False) -> Sequence[Tunable]:
        return matmul_tunables(params["weight"], rows, self.dtype, kind="fp8_block")


class RoundedBlockFP8Linear(BlockFP8Linear):
    """The same from plain weights, which are quantized as they load."""

    def __init__(self, stored: Stored, config: FP8Config) -> None:
        """`stored`: the blocks to make."""
        super().__init__(stored, config)
        self.tensors = (PLAIN_WEIGHT,)

    def load(self, params: dict[str, torch.Tensor], part: slice, tensors: Mapping[str, torch.Tensor]) -> None:
        weight_OI = tensors["weight"].to(params["weight"].device).float()
        self._store(params, part, *quantize_blocks(weight_OI, BLOCK, BLOCK))


class SpreadBlockFP8Linear(PackedLinear):
    """E4M3 weights of the checkpoint, with a scale for each block of outputs and inputs, of any size (MXFP8, 1 x 32,
    with scales in E8M0). Each output has its scales in memory, so parts and ranks may begin inside a block."""

    def __init__(self, stored: Stored, config: FP8Config) -> None:
        outputs, inputs = stored.block
        activations = PLAIN if config.plain_inputs else FP8_TOKEN
        # Powers of two are exact in bfloat16.
        scale_dtype = torch.bfloat16 if stored.exponents else torch.float32
        super().__init__(weight_formats.E4M3, inputs, activations=activations, scale_dtype=scale_dtype)
        self.stored, self.by_device = stored, config.activations == "auto"
        self.tensors = _records(stored)

    def prepare(self, shape: LinearShape, device: torch.device) -> None:
        super().prepare(shape, device)
        if self.by_device and not multiplies_fp8(device):
            self.input = PLAIN

    def load(self, params: dict[str, torch.Tensor], part: slice, tensors: Mapping[str, torch.Tensor]) -> None:
        scale_OG = _scales(self.stored, tensors)
        self.store(params, part, tensors["weight"].view(torch.uint8), self.shape.spread_groups(scale_OG, self.group))


class RoundedSpreadBlockFP8Linear(SpreadBlockFP8Linear):
    """The same from plain weights, which are quantized as they load. Blocks begin at the first output of a part, and at
    this rank's first output and input."""

    def __init__(self, stored: Stored, config: FP8Config) -> None:
        """`stored`: the blocks to make."""
        super().__init__(stored, config)
        self.tensors = (PLAIN_WEIGHT,)

    def load(self, params: dict[str, torch.Tensor], part: slice, tensors: Mapping[str, torch.Tensor]) -> None:
        weight_OI, (outputs, _) = tensors["weight"].to(params["codes"].device).float(), self.stored.block
        codes_OI, scale_OG = quantize_blocks(weight_OI, outputs, self.step)
        scale_OG = scale_OG.repeat_interleave(outputs, 0)[: len(weight_OI)]
        self.store(params, part, codes_OI.view(torch.uint8), scale_OG)
