"""Grids of quantized weights and rounding to them. Shapes: O outputs, I inputs, G groups of K inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

E4M3 = torch.float8_e4m3fn
LARGEST_E4M3 = 448.0


@dataclass(frozen=True, slots=True)
class Grid:
    """Integers of `bits` bits with a scale for each group of inputs, or E4M3 with a scale for each output."""

    bits: int
    """Bits of an integer; 0 = E4M3."""
    group: int
    """Inputs per scale; 0 = all."""
    symmetric: bool
    scale_dtype: torch.dtype
    least_zero: int = 0
    """Smallest zero point that the layout can store."""

    def size(self, inputs: int) -> int:
        return self.group or inputs

    def grouped(self, weight_OI: torch.Tensor) -> torch.Tensor:
        """Return [O, G, K]. Zeros fill the last group."""
        size = self.size(weight_OI.shape[1])
        return F.pad(weight_OI, (0, -weight_OI.shape[1] % size)).unflatten(1, (-1, size))

    def fit(self, weight_OGK: torch.Tensor, ratio_OG: torch.Tensor | float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (scale, zero), float32 [O, G], so that the range of the weights times `ratio` fills the codes."""
        if not self.bits:
            scale_OG = self._stored(weight_OGK.abs().amax(-1) * ratio_OG / LARGEST_E4M3)
            return scale_OG, torch.zeros_like(scale_OG)
        levels = 2**self.bits - 1
        if self.symmetric:
            scale_OG = self._stored(weight_OGK.abs().amax(-1) * ratio_OG * 2 / levels)
            return scale_OG, torch.full_like(scale_OG, 2 ** (self.bits - 1))
        least_OG = weight_OGK.amin(-1).clamp(max=0) * ratio_OG
        greatest_OG = weight_OGK.amax(-1).clamp(min=0) * ratio_OG
        scale_OG = self._stored((greatest_OG - least_OG) / levels)
        return scale_OG, (-least_OG / scale_OG).round().clamp(self.least_zero, levels)

    def codes(self, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """Return the nearest codes, float32. All arguments have the same shape or broadcast."""
        if not self.bits:
            return (weight / scale).clamp(-LARGEST_E4M3, LARGEST_E4M3).to(E4M3).float()
        return ((weight / scale).round() + zero).clamp(0, 2**self.bits - 1)

    def nearest(self, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """Return the values of the nearest codes."""
        return (self.codes(weight, scale, zero) - zero) * scale

    def _stored(self, scale: torch.Tensor) -> torch.Tensor:
        """Round to the dtype in which scales are stored. A group of zeros has a scale that can divide."""
        tiny = torch.finfo(torch.float16 if self.scale_dtype is torch.float16 else torch.float32).tiny
        return scale.to(self.scale_dtype).float().clamp(min=tiny)


@dataclass(frozen=True, slots=True)
class Quantized:
    """A quantized matrix."""

    grid: Grid
    codes_OI: torch.Tensor
    """uint8; E4M3 values for a grid of E4M3."""
    scale_OG: torch.Tensor
    """In the grid's scale_dtype."""
    zero_OG: torch.Tensor
    """uint8."""
    group_I: torch.Tensor | None = None
    """Group of each input, int32; None = groups of consecutive inputs."""

    @classmethod
    def of(cls, grid: Grid, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> Quantized:
        """Convert float32 codes [O, I], scale and zero [O, G] to their stored dtypes."""
        dtype = torch.uint8 if grid.bits else E4M3
        return cls(grid, codes.to(dtype), scale.to(grid.scale_dtype), zero.to(torch.uint8))

    def groups(self) -> torch.Tensor:
        """Return the group of each input."""
        if self.group_I is not None:
            return self.group_I
        inputs = self.codes_OI.shape[1]
        return torch.arange(inputs, device=self.codes_OI.device) // self.grid.size(inputs)

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights [O, I]."""
        at = self.groups().long()
        return ((self.codes_OI.float() - self.zero_OG[:, at].float()) * self.scale_OG[:, at].float()).to(dtype)


def round_to_nearest(weight_OI: torch.Tensor, grid: Grid, ratio_OG: torch.Tensor | float = 1.0) -> Quantized:
    groups_OGK = grid.grouped(weight_OI)
    scale_OG, zero_OG = grid.fit(groups_OGK, ratio_OG)
    codes_OGK = grid.codes(groups_OGK, scale_OG[..., None], zero_OG[..., None])
    return Quantized.of(grid, codes_OGK.flatten(1)[:, : weight_OI.shape[1]], scale_OG, zero_OG)


def search_clip(
    weight_OI: torch.Tensor, grid: Grid, gram_II: torch.Tensor | None = None, steps: int = 10, least: float = 0.5
) -> torch.Tensor:
    """Return for each group the share of its range [O, G] with the least squared error: of the outputs, group by group,
    for inputs with this Gram matrix, or else of the weights."""
    groups_OGK = grid.grouped(weight_OI)
    best_OG = torch.ones(groups_OGK.shape[:2], device=weight_OI.device)
    least_OG = torch.full_like(best_OG, torch.inf)
    blocks_GKK = None if gram_II is None else _diagonal_blocks(gram_II, groups_OGK.shape[2])
    for step in range(steps):
        ratio = 1.0 - step * (1.0 - least) / steps
        scale_OG, zero_OG = grid.fit(groups_OGK, ratio)
        off_OGK = grid.nearest(groups_OGK, scale_OG[..., None], zero_OG[..., None]) - groups_OGK
        weighted_OGK = off_OGK if blocks_GKK is None else torch.einsum("ogk,gkl->ogl", off_OGK, blocks_GKK)
        error_OG = (weighted_OGK * off_OGK).sum(-1)
        better_OG = error_OG < least_OG
        best_OG[better_OG] = ratio
        least_OG = torch.where(better_OG, error_OG, least_OG)
    return best_OG


def _diagonal_blocks(gram_II: torch.Tensor, size: int) -> torch.Tensor:
    """Return [G, K, K], filled up with zeros."""
    short = -len(gram_II) % size
    gram_II = F.pad(gram_II, (0, short, 0, short))
    starts = range(0, len(gram_II), size)
    return torch.stack([gram_II[start : start + size, start : start + size] for start in starts])
