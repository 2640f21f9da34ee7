"""Quantizer with weights of 3 bits: eight values of the normal distribution, times a scale for each group of 32 inputs.
Inputs are in E4M3, with a power of two per token as their scale.

A checkpoint has `weight_codes`, uint8 [outputs, inputs], and `weight_scale` [outputs, groups]. Plain weights are
rounded as they load. Shapes: T tokens, C columns, O outputs, I inputs, G groups.
"""

from pkgutil import resolve_name

import torch
import torch.nn.functional as F

from dovetail import ConfigError
from dovetail.core.interfaces import ActFormat, Quantizer
from dovetail.core.interfaces.tensor_record import INPUTS, OUTPUTS, Axis, TensorRecord
from dovetail.core.interfaces.weight import WeightFormat
from dovetail.core.layers.packed import PackedLinear
from dovetail_lighthouse.three_bits_checkpoint import reads

VALUES = (-2.0, -1.25, -0.75, -0.25, 0.25, 0.75, 1.25, 2.0)
"""Exact in bfloat16 and in E4M3."""
GROUP = 32


def kernel(name):
    """Return a Triton function; None without Triton, where the references run."""
    try:
        return resolve_name(f"dovetail_lighthouse.three_bits_kernels:{name}")
    except ModuleNotFoundError:
        return None


def values_of(codes):
    return torch.tensor(VALUES, device=codes.device)[codes.long()]


def encode_power(x_TC):
    """Return (E4M3 values, scale float32 [T, 1]); the largest magnitude of a row becomes at most 256."""
    scale_T1 = torch.exp2(x_TC.abs().amax(-1, keepdim=True).clamp(min=1e-10).log2().ceil() - 8)
    return (x_TC / scale_T1).to(torch.float8_e4m3fn), scale_T1


# A code takes 4 bits in memory: the core packs 4 or 8.
THREE_BITS = WeightFormat("lighthouse_3", 3, 4, values_of, kernel("decode_three_bits"), e4m3=True)
POWER = ActFormat(
    "lighthouse_power",
    dtype=torch.float8_e4m3fn,
    group="token",
    scale_layout="row",
    encode=kernel("encode_power"),
    reference=encode_power,
)


class ThreeBits(Quantizer):
    stored = False

    def read_checkpoint(self, checkpoint):
        hf = checkpoint.config()
        self.stored = reads(hf)
        if not self.stored and hf.get("quantization_config") is not None:
            raise ConfigError("quant=three_bits reads plain weights, and checkpoints with quant_method lighthouse")

    def linear(self, path, shape):
        return StoredThreeBits() if self.stored else RoundedThreeBits()


class ThreeBitsLinear(PackedLinear):
    def __init__(self):
        super().__init__(THREE_BITS, GROUP, activations=POWER)


class RoundedThreeBits(ThreeBitsLinear):
    def load(self, params, part, tensors):
        weight_OI = tensors["weight"].to(params["codes"].device).float()
        self.store(params, part, *round_weights(weight_OI, self.step))


class StoredThreeBits(ThreeBitsLinear):
    tensors = (
        TensorRecord("weight_codes", (OUTPUTS, INPUTS), (torch.uint8,)),
        TensorRecord("weight_scale", (OUTPUTS, Axis("inputs", GROUP))),
    )

    def load(self, params, part, tensors):
        if (tensors["weight_codes"] > 7).any():
            raise ConfigError("weight_codes has codes of more than 3 bits")
        self.store(params, part, tensors["weight_codes"], self.shape.spread_groups(tensors["weight_scale"], GROUP))


def round_weights(weight_OI, group):
    """Return (codes uint8 [O, I], scale_OG): the nearest values, relative to each group's standard deviation."""
    inputs = weight_OI.shape[1]
    blocks_OGK = F.pad(weight_OI, (0, -inputs % group)).unflatten(1, (-1, group))
    scale_OG = blocks_OGK.square().mean(-1).sqrt().clamp(min=1e-10)
    values = torch.tensor(VALUES, device=weight_OI.device)
    codes = torch.bucketize(blocks_OGK / scale_OG.unsqueeze(-1), (values[1:] + values[:-1]) / 2)
    return codes.flatten(1)[:, :inputs].to(torch.uint8), scale_OG
