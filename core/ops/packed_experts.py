"""Products of routed experts whose matrices are packed in 4 bits, with an exponent for each block of 32 inputs (MXFP4,
Open Compute Project, Microscaling Formats 1.0). They are decoded as they are read, and stay packed in memory.

Eight codes share an int32 word. A row is cut into spans of 32 words, and at its end of 16, 8 and 4, so that none is
filled up: code j of word w of a span of n words is its input n j + w. The same bits of a span's words are consecutive
inputs of one block, as in core.ops.packing, and a kernel that decodes them needs no exchange between threads. The
exponents of a span, of which there are 8 at most, share an int64.

Shapes: T tokens, E experts, C hidden channels, F channels of an expert, O outputs, I inputs; W words, G blocks and S
spans of a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dovetail.core.interfaces.activation import PLAIN, ActFormat, Activation
from dovetail.core.interfaces.expert import ExpertBias, GatedActivation, Routing
from dovetail.core.interfaces.weight import WeightFormat
from dovetail.core.ops.experts import ExpertWeights, gated_experts_reference

BLOCK = 32
"""Inputs of a block, which share an exponent."""
EACH = 8
"""Codes of a word."""
SPANS = (32, 16, 8, 4)
"""Words of a span."""
BIAS = 127
"""Stored exponent of 2^0."""
MOST_EXPONENT = BIAS + 65
"""Highest exponent that all kernels apply; they round weights below 2^-66."""


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Matrices of a layer's experts. Codes are in int32 and exponents in int64; none is above MOST_EXPONENT."""

    format: WeightFormat
    up: torch.Tensor
    """[E, 2F, C / 8]: gate, then up."""
    down: torch.Tensor
    """[E, C, F / 8]"""
    up_exponents: torch.Tensor
    """[E, S, 2F]: those of consecutive outputs are loaded together."""
    down_exponents: torch.Tensor
    """[E, S, C]"""


def spans(inputs: int) -> Iterator[tuple[int, int]]:
    """Yield (first input, words) of each span of a row."""
    start = 0
    for words in SPANS:
        while inputs - start >= EACH * words:
            yield start, words
            start += EACH * words


def _equal_spans(inputs: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first input, end, words of a span) of each run of spans of one size."""
    for count, run in itertools.groupby(spans(inputs), key=lambda span: span[1]):
        starts = [start for start, _ in run]
        yield starts[0], starts[-1] + EACH * count, count


def pack_row_spans(codes_OI: torch.Tensor) -> torch.Tensor:
    """Pack codes of 4 bits, uint8 [O, I], into int32 [O, W]. I is a multiple of BLOCK."""
    packed = []
    for start, end, count in _equal_spans(codes_OI.shape[1]):
        codes = codes_OI[:, start:end].unflatten(1, (-1, EACH, count))
        octets = codes[:, :, 0::2] | codes[:, :, 1::2] << 4
        packed.append(octets.transpose(2, 3).flatten(1).view(torch.int32))
    return torch.cat(packed, 1)


def unpack_row_spans(words_OW: torch.Tensor) -> torch.Tensor:
    """Return the codes uint8 [O, I]."""
    codes_OI = words_OW.new_empty(len(words_OW), EACH * words_OW.shape[1], dtype=torch.uint8)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words_OW.device)[:, None]
    for start, count in spans(codes_OI.shape[1]):
        words = words_OW[:, start // EACH : start // EACH + count]
        codes_OI[:, start : start + EACH * count] = ((words[:, None] >> shifts) & 15).flatten(1)
    return codes_OI


def pack_exponents(exponents_OG: torch.Tensor) -> torch.Tensor:
    """Pack uint8 exponents into int64 [S, O]."""
    packed = []
    for start, end, count in _equal_spans(BLOCK * exponents_OG.shape[1]):
        of_spans = exponents_OG[:, start // BLOCK : end // BLOCK].unflatten(1, (-1, EACH * count // BLOCK))
        packed.append(F.pad(of_spans, (0, 8 - of_spans.shape[-1])).view(torch.int64).flatten(1))
    return torch.cat(packed, 1).T


def unpack_exponents(packed_SO: torch.Tensor, inputs: int) -> torch.Tensor:
    """Return the exponents uint8 [O, G]."""
    exponents = []
    for packed_O, (_, count) in zip(packed_SO, spans(inputs), strict=True):
        shifts = 8 * torch.arange(EACH * count // BLOCK, device=packed_SO.device)
        exponents.append(((packed_O[:, None] >> shifts) & 255).to(torch.uint8))
    return torch.cat(exponents, 1)


def unpacked(fmt: WeightFormat, words_EOW: torch.Tensor, exponents_ESO: torch.Tensor) -> torch.Tensor:
    """Return the matrices in float32."""
    codes_EOI = unpack_row_spans(words_EOW.flatten(0, 1)).unflatten(0, words_EOW.shape[:2])
    inputs = codes_EOI.shape[2]
    exponents_EOG = torch.stack([unpack_exponents(packed_SO, inputs) for packed_SO in exponents_ESO])
    return fmt.reference(codes_EOI) * torch.exp2(exponents_EOG.float() - BIAS).repeat_interleave(BLOCK, 2)


def packed_gated_experts(
    x: Activation,
    routing: Routing,
    weights: PackedExperts,
    activation: GatedActivation,
    bias: ExpertBias | None = None,
    *,
    between: ActFormat = PLAIN,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Compute core.ops.experts.gated_experts. With rows in E4M3, exponents are applied to the sums of blocks."""
    if x.values.is_cuda:
        from dovetail.core.ops.kernels.packed_experts import packed_experts_triton

        return packed_experts_triton(x, routing, weights, activation, bias, between, dtype)
    return packed_experts_reference(x, routing, weights, activation, bias, between, dtype)


def packed_experts_reference(
    x: Activation,
    routing: Routing,
    weights: PackedExperts,
    activation: GatedActivation,
    bias: ExpertBias | None,
    between: ActFormat,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Decode all matrices and multiply in float32."""
    up = unpacked(weights.format, weights.up, weights.up_exponents)
    down = unpacked(weights.format, weights.down, weights.down_exponents)
    plain = ExpertWeights(up, down, torch.ones(up.shape[:2]), torch.ones(down.shape[:2]))
    return gated_experts_reference(x, routing, plain, activation, bias, between, dtype)
