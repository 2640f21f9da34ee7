"""y += (x A^T) B^T for rows of different adapters in two launches (Punica, Chen et al. 2023; S-LoRA, Sheng et al.
2023).

A program computes a tile of tokens for one slot and exits at once if no token of the tile uses that slot. In a tile
with several slots, each slot's program masks its rows. So a prompt costs one pass over each tile, and a decode step
with many adapters needs no sorting. `_shrink` splits the inputs where there are few tiles; `_expand` sums the splits in
a fixed order, so results are bitwise reproducible.

Shapes: T tokens, I input, O output, S slots, P parts of a merged layer, R rank, K splits of the inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.core.arithmetic import ceil_div
from dovetail.core.ops.kernels.launch import announce, dependent, wait

BLOCK_O = 128
"""Outputs per tile of `_expand`."""
PROGRAMS = 256
"""Number of programs that fills all SMs."""
MOST_SPLITS = 8


@triton.jit(do_not_specialize=["tokens", "slots", "parts", "splits"])
def _shrink(
    x_ptr,
    a_ptr,
    slots_ptr,
    inner_ptr,
    tokens,
    inputs,
    slots,
    parts,
    splits,
    x_st,
    a_ss,
    R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute inner_KTPR of one tile, slot, part and split."""
    announce(PDL)
    wait(PDL)
    slot = tl.program_id(0) % slots
    t = tl.program_id(0) // slots * BLOCK_T + tl.arange(0, BLOCK_T)
    mine = tl.load(slots_ptr + t, mask=t < tokens, other=-1) == slot
    if tl.max(mine.to(tl.int32), axis=0) > 0:
        part = tl.program_id(1)
        split = tl.program_id(2)
        r = tl.arange(0, R)
        x_at = x_ptr + t.to(tl.int64)[:, None] * x_st
        a_at = a_ptr + a_ss.to(tl.int64) * slot + (part * R + r)[:, None] * inputs
        blocks = tl.cdiv(inputs, BLOCK_I)
        acc = tl.zeros((BLOCK_T, R), tl.float32)
        for block in range(split * blocks // splits, (split + 1) * blocks // splits):
            i = block * BLOCK_I + tl.arange(0, BLOCK_I)
            x_TI = tl.load(x_at + i[None, :], mask=mine[:, None] & (i < inputs)[None, :], other=0.0)
            a_RI = tl.load(a_at + i[None, :], mask=(i < inputs)[None, :], other=0.0)
            acc = tl.dot(x_TI, a_RI.T, acc, input_precision=PRECISION)
        at = ((split * tokens + t.to(tl.int64)) * parts + part) * R
        tl.store(inner_ptr + at[:, None] + r[None, :], acc, mask=mine[:, None])


@triton.jit(do_not_specialize=["tokens", "slots", "groups", "parts", "splits"])
def _expand(
    inner_ptr,
    b_ptr,
    slots_ptr,
    blocks_ptr,
    y_ptr,
    tokens,
    slots,
    groups,
    parts,
    splits,
    b_ss,
    y_st,
    R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Update y_TO of one tile of tokens and outputs, for every `groups`-th slot."""
    announce(PDL)
    entry = blocks_ptr + tl.program_id(1) * 3
    o = tl.load(entry) + tl.arange(0, BLOCK_O)
    inside = o < tl.load(entry + 1)
    part = tl.load(entry + 2)
    wait(PDL)
    t = tl.program_id(0) // groups * BLOCK_T + tl.arange(0, BLOCK_T)
    slot_T = tl.load(slots_ptr + t, mask=t < tokens, other=-1)
    r = tl.arange(0, R)
    for slot in range(tl.program_id(0) % groups, slots, groups):
        mine = slot_T == slot
        if tl.max(mine.to(tl.int32), axis=0) > 0:
            at = (t.to(tl.int64) * parts + part) * R
            acc = tl.zeros((BLOCK_T, R), tl.float32)
            for split in tl.range(0, splits, num_stages=4):
                inner_at = inner_ptr + split * tokens.to(tl.int64) * (parts * R) + at[:, None] + r[None, :]
                acc += tl.load(inner_at, mask=mine[:, None], other=0.0)
            b_at = b_ptr + b_ss.to(tl.int64) * slot + o[:, None] * R + r[None, :]
            b_OR = tl.load(b_at, mask=inside[:, None], other=0.0)
            added = tl.dot(acc.to(b_OR.dtype), b_OR.T, input_precision=PRECISION)
            y_at = y_ptr + t.to(tl.int64)[:, None] * y_st + o[None, :]
            keep = mine[:, None] & inside[None, :]
            y_TO = tl.load(y_at, mask=keep, other=0.0)
            tl.store(y_at, (y_TO.to(tl.float32) + added).to(y_TO.dtype), mask=keep)


def output_blocks(parts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return the tiles of `_expand` along the outputs, none across two parts: int32 rows (first output, end of part,
    part)."""
    blocks, at = [], 0
    for part, size in enumerate(parts):
        blocks += [(first, at + size, part) for first in range(at, at + size, BLOCK_O)]
        at += size
    return torch.tensor(blocks, dtype=torch.int32, device=device)


def lora_triton(
    x_TI: torch.Tensor,
    y_TO: torch.Tensor,
    a_SPRI: torch.Tensor,
    b_SOR: torch.Tensor,
    slots_T: torch.Tensor,
    blocks: torch.Tensor,
) -> None:
    """Compute lora_reference on the GPU. `blocks`: output_blocks of the parts. A slot's factors are contiguous."""
    tokens, inputs = x_TI.shape
    slots, parts, rank, _ = a_SPRI.shape
    if not tokens:
        return
    block_t = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    block_i = 128 if x_TI.dtype.itemsize == 2 else 64
    tiles = ceil_div(tokens, block_t)
    splits = max(1, min(MOST_SPLITS, PROGRAMS // (tiles * parts), ceil_div(inputs, block_i)))
    inner_KTPR = torch.empty(splits, tokens, parts, rank, dtype=torch.float32, device=x_TI.device)
    shared = dict(
        R=rank,
        BLOCK_T=block_t,
        PRECISION="ieee" if x_TI.dtype == torch.float32 else "tf32",
        **dependent(x_TI),
    )
    _shrink[(tiles * slots, parts, splits)](
        x_TI,
        a_SPRI,
        slots_T,
        inner_KTPR,
        tokens,
        inputs,
        slots,
        parts,
        splits,
        x_TI.stride(0),
        a_SPRI.stride(0),
        BLOCK_I=block_i,
        **shared,
    )
    # Where the tiles fill all SMs, one program loops over the slots of its tile: most other programs would just exit.
    groups = 1 if tiles * len(blocks) >= PROGRAMS else slots
    _expand[(tiles * groups, len(blocks))](
        inner_KTPR,
        b_SOR,
        slots_T,
        blocks,
        y_TO,
        tokens,
        slots,
        groups,
        parts,
        splits,
        b_SOR.stride(0),
        y_TO.stride(0),
        BLOCK_O=BLOCK_O,
        **shared,
    )
