"""Values, formats and comparisons of the contract suite for collectives."""

from __future__ import annotations

import torch

from dovetail.core.interfaces import PLAIN, ActFormat, Activation
from dovetail.core.layers import RMSNorm
from dovetail.core.ops.norm import rms_norm_reference

SHAPES = ((1,), (7,), (3, 5), (2, 3, 4), (64, 33))
DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def by_column(x_TC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale_TG = x_TC.unflatten(1, (-1, 16)).abs().amax(-1)
    return x_TC / scale_TG.repeat_interleave(16, 1), scale_TG


HALVED = ActFormat("halved", reference=lambda x_TC: (x_TC / 2, x_TC.new_full((len(x_TC), 1), 2.0)))
BY_COLUMN = ActFormat("by_column", group=16, scale_layout="column", reference=by_column)
LOUDEST = ActFormat("loudest", group="tensor", reference=lambda x_TC: (x_TC / x_TC.abs().max(), x_TC.abs().max()[None]))
STATIC = ActFormat(
    "static",
    dtype=torch.float8_e4m3fn,
    group="tensor",
    static_scale=torch.full((1,), 4.0),
    reference=lambda x_TC: (x_TC / 4, None),
)
"""Test formats, one for each scale layout."""


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return a rank's input; every rank can compute it. Magnitudes vary, so bits depend on the order of a sum."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if not dtype.is_floating_point:
        return torch.randint(-(10**6), 10**6, shape, generator=generator, dtype=dtype)
    scale = 10.0 ** torch.randint(-3, 4, shape, generator=generator)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def bits_of(x: torch.Tensor) -> bytes:
    return bytes(x.cpu().contiguous().view(torch.uint8).reshape(-1).tolist())


def decoded(x: Activation) -> torch.Tensor:
    values_TC = x.values.cpu().float()
    if x.scale is None:
        return values_TC
    scale = x.scale.cpu().float()
    return values_TC * scale.repeat_interleave(values_TC.shape[-1] // scale.shape[-1], -1)


def normed(x_TC: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    return rms_norm_reference(x_TC, None, norm.weight.cpu(), norm.eps)[0][PLAIN].values


def assert_close_rows(found: torch.Tensor, expected: torch.Tensor, what: str, rtol: float = 1e-4) -> None:
    assert found.shape == expected.shape, f"{what}: expected shape {tuple(expected.shape)}, got {tuple(found.shape)}"
    assert torch.allclose(found, expected, rtol=rtol, atol=1e-4), f"{what}: expected {expected}, got {found}"
