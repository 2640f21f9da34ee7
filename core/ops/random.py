"""Random numbers as a pure function of (key, position, purpose, index), without generator state, so batching,
speculation and preemption do not change a draw (counter-based generators: Salmon et al. 2011). Shapes: N rows, V
columns."""

from __future__ import annotations

import hashlib
from enum import IntEnum

import torch

from dovetail.core.interfaces import Request

MASK = 0xFFFFFFFF


class Purpose(IntEnum):
    """Purposes whose draws at one position must be independent of each other."""

    SAMPLE = 1
    ACCEPT = 2
    RESIDUAL = 3
    DRAFT = 4
    SIMULATED = 5


def sequence_key(engine_seed: int, request: Request, sample: int) -> int:
    """63-bit key of one sample, from the request's seed if it has one, else from engine.seed and the arrival number."""
    seed = request.params.seed
    text = f"request:{seed}:{sample}" if seed is not None else f"engine:{engine_seed}:{request.uid}:{sample}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Murmur3's 32-bit finalizer, on int64 tensors that hold 32-bit values."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & MASK
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & MASK
    return x ^ (x >> 16)


def uniform(
    key_N: torch.Tensor, position_N: torch.Tensor, purpose: Purpose, columns: int, first: int = 0
) -> torch.Tensor:
    """Uniform float32 [N, columns] in the open interval (0, 1), for columns `first` and later. Each value is 23 random
    bits plus a half, so it is never 0 or 1."""
    low, high = key_N & MASK, key_N >> 32
    place = (position_N.long() * 0x9E3779B1 + int(purpose) * 0x7F4A7C15) & MASK
    a = _mix(_mix(low) ^ place)
    b = _mix((_mix(high ^ 0x5BD1E995) + place) & MASK)
    index = torch.arange(first, first + columns, device=key_N.device, dtype=torch.int64) * 0x9E3779B9
    bits = _mix(_mix((a[:, None] + index) & MASK) ^ b[:, None])
    return ((bits >> 9).float() + 0.5) * 2.0**-23


def gumbel(
    key_N: torch.Tensor, position_N: torch.Tensor, purpose: Purpose, columns: int, first: int = 0
) -> torch.Tensor:
    """Standard Gumbel noise. argmax(log p + noise) is a draw from p (the Gumbel-max trick)."""
    return -torch.log(-torch.log(uniform(key_N, position_N, purpose, columns, first)))
