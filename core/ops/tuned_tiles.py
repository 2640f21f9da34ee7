"""The quickest cuts of products, from benchmarks/matmul.py and layer.py; matmul.py --table wrote this file."""

from __future__ import annotations

from dovetail.core.ops.tiles import MatmulTile

MEASURED: dict[tuple[str, str, int, int], dict[int, MatmulTile | None]] = {
    ("NVIDIA H200", "bf16", 1280, 8192): {
        1: MatmulTile(16, 64, 128, stages=3, split=6, early=8, pace=1000),
        16: MatmulTile(16, 64, 128, stages=3, split=6, early=5, ahead=4, pace=1000),
    },
    ("NVIDIA H200", "bf16", 2560, 8192): {
        1: MatmulTile(16, 64, 128, stages=3, split=3, early=5, ahead=4, pace=1000),
        16: MatmulTile(16, 64, 256, stages=3, split=3, early=5, pace=500),
        64: MatmulTile(32, 64, 128, stages=8, tma=True),
        128: MatmulTile(64, 64, 128, stages=5, tma=True, swap=False),
    },
    ("NVIDIA H200", "bf16", 4096, 4096): {
        1: MatmulTile(16, 64, 256, stages=3, split=2, early=3, pace=2000),
        16: MatmulTile(16, 64, 256, stages=5, tma=True),
        64: MatmulTile(32, 64, 128, stages=8, tma=True),
        128: MatmulTile(64, 64, 128, stages=5, tma=True, swap=False),
        256: MatmulTile(128, 64, 64, stages=8, tma=True),
    },
    ("NVIDIA H200", "bf16", 4096, 14336): {
        16: MatmulTile(16, 64, 256, stages=5, tma=True),
        64: MatmulTile(32, 64, 128, stages=8, tma=True),
        128: MatmulTile(64, 64, 128, stages=6, tma=True),
        256: MatmulTile(128, 64, 64, stages=8, tma=True),
    },
    ("NVIDIA H200", "bf16", 5120, 8192): {
        1: MatmulTile(16, 64, 256),
        16: MatmulTile(16, 64, 256, stages=5),
        64: MatmulTile(64, 64, 128, stages=6, tma=True),
    },
    ("NVIDIA H200", "bf16", 6144, 4096): {
        1: MatmulTile(16, 64, 256),
        16: MatmulTile(16, 64, 256, tma=True),
        32: MatmulTile(16, 128, 128, stages=6, tma=True),
        64: MatmulTile(64, 64, 128, stages=6, tma=True),
        128: MatmulTile(128, 64, 64, stages=8, tma=True),
    },
    ("NVIDIA H200", "bf16", 7168, 8192): {
        1: MatmulTile(16, 64, 128, stages=3, early=11, pace=1000),
        16: MatmulTile(16, 64, 256, tma=True),
        64: MatmulTile(64, 64, 128, stages=6, tma=True),
    },
    ("NVIDIA H200", "bf16", 8192, 1024): {
        1: MatmulTile(16, 64, 128, stages=3, early=5, pace=1000),
        16: MatmulTile(16, 64, 256, stages=2, early=5),
        64: MatmulTile(64, 64, 128, stages=5, tma=True, swap=False),
        128: MatmulTile(128, 64, 64, stages=8, tma=True),
    },
    ("NVIDIA H200", "bf16", 8192, 2048): {
        1: MatmulTile(16, 64, 128, stages=3, early=11),
        16: MatmulTile(16, 64, 256, early=5, ahead=6),
        64: MatmulTile(64, 64, 256, stages=3, early=3, ahead=4, pace=1000),
        128: MatmulTile(64, 64, 128, stages=3, early=3, ahead=6),
    },
    ("NVIDIA H200", "bf16", 8192, 3584): {
        16: MatmulTile(16, 64, 128, stages=5),
        64: MatmulTile(64, 64, 128, stages=5, tma=True, swap=False),
        128: MatmulTile(128, 64, 64, stages=8, tma=True),
    },
    ("NVIDIA H200", "bf16", 8192, 4096): {
        1: MatmulTile(16, 64, 128, split=2, early=5, ahead=2),
        16: MatmulTile(16, 64, 256, stages=3, early=5, pace=500),
        64: MatmulTile(64, 64, 256, stages=3, early=3, ahead=4),
        128: MatmulTile(64, 64, 128, stages=3, early=3, ahead=6),
    },
    ("NVIDIA H200", "bf16", 8192, 7168): {
        1: MatmulTile(16, 64, 128, split=2, tma=True),
        16: None,
        64: MatmulTile(64, 64, 128, stages=5, tma=True, swap=False),
    },
    ("NVIDIA H200", "bf16", 8192, 8192): {
        16: None,
        64: MatmulTile(64, 64, 128, stages=5, tma=True, swap=False),
    },
    ("NVIDIA H200", "bf16", 8192, 14336): {
        16: MatmulTile(16, 64, 256, stages=5, tma=True),
        64: MatmulTile(64, 64, 128, stages=6, tma=True),
    },
    ("NVIDIA H200", "bf16", 8192, 28672): {
        1: MatmulTile(16, 64, 256),
        16: MatmulTile(16, 64, 256, tma=True),
        64: MatmulTile(64, 64, 128, stages=6, tma=True),
    },
    ("NVIDIA H200", "bf16", 10240, 8192): {
        1: MatmulTile(16, 128, 256, stages=3, tma=True),
        16: MatmulTile(16, 64, 128, tma=True),
    },
    ("NVIDIA H200", "bf16", 14336, 8192): {
        1: MatmulTile(16, 64, 128),
        16: MatmulTile(16, 128, 128, stages=6, tma=True),
        64: MatmulTile(64, 128, 128, warps=8, stages=3, early=4, ahead=6),
        128: MatmulTile(128, 128, 64, warps=8, stages=5, tma=True),
    },
    ("NVIDIA H200", "bf16", 16032, 8192): {
        1: MatmulTile(16, 128, 128, warps=8, stages=3, early=5, ahead=2),
        16: MatmulTile(16, 64, 128, stages=2, early=5, ahead=2),
        64: MatmulTile(64, 64, 64, early=8, ahead=6),
        128: MatmulTile(128, 128, 128, warps=8, stages=3, early=3, ahead=6),
    },
    ("NVIDIA H200", "bf16", 28672, 4096): {
        1: MatmulTile(16, 64, 128),
        16: MatmulTile(16, 64, 128, tma=True),
        32: MatmulTile(32, 128, 128, warps=8, stages=3, early=2),
        64: MatmulTile(64, 128, 128, tma=True),
        128: MatmulTile(128, 128, 64, warps=8, stages=3, early=3, pace=2000),
    },
    ("NVIDIA H200", "bf16", 28672, 8192): {
        16: MatmulTile(16, 64, 128),
        64: MatmulTile(64, 128, 128, warps=8, stages=3, early=4, ahead=2),
        128: MatmulTile(128, 128, 64, warps=8, stages=5, tma=True),
    },
    ("NVIDIA H200", "bf16", 32064, 8192): {
        1: MatmulTile(16, 128, 128, warps=8, stages=3, early=5, ahead=2),
        16: MatmulTile(16, 64, 128, stages=3, early=5, ahead=2),
        64: MatmulTile(64, 128, 128, warps=8, early=4, ahead=2),
        128: MatmulTile(128, 128, 64, warps=8, stages=3, early=3, ahead=6),
    },
    ("NVIDIA H200", "bf16", 57344, 8192): {
        1: MatmulTile(16, 64, 256, stages=5),
        16: MatmulTile(16, 64, 256, stages=5, tma=True),
        64: MatmulTile(64, 128, 128, tma=True),
    },
    ("NVIDIA H200", "bf16", 64128, 8192): {
        1: MatmulTile(16, 64, 128, stages=3, early=5, ahead=2),
        16: MatmulTile(16, 128, 128, warps=8, stages=3, early=5, ahead=2),
        64: MatmulTile(64, 128, 128, warps=8, stages=3, early=4),
        128: MatmulTile(128, 128, 64, warps=8, stages=5, tma=True),
    },
    ("NVIDIA H200", "bf16", 128256, 4096): {
        1: MatmulTile(16, 128, 128, stages=6, tma=True),
        64: MatmulTile(64, 128, 128, tma=True),
    },
    ("NVIDIA H200", "fp8", 1280, 8192): {
        1: MatmulTile(16, 64, 256, stages=3, split=6, early=5, ahead=4, pace=1000),
        16: MatmulTile(16, 64, 512, stages=3, split=6, early=5, pace=2000),
        32: MatmulTile(32, 64, 256, stages=3, split=6, early=4, ahead=4, pace=2000),
        64: MatmulTile(64, 64, 128, stages=8, split=4),
        128: MatmulTile(64, 64, 256, stages=3, split=3, early=9, pace=500),
        256: MatmulTile(128, 64, 256, stages=3, split=3, early=6),
    },
    ("NVIDIA H200", "fp8", 2560, 8192): {
        16: MatmulTile(16, 64, 256, stages=3, split=3, early=5, ahead=4, pace=1000),
        64: MatmulTile(64, 64, 256, stages=3, split=3, early=3, pace=1000),
        128: MatmulTile(64, 64, 256, stages=3, split=3, early=3),
        256: MatmulTile(64, 64, 256, stages=3, early=3),
    },
    ("NVIDIA H200", "fp8", 4096, 4096): {
        1: MatmulTile(16, 64, 256, stages=3, early=5, pace=1000),
        16: MatmulTile(16, 64, 512, stages=3, early=3, pace=500),
        32: MatmulTile(32, 64, 512, stages=3, early=3, pace=500),
        64: MatmulTile(64, 64, 512, stages=3, early=3, pace=2000),
        96: None,
        128: MatmulTile(64, 64, 128, stages=8),
    },
    ("NVIDIA H200", "fp8", 4096, 14336): {
        1: MatmulTile(16, 64, 256, stages=3, split=2, early=5, pace=500),
        16: MatmulTile(16, 64, 512, stages=3, split=2, early=3, pace=2000),
        32: MatmulTile(32, 64, 512, stages=3, split=2, early=3, pace=2000),
        64: MatmulTile(64, 64, 128, stages=8, split=2),
    },
    ("NVIDIA H200", "fp8", 5120, 8192): {
        1: MatmulTile(16, 64, 256, stages=3, early=5, pace=500),
        16: MatmulTile(16, 64, 256, split=2, tma=True),
        32: MatmulTile(32, 64, 512, stages=3, early=3, pace=2000),
        64: MatmulTile(64, 64, 512, stages=3, early=3, pace=1000),
        128: MatmulTile(64, 64, 256, stages=3, early=3, ahead=6),
    },
    ("NVIDIA H200", "fp8", 6144, 4096): {
        16: MatmulTile(16, 64, 128, stages=8),
        64: MatmulTile(64, 64, 128, stages=8),
        96: MatmulTile(128, 64, 128, stages=8),
        128: MatmulTile(64, 64, 256, stages=3, early=3),
    },
    ("NVIDIA H200", "fp8", 7168, 8192): {
        1: MatmulTile(16, 64, 256, stages=3, early=5, ahead=4, pace=1000),
        16: MatmulTile(16, 64, 512, stages=3, early=5, ahead=4, pace=2000),
        32: MatmulTile(32, 64, 512, stages=3, early=4, pace=2000),
        64: MatmulTile(64, 64, 512, stages=3, early=3, pace=500),
        128: MatmulTile(64, 64, 256, stages=3, early=3, pace=500),
    },
    ("NVIDIA H200", "fp8", 8192, 1024): {
        16: MatmulTile(16, 64, 256, stages=3, early=5, pace=1000),
        32: MatmulTile(32, 64, 256, stages=3, early=7, pace=500),
        64: MatmulTile(64, 64, 256, stages=3, early=9, pace=1000),
        128: MatmulTile(64, 64, 256, stages=3, early=3),
        256: MatmulTile(128, 64, 128, stages=3, early=6, pace=1000),
    },
    ("NVIDIA H200", "fp8", 8192, 2048): {
        16: MatmulTile(16, 64, 256, stages=3, early=11, pace=1000),
        64: MatmulTile(64, 64, 256, stages=3, early=9, pace=500),
        128: MatmulTile(64, 64, 256, stages=2, early=4),
        256: MatmulTile(128, 64, 128, stages=2, early=8),
    },
    ("NVIDIA H200", "fp8", 8192, 3584): {
        1: MatmulTile(16, 64, 128, stages=8),
        16: MatmulTile(16, 64, 512, tma=True),
        32: MatmulTile(32, 64, 512, stages=3, early=3),
        64: MatmulTile(64, 64, 128, stages=8),
        128: MatmulTile(64, 64, 256, stages=3, early=3, pace=1000),
    },
    ("NVIDIA H200", "fp8", 8192, 4096): {
        1: MatmulTile(16, 64, 256, early=11, ahead=2),
        16: MatmulTile(16, 64, 512, early=5, ahead=2),
        32: MatmulTile(32, 64, 512, stages=3, early=3, pace=1000),
        64: MatmulTile(64, 64, 128, stages=8),
        128: MatmulTile(64, 64, 256, stages=3, early=3, pace=500),
    },
    ("NVIDIA H200", "fp8", 8192, 7168): {
        16: MatmulTile(16, 64, 128, stages=8),
        64: MatmulTile(64, 64, 256, stages=3, early=3, pace=1000),
        128: MatmulTile(64, 64, 256, stages=3, early=3),
    },
    ("NVIDIA H200", "fp8", 8192, 8192): {
        1: MatmulTile(16, 64, 256, stages=3, early=8, pace=1000),
        16: MatmulTile(16, 64, 128, stages=8),
        64: MatmulTile(64, 64, 128, stages=8),
    },
    ("NVIDIA H200", "fp8", 8192, 14336): {
        1: MatmulTile(16, 64, 256, stages=3, early=5, pace=500),
        16: MatmulTile(16, 64, 256, early=5),
        32: MatmulTile(32, 64, 512, stages=3, early=4, pace=2000),
        64: MatmulTile(64, 64, 512, stages=3, early=3, pace=1000),
        128: MatmulTile(128, 64, 256, early=4),
    },
    ("NVIDIA H200", "fp8", 8192, 28672): {
        1: MatmulTile(16, 64, 512),
        16: MatmulTile(16, 64, 512, tma=True),
        64: MatmulTile(64, 64, 128, stages=8),
    },
    ("NVIDIA H200", "fp8", 10240, 8192): {
        1: MatmulTile(16, 64, 128, stages=8),
        16: MatmulTile(16, 64, 256, tma=True),
        32: MatmulTile(32, 64, 256, stages=3, early=4),
        64: MatmulTile(64, 64, 128, stages=6, tma=True),
        128: None,
        256: MatmulTile(128, 64, 128, stages=3, tma=True),
    },
    ("NVIDIA H200", "fp8", 14336, 8192): {
        1: MatmulTile(16, 64, 128, stages=3, early=11, pace=1000),
        16: MatmulTile(16, 64, 128, stages=3, early=11, ahead=4, pace=1000),
        64: MatmulTile(64, 64, 256, stages=3, early=3),
    },
    ("NVIDIA H200", "fp8", 16032, 8192): {
        1: MatmulTile(16, 64, 256, stages=2, early=5, ahead=2),
        16: MatmulTile(16, 64, 256, early=5),
        64: MatmulTile(64, 128, 256, warps=8, stages=3, early=4, ahead=6),
        128: MatmulTile(128, 128, 256, warps=8, stages=3, early=3, ahead=6),
    },
    ("NVIDIA H200", "fp8", 28672, 4096): {
        1: MatmulTile(16, 64, 128),
        16: MatmulTile(16, 64, 128, tma=True),
        32: MatmulTile(32, 128, 256, warps=8, stages=3, early=2, pace=2000),
        64: MatmulTile(64, 128, 128, warps=8, tma=True),
    },
    ("NVIDIA H200", "fp8", 28672, 8192): {
        1: MatmulTile(16, 64, 128, tma=True),
        16: MatmulTile(16, 64, 256, tma=True),
        32: MatmulTile(32, 128, 256, warps=8, stages=3, early=2, pace=500),
        64: MatmulTile(64, 128, 128, warps=8, tma=True),
    },
    ("NVIDIA H200", "fp8", 32064, 8192): {
        1: MatmulTile(16, 64, 256, early=5, ahead=2),
        16: MatmulTile(16, 64, 256, stages=3, early=5, ahead=2),
        64: MatmulTile(64, 128, 128, warps=8, early=4, ahead=6),
    },
    ("NVIDIA H200", "fp8", 57344, 8192): {
        16: MatmulTile(16, 64, 256, tma=True),
        32: MatmulTile(32, 128, 256, warps=8, stages=3, early=2, pace=500),
        64: MatmulTile(64, 128, 128, warps=8, tma=True),
    },
    ("NVIDIA H200", "fp8", 64128, 8192): {
        16: MatmulTile(16, 64, 256, early=5),
        64: MatmulTile(64, 128, 128, warps=8, early=4, ahead=2),
    },
    ("NVIDIA H200", "fp8", 128256, 4096): {},
}
"""(GPU, kind of weight, outputs, inputs) -> {up to so many rows: tile}; None: the library is quicker. More rows than
any of these are the library's."""
