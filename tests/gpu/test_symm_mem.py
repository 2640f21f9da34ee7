"""collective=symm_mem on the GPUs of one host: the contract, ranks of unequal speed, and a whole engine's tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.core.interfaces import PLAIN, Collective
from dovetail.core.interfaces.rows import RowShard
from dovetail.core.ops import rms_norm
from dovetail.core.testing.collective import CollectiveContract
from dovetail.core.testing.ranks import on_ranks
from dovetail.plugins.collective.config import NcclConfig, SymmMemConfig
from dovetail.plugins.collective.nccl import NcclCollective
from dovetail.plugins.collective.sharded import own_rows, whole
from dovetail.plugins.collective.symm_mem.collective import SymmMemCollective

GPUS = torch.cuda.device_count()
Pair = tuple[torch.Tensor, torch.Tensor]
"""(result, expected result)"""
pytestmark = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")


class TestNccl(CollectiveContract):
    size = max(2, GPUS)
    device = torch.device("cuda")

    def make(self) -> Collective:
        return NcclCollective(NcclConfig())


class TestOneShot(TestNccl):
    def make(self) -> Collective:
        return SymmMemCollective(SymmMemConfig(algorithm="one_shot"))


class TestTwoShot(TestNccl):
    def make(self) -> Collective:
        return SymmMemCollective(SymmMemConfig(algorithm="two_shot"))


class TestMeasured(TestNccl):
    def make(self) -> Collective:
        return SymmMemCollective(SymmMemConfig())


class TestThreeOfFour(TestTwoShot):
    """The parts of a row are not a power of two."""

    size = min(3, max(2, GPUS))


class TestNcclShards(TestNccl):
    def make(self) -> Collective:
        return NcclCollective(NcclConfig(shard_rows=1))


class TestSharded(TestNccl):
    def make(self) -> Collective:
        return SymmMemCollective(SymmMemConfig(algorithm="sharded"))


class TestShardedThreeOfFour(TestSharded):
    size = min(3, max(2, GPUS))


class TestMeasuredShards(TestNccl):
    def make(self) -> Collective:
        return SymmMemCollective(SymmMemConfig(shard_rows=2))


ALGORITHMS = ("one_shot", "two_shot", "sharded")
SHAPES = ((1, 4096), (64, 4096), (3, 7168), (300, 1024), (3001, 1024), (132, 128), (5, 3072), (1, 16384), (2, 8192))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KINDS = ("sum", "edge", "edge", "argmax", "nccl")
EPS = 1e-5
CALLS, REPLAYS = 400, 150


class Races:
    """Makes calls of every kind and size in one order while ranks are delayed at random and once by seconds: first
    eagerly, then in graphs that are replayed in another order. Values are small integers, so that sums are exact."""

    size = max(2, GPUS)
    device = torch.device("cuda")

    def race(self, rank: int, size: int, address: str) -> None:
        collective = SymmMemCollective(SymmMemConfig(algorithm="sharded"))
        collective.connect(rank, size, address, self.device)
        reducer = collective.reducer
        assert reducer is not None
        order, delays = torch.Generator().manual_seed(0), torch.Generator().manual_seed(rank)

        def choose(options: Sequence[Any]) -> Any:
            return options[int(torch.randint(len(options), (), generator=order))]

        def delay() -> None:
            if torch.rand((), generator=delays) < 0.3:
                torch.cuda._sleep(int(torch.randint(500_000, (), generator=delays)))

        def edge(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, algorithm: str) -> Pair:
            """Return (x + residual on all rows, its norm)."""
            if algorithm == "sharded" and reducer.serves_sharded(x, (PLAIN,)):
                bundle, own = reducer.sharded_boundary(x, own_rows(collective, residual), weight, EPS, (PLAIN,))
                return whole(collective, RowShard(own, len(x))), bundle[PLAIN].values
            bundle, after = reducer.boundary(x, residual, weight, EPS, (PLAIN,), algorithm)
            return after, bundle[PLAIN].values

        def call(kind: str, algorithm: str, shape: tuple[int, int], dtype: torch.dtype, seed: int) -> Pair:
            def values(who: int) -> torch.Tensor:
                return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(97 * seed + who)).to(dtype)

            everybody = torch.stack([values(who) for who in range(size)])
            mine, total = values(rank).to(self.device), everybody.sum(0).to(self.device)
            if kind == "argmax":
                value_SN = everybody[:, :, 0].float()
                best_N = torch.where(value_SN == value_SN.amax(0), torch.arange(size)[:, None], size).amin(0)
                return reducer.argmax(mine[:, 0].float().contiguous(), torch.full_like(mine[:, 0], rank).long()), best_N
            if kind == "nccl":
                return NcclCollective.all_reduce(collective, mine), total
            if kind == "sum" or not reducer.fuses(mine):
                return reducer.reduce(mine, algorithm), total
            residual, weight = values(91).to(self.device), torch.ones_like(mine[0])
            expected, summed = rms_norm(total, residual, weight, EPS)
            return torch.stack(edge(mine, residual, weight, algorithm)), torch.stack((summed, expected[PLAIN].values))

        def drawn() -> tuple[str, str, tuple[int, int], torch.dtype]:
            return choose(KINDS), choose(ALGORITHMS), choose(SHAPES), choose(DTYPES)

        def check(what: object, out: torch.Tensor, expected: torch.Tensor) -> None:
            torch.testing.assert_close(
                out, expected.to(out.device), rtol=0.01, atol=0.01, msg=lambda text: f"{what}: {text}"
            )

        with torch.inference_mode():
            found = []
            for seed in range(CALLS):
                if seed == CALLS // 2 and rank == size - 1:
                    time.sleep(3)
                delay()
                case = drawn()
                found.append(((seed, *case), *call(*case, seed)))
            for what, out, expected in found:
                check(what, out, expected)

            graphs = []
            for seed, (shape, algorithm) in enumerate(product(SHAPES, ALGORITHMS)):
                x = torch.full(shape, float(rank + seed), device=self.device).bfloat16()
                value_N = torch.full((shape[0],), float(rank), device=self.device)
                index_N = torch.full((shape[0],), size - rank, device=self.device)
                graph = torch.cuda.CUDAGraph()

                def run(x: torch.Tensor, *candidates: torch.Tensor, algorithm: str) -> tuple[torch.Tensor, ...]:
                    for _ in range(3):
                        if reducer.fuses(x):
                            out, _ = edge(x, torch.zeros_like(x), x[0] * 0 + 1, algorithm)
                        else:
                            out = reducer.reduce(x.clone(), algorithm)
                        winner = reducer.argmax(*candidates)
                    return out, winner

                run(x, value_N, index_N, algorithm=algorithm)
                torch.cuda.synchronize()
                with torch.cuda.graph(graph):
                    outs = run(x, value_N, index_N, algorithm=algorithm)
                # Keep the tensors that the graph reads: otherwise their memory would be reused.
                graphs.append((graph, (x, value_N, index_N), outs, seed))
            for again in range(REPLAYS):
                graph, (x, _, _), (after, winner), seed = choose(graphs)
                step = choose(range(5))
                x.fill_(float(rank + seed + step))
                delay()
                graph.replay()
                total = float(sum(r + seed + step for r in range(size)))
                assert bool((after == total).all()), f"replay of {tuple(x.shape)}, graph {seed}: not {total}: {after}"
                assert bool((winner == 1).all()), f"replay of {tuple(x.shape)}, graph {seed}: {winner}"
                if again % 3 == 0:
                    case = drawn()
                    check(("between replays", again, *case), *call(*case, again))
        # NCCL's group does not end before the graphs that call it are gone.
        del graph, graphs, outs, after, winner
        collective.barrier()
        collective.close()


class RacesOfThree(Races):
    """The parts of a row are not a power of two."""

    size = min(3, max(2, GPUS))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("races", [Races, RacesOfThree])
def test_no_call_reads_the_data_of_another(races: type[Races]) -> None:
    on_ranks(races(), "race", races.size, timeout=280)


PROMPTS = ["def fibonacci(n):\n", "import os\n\nclass Path:\n", "for i in range(10):\n    "]
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)


def tokens(*overrides: str) -> list[list[int]]:
    with LLM("tiny", overrides=["engine.dtype=float32", "engine.max_len=256", *overrides]) as llm:
        return [g.token_ids for g in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("graphs", ["true", "false"])
@pytest.mark.parametrize("algorithm", ["measured", *ALGORITHMS, "nccl_sharded"])
def test_two_gpus_give_the_tokens_of_one_cpu(algorithm: str, graphs: str) -> None:
    found = tokens(
        "executor=multiproc",
        "engine.tp=2",
        "engine.device=cuda",
        "engine.depth=2",
        "engine.max_seqs=8",
        "attention=triton",
        "collective=symm_mem",
        f"collective.algorithm={algorithm}",
        f"engine.cuda_graphs={graphs}",
    )
    assert found == tokens("engine.device=cpu")
