"""Weights in 16 bits."""

import torch
import torch.nn.functional as F
from dovetail.core.interfaces import LinearMethod, Quantizer

from dovetail_mine.config import MineConfig


class Linear16(LinearMethod):
    def __init__(self, dtype):
        self.dtype = dtype

    def create(self, shape, device):
        return {"weight": torch.empty(shape.out, shape.inp, dtype=self.dtype, device=device)}

    def load(self, params, part, tensors):
        params["weight"][part] = tensors["weight"].to(params["weight"].device, self.dtype)

    def apply(self, params, x, bias=None):
        return F.linear(x.values, params["weight"].to(x.values.dtype), bias)


class Mine(Quantizer):
    config: MineConfig

    def linear(self, path, shape):
        return Linear16(getattr(torch, self.config.stored))
