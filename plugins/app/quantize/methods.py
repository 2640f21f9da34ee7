"""One block, quantized: scales folded into its norms, then each matrix rounded. Shapes: O outputs, I inputs."""

from __future__ import annotations

import torch

from dovetail.plugins.app.quantize.calibration import BlockStatistics, InputStatistics
from dovetail.plugins.app.quantize.config import QuantizeConfig
from dovetail.plugins.app.quantize.decoder import INPUTS, NORMS
from dovetail.plugins.app.quantize.gptq import gptq
from dovetail.plugins.app.quantize.grid import Grid, Quantized, round_to_nearest, search_clip
from dovetail.plugins.app.quantize.scaling import awq_scale, fold, smooth_scale

Block = dict[str, torch.Tensor]
"""Tensors of a block by their names within it."""


def grid_of(config: QuantizeConfig, dtype: torch.dtype) -> Grid:
    """`dtype`: the model's, that of scales in compressed-tensors."""
    if config.weights in ("w8a8", "fp8"):
        return Grid(8 if config.weights == "w8a8" else 0, 0, True, dtype)
    stored = dtype if config.layout == "compressed-tensors" else torch.float16
    least = 1 if config.layout == "gptq" else 0
    return Grid(4 if config.weights == "w4a16" else 8, config.group, config.symmetric, stored, least)


def quantize_block(
    config: QuantizeConfig, grid: Grid, weights: Block, statistics: BlockStatistics
) -> tuple[dict[str, Quantized], Block]:
    """Return (the quantized matrices by name, the other tensors). Without a calibration, as rtn needs none, the
    statistics are empty. Folded scales replace tensors of `weights`."""
    inputs = dict(statistics.inputs)
    if config.method in ("awq", "smoothquant"):
        for norm, name in zip(NORMS, ("qkv", "gate_up"), strict=True):
            _fold(config, grid, weights, f"{norm}.weight", name, inputs)
    if config.method == "awq":
        _fold(config, grid, weights, "mlp.up_proj.weight", "down", inputs)
    quantized = {
        linear: _round(config, grid, weights[f"{linear}.weight"].float(), inputs.get(name))
        for name, linears in INPUTS.items()
        for linear in linears
    }
    return quantized, {
        name: tensor for name, tensor in weights.items() if name.removesuffix(".weight") not in quantized
    }


def _fold(
    config: QuantizeConfig,
    grid: Grid,
    weights: Block,
    before: str,
    name: str,
    inputs: dict[str, InputStatistics],
) -> None:
    """Divide an input's channels, in the tensor `before` that makes them, and multiply the matrices that read them."""
    found, readers = inputs[name], [f"{linear}.weight" for linear in INPUTS[name]]
    weight_OI = torch.cat([weights[reader].float() for reader in readers])
    if config.method == "awq":
        scale_I = awq_scale(weight_OI, found.gram_II, found.magnitude_I / found.tokens, grid)
    else:
        scale_I = smooth_scale(weight_OI, found.largest_I, config.alpha)
    weights[before], scale_I = fold(weights[before], scale_I)
    if (bias := before.replace(".weight", ".bias")) in weights:
        weights[bias] = fold(weights[bias][:, None], scale_I)[0].squeeze(1)
    for reader in readers:
        weights[reader] = weights[reader].float() * scale_I
    inputs[name] = found.divided(scale_I)


def _round(config: QuantizeConfig, grid: Grid, weight_OI: torch.Tensor, found: InputStatistics | None) -> Quantized:
    if config.method == "gptq":
        assert found is not None
        return gptq(weight_OI, found.gram_II, grid, config.damping, config.act_order)
    if config.method == "awq":
        assert found is not None
        return round_to_nearest(weight_OI, grid, search_clip(weight_OI, grid, found.gram_II))
    return round_to_nearest(weight_OI, grid, search_clip(weight_OI, grid) if config.clip else 1.0)
