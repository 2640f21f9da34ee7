"""Linear layer with a packed weight, for quantizers with any WeightFormat. Shapes: T tokens, I input, O output, G
groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces import PLAIN, ActFormat, Activation, LinearMethod, LinearShape
from dovetail.core.interfaces.tuning import Tunable
from dovetail.core.interfaces.weight import PackedWeight, WeightFormat
from dovetail.core.ops.matmul import device_facts
from dovetail.core.ops.packed_matmul import packed_matmul, packed_rows, reserve, round_weight, sums_for
from dovetail.core.ops.packing import SCALES, empty_by_group, pack, pack_scales, scales_to_round, words_of_row
from dovetail.core.ops.tiles import MOST_SHARED_TILES
from dovetail.core.tuning.packed_matmul import packed_tunables


class PackedLinear(LinearMethod):
    """Base of methods that convert checkpoint tensors to a WeightFormat: `load` calls `store`."""

    exact = False
    """Whether matmuls of many rows in E4M3 multiply the weight as it is. Otherwise one of 4 bits is rounded to E4M3
    once more, which is faster (`PackedWeight.rounded_scale`). A quantizer sets it before `create`."""
    kept = False
    """Whether the rounded weight is kept in memory beside the codes, so that many rows are as fast as those of fp8."""

    def __init__(
        self,
        fmt: WeightFormat,
        group: int,
        *,
        activations: ActFormat = PLAIN,
        scale_dtype: torch.dtype | None = None,
        zero_dtype: torch.dtype = torch.uint8,
        row_scale: bool = False,
    ) -> None:
        """`group`: inputs of the whole matrix that share a scale; 0 = all. `scale_dtype`: None = the model's dtype."""
        self.format, self.group, self.input = fmt, group, activations
        self.activations = activations
        """Input format without the order that `prepare` may give its columns (act-order). Experts that are stacked get
        their inputs in it if `input` has an order, and else in `input`."""
        self.scale_dtype, self.zero_dtype, self.row_scale = scale_dtype, zero_dtype, row_scale

    def create(self, shape: LinearShape, device: torch.device) -> dict[str, torch.Tensor]:
        self.prepare(shape, device)
        self._reserve(device)
        params = self.allocate(device) | {"counts": torch.zeros(MOST_SHARED_TILES, dtype=torch.int32, device=device)}
        if self._rounds:
            params["rounded_scale"] = torch.ones(shape.out, dtype=torch.float32, device=device)
            if self.kept:
                params["rounded"] = torch.empty(shape.out, self.width, dtype=torch.float8_e4m3fn, device=device)
        if self.input.dtype is torch.float8_e4m3fn and device.type == "cuda" and device_facts(device)[2]:
            self.sums = sums_for(self.packed(params))
        return params

    @property
    def _rounds(self) -> bool:
        """Whether many rows round the weight once more. The library multiplies E4M3 in steps of 16."""
        short = self.format.stored_bits == 4 and self.input.dtype is torch.float8_e4m3fn
        return short and not self.exact and self.width % 16 == self.shape.out % 16 == 0

    def prepare(self, shape: LinearShape, device: torch.device) -> None:
        """Set what depends on the shape. A subclass may choose its input format here: routed experts call this and
        `allocate` instead of `create`."""
        self.shape, self.dtype = shape, shape.dtype
        self.width, self.step = self.columns(shape)

    def allocate(
        self, device: torch.device, experts: int | None = None, rows: int | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the uninitialized tensors of a matrix, or those of so many experts, with a dimension for these. Scales
        in E4M3 are in words (core.ops.packing), unless there are zeros. `rows`: None = the shape's outputs."""
        rows = self.shape.out if rows is None else rows
        outputs = (rows,) if experts is None else (experts, rows)
        groups = ceil_div(self.width, self.step) if self.step else 1
        words = words_of_row(self.width, self.format.stored_bits)
        scales, columns = self.scale_dtype or self.dtype, groups
        # Kernels read zeros in the order of scales.
        if scales is torch.float8_e4m3fn and not self.format.zero:
            scales, columns = torch.int32, ceil_div(groups, SCALES)
        params = {
            "codes": torch.empty(*outputs, words, dtype=torch.int32, device=device),
            "scale": empty_by_group(*outputs, columns, dtype=scales, device=device),
        }
        if self.format.zero:
            params["zero"] = empty_by_group(*outputs, groups, dtype=self.zero_dtype, device=device)
        if self.row_scale:
            params["row_scale"] = torch.empty(*outputs, dtype=torch.float32, device=device)
        return params

    def finish(self, params: dict[str, torch.Tensor]) -> None:
        # By now the layer with the largest weight has been built, and this one's first workspace may be freed.
        self._reserve(params["codes"].device)
        if self._rounds:
            packed = self.packed(params)
            params["rounded_scale"].copy_(scales_to_round(packed))
            if self.kept:
                round_weight(packed, params["rounded"])

    def _reserve(self, device: torch.device) -> None:
        if device.type == "cuda":
            self._workspace = reserve(self.shape.out, self.width, self.dtype, device)

    def columns(self, shape: LinearShape) -> tuple[int, int]:
        """Return this rank's stored columns, and how many of them share a scale."""
        return shape.inp, shape.group_step(self.group)

    def store(
        self,
        params: dict[str, torch.Tensor],
        part: slice,
        codes_OI: torch.Tensor,
        scale_OG: torch.Tensor,
        zero_OG: torch.Tensor | None = None,
        row_scale_O: torch.Tensor | None = None,
    ) -> None:
        """Pack this rank's share of a part. `scale_OG` and `zero_OG` have one entry for each step of columns."""
        device = params["codes"].device
        params["codes"][part] = pack(codes_OI.to(device), self.format.stored_bits)
        if params["scale"].dtype is torch.int32:
            scale_OG = pack_scales(scale_OG.to(device, torch.float8_e4m3fn))
        for name, values in (("scale", scale_OG), ("zero", zero_OG)):
            if values is not None:
                params[name][part] = values.to(device, params[name].dtype)
        if row_scale_O is not None:
            params["row_scale"][part] = row_scale_O.to(device)

    def packed(self, params: Mapping[str, torch.Tensor]) -> PackedWeight:
        return PackedWeight(
            self.format,
            self.width,
            self.step,
            params["codes"],
            params["scale"],
            params.get("zero"),
            params.get("row_scale"),
            params.get("rounded_scale"),
            params.get("rounded"),
        )

    def apply(self, params: dict[str, torch.Tensor], x: Activation, bias: torch.Tensor | None = None) -> torch.Tensor:
        return packed_matmul(x.values, self.packed(params), bias, self.dtype, x.scale, params["counts"], x.sums)

    def tunables(self, params: dict[str, torch.Tensor], rows: int, *, defers: bool = False) -> Sequence[Tunable]:
        e4m3 = self.input.dtype is torch.float8_e4m3fn
        return packed_tunables(self.packed(params), rows, self.dtype, e4m3=e4m3)

    def rows(self, params: dict[str, torch.Tensor], ids_T: torch.Tensor) -> torch.Tensor:
        return packed_rows(self.packed(params), ids_T, self.dtype)
