"""Tensors of published layouts: their records, and their codes as [outputs, inputs].

Shapes: O outputs, I inputs, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from dovetail.core.arithmetic import ceil_div
from dovetail.core.errors import TensorError
from dovetail.core.interfaces import LinearShape
from dovetail.core.interfaces.tensor_record import INPUTS, OUTPUTS, Axis, TensorRecord
from dovetail.core.layouts.words import AWQ_4, unpack_words
from dovetail.plugins.quant.int4.checkpoint import Stored

WORDS = (torch.int32,)
INDICES = (torch.int32, torch.int64)


def _groups(stored: Stored, shape: LinearShape) -> Axis:
    """Scales of the groups that have columns of this rank; with act-order, any group may have some."""
    if stored.act_order and stored.group:
        return Axis("nothing", entries=ceil_div(shape.whole_inp, stored.group))
    return Axis("inputs", stored.group)


def _compressed_tensors(stored: Stored, shape: LinearShape) -> tuple[TensorRecord, ...]:
    each, groups = 32 // stored.bits, _groups(stored, shape)
    unpack = partial(unpack_words, bits=stored.bits)
    records = [
        TensorRecord("weight_packed", (OUTPUTS, Axis("inputs", packed=each)), WORDS, unpack=partial(unpack, axis=1)),
        TensorRecord("weight_scale", (OUTPUTS, groups)),
        TensorRecord("weight_shape", (Axis("nothing", entries=2),), INDICES, optional=True),
    ]
    if stored.zeros:
        axes = Axis("outputs", packed=each), groups
        records.append(TensorRecord("weight_zero_point", axes, WORDS, unpack=partial(unpack, axis=0)))
    if stored.act_order:
        records.append(TensorRecord("weight_g_idx", (INPUTS,), INDICES))
    return tuple(records)


def _awq(stored: Stored, shape: LinearShape) -> tuple[TensorRecord, ...]:
    groups, outputs = _groups(stored, shape), Axis("outputs", packed=8)
    unpack = partial(unpack_words, bits=4, axis=1, order=AWQ_4)
    return (
        TensorRecord("qweight", (INPUTS, outputs), WORDS, unpack=unpack),
        TensorRecord("qzeros", (groups, outputs), WORDS, unpack=unpack),
        TensorRecord("scales", (groups, OUTPUTS)),
    )


def _gptq(stored: Stored, shape: LinearShape) -> tuple[TensorRecord, ...]:
    each, groups = 32 // stored.bits, _groups(stored, shape)
    unpack = partial(unpack_words, bits=stored.bits)
    inputs, outputs = Axis("inputs", packed=each), Axis("outputs", packed=each)
    return (
        TensorRecord("qweight", (inputs, OUTPUTS), WORDS, unpack=partial(unpack, axis=0)),
        TensorRecord("qzeros", (groups, outputs), WORDS, unpack=partial(unpack, axis=1)),
        TensorRecord("scales", (groups, OUTPUTS)),
        TensorRecord("g_idx", (INPUTS,), INDICES, optional=not stored.act_order),
        # AutoGPTQ writes zeros for layers that have no bias.
        TensorRecord("bias", (OUTPUTS,), optional=True),
    )


RECORDS: dict[str, Callable[[Stored, LinearShape], tuple[TensorRecord, ...]]] = {
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
}


def codes_of(
    stored: Stored, tensors: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return (codes uint8 [O, I], scale_OG, zero uint8 [O, G] or None, group of each input [I] or None)."""
    if stored.layout == "compressed-tensors":
        found = tensors["weight_packed"], tensors["weight_scale"], tensors.get("weight_zero_point")
        return *found, tensors.get("weight_g_idx")
    if (bias := tensors.get("bias")) is not None and bias.any():
        raise TensorError("bias", "has values that are not zero, and the model has no bias here")
    zero_OG = tensors["qzeros"].t() + stored.zero_offset
    return tensors["qweight"].t(), tensors["scales"].t(), zero_OG, tensors.get("g_idx")
