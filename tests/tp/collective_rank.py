"""One rank of the collective tests: makes its calls and writes the results to a file.

python collective_rank.py <rank> <size> <folder> <port> <port>
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from dovetail.core.compose import compose
from dovetail.core.interfaces import Partial

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)
NAMES = ("nccl", "ordered")


def summand(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of very different magnitudes, so that the order of additions affects the last bits."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(7, 96, generator=generator, dtype=torch.float64) * 10 ** (rank % 3)
    return (100 * x).to(dtype) if dtype == torch.int64 else x.to(dtype)


def main(rank: int, size: int, folder: Path, ports: list[int]) -> None:
    out = {}
    device = torch.device("cpu")
    for name, port in zip(NAMES, ports, strict=True):
        collective = compose(["app=generate", f"collective={name}"]).build("collective")
        collective.connect(rank, size, f"127.0.0.1:{port}", device)
        assert not torch.distributed.is_initialized()
        for dtype in DTYPES:
            x = summand(rank, dtype)
            out[name, "all_reduce", dtype] = collective.all_reduce(x.clone())
            out[name, "strided", dtype] = collective.all_reduce(x.clone().t()).t()
            out[name, "all_gather", dtype] = collective.all_gather(x)
            out[name, "vector", dtype] = collective.all_gather(x[0])
            out[name, "broadcast", dtype] = collective.broadcast(x.clone(), root=1)
            out[name, "partial", dtype] = collective.reduce(Partial(x.clone()))
            out[name, "whole", dtype] = collective.reduce(x)
        collective.barrier()
        collective.close()
        collective.close()
    torch.save(out, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), [int(port) for port in sys.argv[4:]])
