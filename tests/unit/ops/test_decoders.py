"""Decoders in inline assembly, compiled for Hopper and executed here instruction by instruction, without a GPU."""

from __future__ import annotations

import importlib.util
import os
import random
import re

import pytest
import torch

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton's compiler", allow_module_level=True)

import triton
import triton.language as tl

from dovetail.core.interfaces.weight import WeightFormat
from dovetail.core.ops.weight_formats import E2M1, E4M3, INT4, INT6, INT8, NF4, UINT4, UINT8
from dovetail.core.testing.compiling import compiled_for_hopper

WORD = 0xFFFFFFFF


EVERYTHING = os.environ.get("DOVETAIL_KERNELS") == "all"


@triton.jit
def decode_all_bits(words_ptr, out_ptr, BITS: tl.constexpr, DECODE: tl.constexpr):
    at = tl.arange(0, 128)
    words = tl.load(words_ptr + at)
    for shift in tl.static_range(0, 32, BITS):
        tl.store(out_ptr + shift // BITS * 128 + at, DECODE(words, shift, out_ptr.dtype.element_ty))


def permuted(low: int, high: int, selector: int) -> int:
    """prmt.b32: four of eight bytes; a selector with its last bit set repeats the byte's sign."""
    both, found = low | high << 32, 0
    for n in range(4):
        choice = selector >> 4 * n & 15
        byte = both >> 8 * (choice & 7) & 0xFF
        found |= (255 * (byte >> 7) if choice & 8 else byte) << 8 * n
    return found


def looked_up(a: int, b: int, c: int, table: int) -> int:
    """lop3.b32: any function of three bits."""
    return sum((table >> ((a >> n & 1) << 2 | (b >> n & 1) << 1 | c >> n & 1) & 1) << n for n in range(32))


def pairs(word: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers in a register: one of 32 bits, two of 16 or four of E4M3."""
    return torch.tensor([word], dtype=torch.uint32).view(dtype).double()


def constant(text: str) -> int:
    return int(text.removeprefix("0f"), 16) if text.startswith("0f") else int(text, 0)


def joined(values: torch.Tensor, dtype: torch.dtype) -> int:
    return values.to(dtype).view(torch.uint32).item()


def run(block: str, inputs: dict[str, int], dtype: torch.dtype) -> dict[str, int]:
    """Execute the instructions of a block in some lane and return the registers."""
    lane = random.randrange(32)
    registers = inputs | {"%lanemask_lt": (1 << lane) - 1, "%lanemask_gt": -2 << lane & WORD}
    for line in block.split(";"):
        name, _, operands = line.strip().partition(" ")
        if not operands or name == ".reg":
            continue
        into, *rest = (one.strip() for one in operands.split(","))
        args = [registers[one] if one in registers else constant(one) for one in rest]
        match name:
            case "mov.b32" | "mov.u32":
                registers[into] = args[0]
            case "xor.b32":
                registers[into] = args[0] ^ args[1]
            case "prmt.b32":
                registers[into] = permuted(*args)
            case "lop3.b32":
                registers[into] = looked_up(*args)
            case "and.b32":
                registers[into] = args[0] & args[1]
            case "shr.u32":
                registers[into] = args[0] >> args[1]
            case "shl.b32":
                registers[into] = args[0] << args[1] & WORD
            case "sub.f16x2":
                registers[into] = joined(pairs(args[0], dtype) - pairs(args[1], dtype), dtype)
            case "sub.f32":
                registers[into] = joined(pairs(args[0], torch.float32) - pairs(args[1], torch.float32), torch.float32)
            case "cvt.rn.bf16x2.f32":
                upper, lower = (pairs(one, torch.float32) for one in args)
                registers[into] = joined(torch.cat([lower, upper]), torch.bfloat16)
            case "fma.rn.bf16x2" | "fma.rn.f16x2":
                a, b, c = (pairs(one, dtype) for one in args)
                registers[into] = joined(a * b + c, dtype)
            case _:
                raise ValueError(f"no such instruction here: {line}")
    return registers


FORMATS = (INT4, UINT4, E2M1, NF4, INT6, UINT8, INT8, E4M3)
CASES = [(fmt, dtype, False) for fmt in FORMATS for dtype in (torch.bfloat16, torch.float16)]
CASES.append((E4M3, torch.float8_e4m3fn, False))
SHIFTED = [(fmt, dtype, True) for fmt in (INT4, UINT4, INT6, UINT8, INT8) for dtype in fmt.shifted]


def random_word(fmt: WeightFormat) -> int:
    """Return a word of possible codes, without the NaN of E4M3."""
    codes = [random.getrandbits(fmt.bits if fmt.stored_bits == 8 else 8) for _ in range(4)]
    return int.from_bytes(code - 1 if fmt is E4M3 and code & 127 == 127 else code for code in codes)


@pytest.mark.parametrize(
    ("fmt", "dtype", "shifted"), CASES + SHIFTED if EVERYTHING else CASES[::2] + CASES[1:2] + SHIFTED[:3] + SHIFTED[-1:]
)
def test_codes_in_words(fmt: WeightFormat, dtype: torch.dtype, shifted: bool):
    shift, unit, decode = 0.0, 1.0, fmt.decode_words
    if shifted:
        shift, unit, decode = fmt.shifted[dtype].shift, fmt.shifted[dtype].unit, fmt.shifted[dtype].decode
    with compiled_for_hopper() as compiled:
        words, out = (torch.empty(1024, dtype=kind, device="cuda") for kind in (torch.int32, dtype))
        decode_all_bits[(1,)](words, out, fmt.stored_bits, decode, num_warps=1)
    ((_, kernel),) = compiled.kernels
    blocks = re.findall(r"begin inline asm\s*\{(.*?)\}\s*//\s*end inline asm", kernel.asm["ptx"], re.DOTALL)
    served, bits = list[int](), fmt.stored_bits
    for block in (block for block in blocks if "prmt" in block):
        names = list(dict.fromkeys(re.findall(r"%r\d+", block)))
        outputs = [name for name in names if re.search(rf"(fma|sub|cvt|lop3|and)\S* {name},|prmt\.b32 {name},", block)]
        inputs = [name for name in names if name not in outputs]
        tries = [[random_word(fmt) for _ in inputs] for _ in range(20)]
        got = []
        for try_ in tries:
            registers = run(block, dict(zip(inputs, try_, strict=True)), dtype)
            got.append(torch.cat([pairs(registers[name], dtype) for name in outputs]))
        for at in range(0, 32, bits):
            mask = (1 << bits) - 1
            codes = torch.tensor([[word >> at & mask for word in try_] for try_ in tries], dtype=torch.uint8)
            expected = (fmt.reference(codes).to(dtype).double() + shift) * unit
            if torch.equal(torch.stack(got), expected):
                served.append(at)
    each = len(served) * bits // 32
    assert each and sorted(served) == [at for at in range(0, 32, bits) for _ in range(each)]
    assert len(served) == sum("prmt" in block for block in blocks)
