"""Weight formats that the core brings. Quantizers may create others."""

from __future__ import annotations

from functools import partial

import torch

from dovetail.core.interfaces.weight import ShiftedDecoder, WeightFormat
from dovetail.core.ops.formats import triton_encode

NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Quantiles of the normal distribution (Dettmers et al. 2023)."""
BITSANDBYTES_FP4_VALUES = (
    *(0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0),
    *(-0.0, -0.0625, -8.0, -12.0, -4.0, -6.0, -2.0, -3.0),
)
"""FP4 of bitsandbytes by code, times 12, so that all values are exact in E4M3."""
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def _integer(codes: torch.Tensor, offset: int) -> torch.Tensor:
    return codes.float() - offset


def _chosen(codes: torch.Tensor, values: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(values, device=codes.device)[codes.long()]


def _e4m3(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.float8_e4m3fn).float()


def _decoder(name: str) -> object:
    return triton_encode(f"dovetail.core.ops.kernels.decoders:{name}")


def _shifted_integers(offset: int) -> dict[torch.dtype, ShiftedDecoder]:
    """Decoders of codes of 4 bits less `offset`, to the code plus the constant whose mantissa holds it. In E4M3 a code
    is the subnormal number of the same bits."""
    large, small = _decoder("decode_large_uint4_words"), _decoder("decode_small_uint4_words")
    return {
        torch.bfloat16: ShiftedDecoder(large, 128.0 + offset),
        torch.float16: ShiftedDecoder(large, 1024.0 + offset),
        torch.float8_e4m3fn: ShiftedDecoder(small, float(offset), 2.0**-9),
    }


def _shifted_bytes(offset: int) -> dict[torch.dtype, ShiftedDecoder]:
    """The decoder of codes of a byte less `offset` for scales with more bits than x."""
    return {torch.float32: ShiftedDecoder(_decoder("decode_large_byte_words"), 2.0**15 + offset)}


UINT4 = WeightFormat(
    *("uint4", 4, 4, partial(_integer, offset=0), _decoder("decode_uint4"), _decoder("decode_uint4_words")),
    zero=True,
    e4m3=True,
    shifted=_shifted_integers(0),
)
INT4 = WeightFormat(
    *("int4", 4, 4, partial(_integer, offset=8), _decoder("decode_int4"), _decoder("decode_int4_words")),
    e4m3=True,
    shifted=_shifted_integers(8),
)
"""Codes are offset by 8."""
INT6 = WeightFormat(
    *("int6", 6, 8, partial(_integer, offset=32), _decoder("decode_int6"), _decoder("decode_int6_words")),
    shifted=_shifted_bytes(32),
)
"""Codes are offset by 32, as in Q6_K of GGUF."""
UINT8 = WeightFormat(
    *("uint8", 8, 8, partial(_integer, offset=0), _decoder("decode_uint8"), _decoder("decode_uint8_words")),
    zero=True,
    shifted=_shifted_bytes(0),
)
INT8 = WeightFormat(
    *("int8", 8, 8, partial(_integer, offset=128), _decoder("decode_int8"), _decoder("decode_int8_words")),
    shifted=_shifted_bytes(128),
)
"""Codes are offset by 128."""
E2M1 = WeightFormat(
    "e2m1",
    4,
    4,
    partial(_chosen, values=E2M1_VALUES),
    _decoder("decode_e2m1"),
    _decoder("decode_e2m1_words"),
    e4m3=True,
)
"""FP4, as in NVFP4 and MXFP4."""
NF4 = WeightFormat(
    "nf4", 4, 4, partial(_chosen, values=NF4_VALUES), _decoder("decode_nf4"), _decoder("decode_nf4_words")
)
BITSANDBYTES_FP4 = WeightFormat(
    "bitsandbytes_fp4",
    4,
    4,
    partial(_chosen, values=BITSANDBYTES_FP4_VALUES),
    _decoder("decode_bitsandbytes_fp4"),
    e4m3=True,
)
E4M3 = WeightFormat(
    *("e4m3", 8, 8, _e4m3, _decoder("decode_e4m3_code"), _decoder("decode_e4m3_code_words")),
    e4m3=True,
    narrow_words=True,
)
