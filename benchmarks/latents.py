"""Attention over compressed latents of attention=triton on a GPU: checked against attention=sdpa, then timed.

    python benchmarks/latents.py [--heads 16,128] [--decode 1x4096,64x4096,128x4096] [--prefill 8192,2048+30000]
        [--kv bf16,e4m3] [--page 64] [--general]

Sizes are those of DeepSeek V2 and V3. Times are medians over replays of a CUDA graph of several layers, each with its
own latents, so that nothing is found in the L2 cache. A layer writes its new latents and attends, projections included.
Decode states the bytes of latents over --bandwidth, prefill (tokens, or tokens + cached prefix) the operations of
visible pairs of expanded keys and values; the products that expand them are not counted. --general times the kernels
for all GPUs (attention.gluon=false).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from timing import microseconds

from dovetail.core.interfaces import (
    MLA,
    PLAIN,
    AttentionBackend,
    AttentionLayer,
    BatchMeta,
    HostBounds,
    KVGroup,
    LatentNorm,
    Rope,
)
from dovetail.core.memory.pools import make_pools
from dovetail.core.ops.latents import LATENT, SCALES, latent_planes
from dovetail.plugins.attention.config import SDPAConfig, TritonConfig
from dovetail.plugins.attention.sdpa.backend import SDPA
from dovetail.plugins.attention.triton.backend import Triton

GPU, BF16 = torch.device("cuda"), torch.bfloat16
DTYPES = {"bf16": BF16, "e4m3": torch.float8_e4m3fn}
SIZES = MLA(1536, 512, 64, 128, 128)
COLUMNS, DIM = SIZES.kv_rank + SIZES.rope_dim, SIZES.nope_dim + SIZES.rope_dim
KV_BYTES, MOST_LAYERS = 1 << 30, 16
TOLERANCE = 0.03


class Bench:
    """Layers with random latents, and a step of `rows` rows with `count` new tokens and `keys` keys each."""

    def __init__(self, heads: int, rows: int, count: int, keys: int, kv: str, page: int, general: bool = False) -> None:
        self.heads, self.rows, self.count, self.keys = heads, rows, count, keys
        self.config = TritonConfig(gluon=not general)
        planes = latent_planes(SIZES, DTYPES[kv], BF16)
        self.bytes = rows * keys * sum(plane.bytes_per_token for plane in planes)
        count_layers = max(1, min(MOST_LAYERS, -(-KV_BYTES // self.bytes)))
        pages = -(-keys // page)
        group = KVGroup(0, tuple(range(count_layers)), planes, "mla", page_tokens=page)
        self.pools = make_pools([group], {0: rows * pages}, GPU)
        for name, plane in self.pools[0].planes.items():
            random = torch.randn if name != SCALES else torch.rand
            for layer in plane:
                scale = 0.01 if name == SCALES else 100.0 if name == LATENT and kv == "e4m3" else 1.0
                # E4M3 has no numbers above 448.
                layer.copy_((random(layer.shape, device=GPU) * scale).clamp(-448, 448).to(layer.dtype))
        table = (torch.randperm(rows * pages, device=GPU) + 1).int().view(rows, pages)
        at = torch.arange(keys - count, keys, device=GPU)
        self.meta = BatchMeta(
            row_start_B1=torch.arange(rows + 1, dtype=torch.int32, device=GPU) * count,
            kv_len_B=torch.full((rows,), keys, dtype=torch.int32, device=GPU),
            slots_B=torch.arange(rows, device=GPU),
            positions_T=at.repeat(rows),
            rows_T=torch.arange(rows, device=GPU).repeat_interleave(count),
            page_table_BP=table,
            write_T=(table[:, at // page].long() * page + at % page).flatten(),
            page_tokens=page,
        )
        self.host = HostBounds((count,) * rows, (keys,) * rows, rows if count < 16 else 0)
        tokens = rows * count
        self.q = torch.randn(tokens, heads * DIM, device=GPU, dtype=BF16)
        self.latents = torch.randn(tokens, COLUMNS, device=GPU, dtype=BF16)
        self.rope = Rope(torch.randn(keys, SIZES.rope_dim, device=GPU))
        self.norm = LatentNorm(torch.ones(SIZES.kv_rank, device=GPU, dtype=BF16), 1e-6)
        up = torch.randn(heads, SIZES.nope_dim + SIZES.v_dim, SIZES.kv_rank, device=GPU, dtype=BF16)
        self.up_HOL = up * SIZES.kv_rank**-0.5
        layers = range(count_layers)
        self.layers = [AttentionLayer(i, 0, i, heads, heads, DIM, DIM**-0.5, mla=SIZES) for i in layers]

    def run(self, backend: AttentionBackend, layers: list[AttentionLayer]) -> torch.Tensor:
        backend.bind(self.pools)
        ctx = backend.plan_device(self.meta, self.host, backend.plan_host(self.host))
        for layer in layers:
            q_THD = backend.write_mla(layer, ctx, self.q, self.latents, self.rope, self.norm)
            out = backend.attend_mla(layer, ctx, q_THD, self.up_HOL)[PLAIN].values
        return out

    def check(self) -> float:
        """Return the greatest error of a token relative to its norm, against attention=sdpa."""
        got, want = (self.run(backend, self.layers[:1]).float() for backend in (self.triton(), SDPA(SDPAConfig())))
        error = float(((got - want).norm(dim=1) / want.norm(dim=1)).max())
        assert error < TOLERANCE, f"off by {error:.1e}"
        return error

    def triton(self) -> Triton:
        return Triton(self.config)

    def us(self) -> float:
        """Median microseconds of a layer."""
        backend = self.triton()
        return microseconds(lambda: self.run(backend, self.layers)) / len(self.layers)

    @property
    def flops(self) -> float:
        pairs = self.rows * self.count * (self.keys - (self.count - 1) / 2)
        return 2 * pairs * self.heads * (DIM + SIZES.v_dim)


def lines(args: argparse.Namespace) -> Iterator[str]:
    for heads in map(int, args.heads.split(",")):
        for kv in args.kv.split(","):
            for text in filter(None, args.decode.split(",")):
                rows, keys = map(int, text.split("x"))
                bench = Bench(heads, rows, 1, keys, kv, args.page, args.general)
                error, us = bench.check(), bench.us()
                share = bench.bytes / (us * 1e-6) / (args.bandwidth * 1e12)
                yield f"decode {rows} x {keys}, {heads} heads, {kv}: {us:.1f} us, {share:.0%}, error {error:.1e}"
            for text in filter(None, args.prefill.split(",")):
                tokens, _, prefix = text.partition("+")
                bench = Bench(heads, 1, int(tokens), int(tokens) + int(prefix or 0), kv, args.page, args.general)
                # The reference would need the scores of all pairs.
                error = bench.check() if bench.keys * bench.count * heads < 1 << 30 else float("nan")
                us = bench.us()
                rate = bench.flops / us / 1e6
                yield f"prefill {text}, {heads} heads, {kv}: {us:.0f} us, {rate:.0f} TFLOP/s, error {error:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default="16,128")
    parser.add_argument("--decode", default="1x4096,64x4096,128x4096")
    parser.add_argument("--prefill", default="512,8192,2048+30000")
    parser.add_argument("--kv", default="bf16,e4m3")
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--general", action="store_true")
    parser.add_argument("--bandwidth", type=float, default=4.44, help="TB/s")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU: there is none")
    torch.manual_seed(0)
    for line in lines(args):
        print(line, flush=True)


if __name__ == "__main__":
    main()
