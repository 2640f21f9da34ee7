"""Tensors of published layouts: their records, and their codes as [outputs, inputs].

Shapes: O outputs, I inputs, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from dovetail.core.arithmetic import ceil_div
from dovetail.core.errors import TensorError, shown
from dovetail.core.interfaces import LinearShape
from dovetail.core.interfaces.tensor_record import INPUTS, OUTPUTS, Axis, TensorRecord
from dovetail.core.layouts.words import AWQ_4, unpack_words
from dovetail.plugins.quant.int4.checkpoint import Stored

WORDS = (torch.int32,)
INDICES = (torch.int32, torch.int64)
BYTES = (torch.int8,)
ANY_ZERO = (torch.int8, torch.int32, torch.float8_e4m3fn)


def _groups(stored: Stored, shape: LinearShape) -> Axis:
    """Scales of the groups that have columns of this rank; with act-order, any group may have some."""
    if stored.act_order and stored.group:
        return Axis("nothing", entries=ceil_div(shape.whole_inp, stored.group))
    return Axis("inputs", stored.group)


def _packed(stored: Stored, shape: LinearShape) -> tuple[TensorRecord, ...]:
    each = 32 // stored.bits
    unpack = partial(unpack_words, bits=stored.bits)
    outputs, groups = _scales(stored, shape)
    records = [
        TensorRecord("weight_packed", (OUTPUTS, Axis("inputs", packed=each)), WORDS, unpack=partial(unpack, axis=1)),
        # Written for tools that unpack without the model. The other shapes follow from the model's.
        TensorRecord(
            "weight_shape",
            (Axis("nothing", entries=2),),
            INDICES,
            optional=True,
            sources=("weight_shape",),
            combine=lambda tensors, outputs, inputs: tensors["weight_shape"],
            check=_check_shape,
        ),
        *_of_scales(stored, shape),
    ]
    # compressed-tensors packs zeros along outputs, unless there is one for the matrix.
    if stored.zeros and not stored.whole:
        axes = Axis("outputs", packed=each), groups
        records.append(TensorRecord("weight_zero_point", axes, WORDS, unpack=partial(unpack, axis=0)))
    elif stored.zeros:
        records.append(TensorRecord("weight_zero_point", (outputs, groups), BYTES))
    return tuple(records)


def _flat(stored: Stored, shape: LinearShape) -> tuple[TensorRecord, ...]:
    records = [TensorRecord("weight", dtypes=BYTES), *_of_scales(stored, shape)]
    if stored.zeros:
        records.append(TensorRecord("weight_zero_point", _scales(stored, shape), BYTES))
    return tuple(records)


def _scales(stored: Stored, shape: LinearShape) -> tuple[Axis, Axis]:
    """Axes of the scales in the layouts of compressed-tensors."""
    return Axis("outputs", 0) if stored.whole else OUTPUTS, _groups(stored, shape)


def _of_scales(stored: Stored, shape: LinearShape) -> list[TensorRecord]:
    """Records of the tensors that both layouts of compressed-tensors have in common."""
    records = [TensorRecord("weight_scale", _scales(stored, shape))]
    if stored.act_order:
        records.append(TensorRecord("weight_g_idx", (INPUTS,), INDICES))
    if stored.inputs is not None and stored.inputs.static:
        # Inputs have dynamic scales per token, which are at least as precise.
        records.append(TensorRecord("input_scale", (Axis("nothing"),)))
        records.append(TensorRecord("input_zero_point", (Axis("nothing"),), ANY_ZERO, optional=True))
    return records


def _check_shape(tensors: Mapping[str, torch.Tensor], outputs: int, inputs: int) -> None:
    """Raise TensorError unless `weight_shape` is that of the matrix. Values are checked as weights load."""
    found = tensors["weight_shape"]
    if found.shape != (2,) or found.dtype not in INDICES:
        raise TensorError("weight_shape", f"must be two integers; it is {found.dtype} {shown(tuple(found.shape))}")
    if not found.is_meta and found.tolist() != [outputs, inputs]:
        raise TensorError("weight_shape", f"is {found.tolist()}; the matrix has {outputs} outputs, {inputs} inputs")


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
    "packed": _packed,
    "flat": _flat,
    "awq": _awq,
    "gptq": _gptq,
}


def codes_of(
    stored: Stored, tensors: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return (codes uint8 [O, I], scale_OG, zero uint8 [O, G] or None, group of each input [I] or None)."""
    if stored.compressed:
        codes = tensors["weight_packed"] if stored.layout == "packed" else _unsigned("weight", tensors, stored.bits)
        zero = tensors.get("weight_zero_point")
        if zero is not None and zero.dtype is not torch.uint8:  # It is not packed.
            zero = _unsigned("weight_zero_point", tensors, stored.bits)
        return codes, tensors["weight_scale"], zero, tensors.get("weight_g_idx")
    if (bias := tensors.get("bias")) is not None and bias.any():
        raise TensorError("bias", "has values that are not zero, and the model has no bias here")
    zero_OG = tensors["qzeros"].t() + stored.zero_offset
    return tensors["qweight"].t(), tensors["scales"].t(), zero_OG, tensors.get("g_idx")


def _unsigned(name: str, tensors: Mapping[str, torch.Tensor], bits: int) -> torch.Tensor:
    """Return signed integers of so many bits as uint8 codes, larger by half of their range."""
    half, values = 2 ** (bits - 1), tensors[name].short()
    if values.numel() and not -half <= int(values.min()) <= int(values.max()) < half:
        found = shown([int(values.min()), int(values.max())])
        raise TensorError(name, f"has values in {found}; with {bits} bits they are from {-half} to {half - 1}")
    return (values + half).to(torch.uint8)
