"""RMSNorm over all heads of q together, and over those of k (OLMo 2, 2025). Shapes: T tokens, O columns of q|k|v, C
columns of q|k."""

from __future__ import annotations

import torch

from dovetail.core.ops.norm import weigh


def wide_qk_norm(
    qkv_TO: torch.Tensor,
    weight_C: torch.Tensor,
    columns: tuple[int, int],
    eps: float,
    squares_T2: torch.Tensor | None = None,
    whole: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Normalize q and k in place, and return qkv, whose rows are contiguous. v stays as it is.

    `columns`: number of columns of q and of k, which are the first ones. `weight_C`: weights of both, in the dtype of
    qkv or in float32, as in `rms_norm`. Ranks that have some heads each give `squares_T2`, the float32 sums of squares
    of all heads, and `whole`, the numbers of columns of all heads; None = these columns are whole.
    """
    if qkv_TO.is_cuda:
        from dovetail.core.ops.kernels.wide_norm import wide_qk_norm_triton

        return wide_qk_norm_triton(qkv_TO, weight_C, columns, eps, squares_T2, whole)
    return wide_qk_norm_reference(qkv_TO, weight_C, columns, eps, squares_T2, whole)


def wide_qk_norm_reference(
    qkv_TO: torch.Tensor,
    weight_C: torch.Tensor,
    columns: tuple[int, int],
    eps: float,
    squares_T2: torch.Tensor | None = None,
    whole: tuple[int, int] | None = None,
) -> torch.Tensor:
    squares_T2 = sums_of_squares(qkv_TO, columns) if squares_T2 is None else squares_T2
    parts = qkv_TO[:, : sum(columns)].split(columns, dim=1)
    for part, (x_TC, weight, count) in enumerate(zip(parts, weight_C.split(columns), whole or columns, strict=True)):
        mean_T1 = squares_T2[:, part : part + 1] / count
        x_TC.copy_(weigh(x_TC.float() * torch.rsqrt(mean_T1 + eps), weight, x_TC.dtype))
    return qkv_TO


def sums_of_squares(qkv_TO: torch.Tensor, columns: tuple[int, int]) -> torch.Tensor:
    """Return float32 [T, 2]: sums of the squares of q and of k."""
    parts = qkv_TO[:, : sum(columns)].split(columns, dim=1)
    return torch.stack([x_TC.float().square().sum(1) for x_TC in parts], dim=1)
