"""Activations in E4M3 (Micikevicius et al. 2022) with one scale per token, or one for all: the greatest magnitude maps
to 448.

Shapes: T tokens, C columns.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from dovetail.core.compose.capabilities import FP8_HARDWARE
from dovetail.core.errors import TensorError
from dovetail.core.interfaces import ActFormat
from dovetail.core.ops.formats import triton_encode
from dovetail.core.startup_notes import note

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST = 1e-10
"""Lower bound of a row's magnitude: a row of zeros must not divide by zero."""


def quantize_rows(x_TC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize float32 rows to (E4M3 values, float32 scale_T1)."""
    amax_T1 = x_TC.abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST)
    return (x_TC * (LARGEST / amax_T1)).to(E4M3), amax_T1 / LARGEST


def quantize_blocks(x_OI: torch.Tensor, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a float32 matrix with a scale for each block of `outputs` rows and `inputs` columns (DeepSeek-V3, 2024).
    The last blocks may be smaller. Return (E4M3 values, float32 scale [row blocks, column blocks])."""
    rows, columns = x_OI.shape
    padded = torch.nn.functional.pad(x_OI, (0, -columns % inputs, 0, -rows % outputs))
    blocks = padded.unflatten(1, (-1, inputs)).unflatten(0, (-1, outputs))
    amax = blocks.abs().amax((1, 3), keepdim=True).clamp(min=SMALLEST)
    values = (blocks * (LARGEST / amax)).to(E4M3).flatten(0, 1).flatten(1, 2)
    return values[:rows, :columns].contiguous(), amax[:, 0, :, 0] / LARGEST


def quantize_tensor(x_TC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize with one scale for all rows, repeated for each row."""
    if not x_TC.numel():
        return quantize_rows(x_TC)
    amax_T1 = x_TC.abs().amax().clamp(min=SMALLEST).expand(len(x_TC), 1)
    return (x_TC * (LARGEST / amax_T1)).to(E4M3), (amax_T1 / LARGEST).contiguous()


FP8_TOKEN = ActFormat(
    "fp8_token",
    dtype=E4M3,
    group="token",
    scale_layout="row",
    encode=triton_encode("dovetail.plugins.quant.fp8.kernel:encode_fp8"),
    reference=quantize_rows,
)
FP8_TENSOR = replace(FP8_TOKEN, name="fp8_tensor", group="tensor", reference=quantize_tensor)


def decode_e8m0(name: str, codes: torch.Tensor) -> torch.Tensor:
    """Return the float32 powers of two that uint8 codes stand for: exponents with a bias of 127; 255 is NaN. Raises
    TensorError for that one. `name`: the tensor's."""
    if (codes == 255).any():
        raise TensorError(name, "has values that are not numbers")
    # They are the bits of its exponent, but for 2^-127, a subnormal number. torch.exp2 would be compiled first.
    return (codes.to(torch.int32) << 23).masked_fill(codes == 0, 1 << 22).view(torch.float32)


def multiplies_fp8(device: torch.device | None = None, quant: str = "fp8") -> bool:
    """Whether a device multiplies in FP8; None = the GPU, if there is one. On the CPU the reference does. `quant`: the
    quantizer that a start-up note names."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type != "cuda" or (capability := torch.cuda.get_device_capability(device)) >= FP8_HARDWARE:
        return True
    note(
        f"quant={quant} multiplies in the model's dtype: a GPU of compute capability "
        f"{'.'.join(map(str, capability))} has no FP8 matmuls"
    )
    return False
