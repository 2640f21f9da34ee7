"""quant=fp8: W8A8 in E4M3, from plain weights quantized at load time or from an FP8 checkpoint. On GPUs without FP8
matmuls, and with quant.activations=plain, inputs stay plain (W8A16).

Shapes: T tokens, I input, O output.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch

import torch

from dovetail.core.compose.capabilities import FP8_HARDWARE
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import PLAIN, Activation, Checkpoint, LinearMethod, LinearShape, Partial, Quantizer
from dovetail.core.interfaces.tuning import Tunable
from dovetail.core.layers.plain import PlainLinear
from dovetail.core.ops import decoded_matmul, scaled_matmul, unscaled_matmul
from dovetail.core.ops.tiles import MOST_SHARED_TILES
from dovetail.core.startup_notes import note
from dovetail.core.tuning.matmul import matmul_tunables
from dovetail.plugins.quant.config import FP8Config
from dovetail.plugins.quant.fp8.checkpoint import KV_TENSORS, Stored, read_stored
from dovetail.plugins.quant.fp8.format import E4M3, FP8_TENSOR, FP8_TOKEN, quantize_rows, quantize_tensor

MULTIPLE = 16
"""cuBLAS and CUTLASS need FP8 matrices whose dimensions are multiples of this."""


class FP8(Quantizer):
    config: FP8Config
    stored: Stored | None = None

    def read_checkpoint(self, checkpoint: Checkpoint) -> None:
        self.stored = read_stored(checkpoint.config())
        if self.stored is not None and self.config.skip:
            raise ConfigError("quant.skip keeps layers plain, but this checkpoint is in FP8: set quant.skip=[]")
        if self.stored is not None and self.stored.kv_scales:
            self.kv_scale_tensors = KV_TENSORS

    def linear(self, path: str, shape: LinearShape) -> LinearMethod:
        if any(fnmatch(path, pattern) for pattern in self.config.skip):
            return PlainLinear()
        if self.stored is not None and self.stored.skips(shape.names, path):
            return PlainLinear()
        shape.check_multiple(MULTIPLE, "quant=fp8", path, self.config.skip if self.stored is None else None)
        if self.stored is not None:
            return StoredFP8Linear(path, self.stored.input_scales, self.config)
        return FP8Linear(self.config)


class FP8Linear(LinearMethod):
    def __init__(self, config: FP8Config) -> None:
        self.fast_accum, self.by_device = config.fast_accum, config.activations == "auto"
        rows = config.scales == "row"
        self.input = PLAIN if config.activations == "plain" else FP8_TOKEN if rows else FP8_TENSOR
        self.quantize = quantize_rows if rows else quantize_tensor

    def create(self, shape: LinearShape, device: torch.device) -> dict[str, torch.Tensor]:
        self.dtype = shape.dtype
        if self.by_device and not _multiplies_fp8(device):
            self.input = PLAIN
        return {
            "weight": torch.empty(shape.out, shape.inp, dtype=E4M3, device=device),
            "scale": torch.empty(shape.out, dtype=torch.float32, device=device),
            "counts": torch.zeros(MOST_SHARED_TILES, dtype=torch.int32, device=device),
            "one": torch.ones(1, dtype=torch.float32, device=device),
        }

    def load(self, params: dict[str, torch.Tensor], name: str, part: slice, tensor: torch.Tensor) -> None:
        values_OI, scale_O1 = self.quantize(tensor.to(params["weight"].device).float())
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

    def tunables(self, params: dict[str, torch.Tensor], rows: int, *, defers: bool = False) -> Sequence[Tunable]:
        if self.input is PLAIN:
            return ()
        return matmul_tunables(params["weight"], rows, self.dtype, defers=defers, fast_accum=self.fast_accum)


def _multiplies_fp8(device: torch.device) -> bool:
    """Whether this device multiplies in FP8. On the CPU the reference does."""
    if device.type != "cuda" or (capability := torch.cuda.get_device_capability(device)) >= FP8_HARDWARE:
        return True
    note(
        f"quant=fp8 has FP8 weights and multiplies in the model's dtype: a GPU of compute capability "
        f"{'.'.join(map(str, capability))} has no FP8 matmuls"
    )
    return False


class StoredFP8Linear(FP8Linear):
    """E4M3 weights of the checkpoint, with one scale per matrix or row.

    Parts of a merged layer keep their scales. Static `input_scale`s are ignored: dynamic scales per token, computed as
    the input is written, are more precise and cost no pass.
    """

    def __init__(self, path: str, input_scales: bool, config: FP8Config) -> None:
        super().__init__(config)
        self.path = path
        self.tensors = ("weight", "weight_scale", "input_scale") if input_scales else ("weight", "weight_scale")

    def load(self, params: dict[str, torch.Tensor], name: str, part: slice, tensor: torch.Tensor) -> None:
        if name == "weight":
            if tensor.dtype is not E4M3:
                raise ConfigError(
                    f"{self.path}: its weight is {tensor.dtype} in the checkpoint; config.json makes it {E4M3}"
                )
            params["weight"][part] = tensor
        elif name == "weight_scale":
            scale = tensor.float().flatten()
            if len(scale) not in (1, part.stop - part.start) or not (scale.isfinite() & (scale > 0)).all():
                raise ConfigError(
                    f"{self.path}: weight_scale must be one positive number, or one for each of its "
                    f"{part.stop - part.start} rows; it is {tuple(tensor.shape)}, from {scale.min():g}"
                )
            params["scale"][part] = scale
