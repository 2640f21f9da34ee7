"""collective=symm_mem on the GPUs of one host: the contract, ranks of unequal speed, and a whole engine's tokens."""

from __future__ import annotations

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.core.interfaces import PLAIN, Collective
from dovetail.core.ops import rms_norm
from dovetail.core.testing.collective import CollectiveContract
from dovetail.core.testing.ranks import on_ranks
from dovetail.plugins.collective.config import NcclConfig, SymmMemConfig
from dovetail.plugins.collective.nccl import NcclCollective
from dovetail.plugins.collective.symm_mem.collective import SymmMemCollective

GPUS = torch.cuda.device_count()
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
    """Parts of a row that are no power of two."""

    size = min(3, max(2, GPUS))


SHAPES = ((1, 4096), (64, 4096), (3, 7168), (300, 1024), (132, 128))
EPS = 1e-5


class Races:
    """Calls of every kind and size in one order, while ranks are slowed down at random, eagerly and in graphs that are
    replayed in another order. Sums are of small integers, so they are exact."""

    size = max(2, GPUS)
    device = torch.device("cuda")

    def race(self, rank: int, size: int, address: str) -> None:
        collective = SymmMemCollective(SymmMemConfig(algorithm="two_shot"))
        collective.connect(rank, size, address, self.device)
        reducer = collective.reducer
        order = torch.Generator().manual_seed(0)
        delays = torch.Generator().manual_seed(rank)

        def case(shape: tuple[int, int], algorithm: str, fused: bool, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
            def values(who: int) -> torch.Tensor:
                return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(97 * seed + who)).bfloat16()

            mine = values(rank).to(self.device)
            total = torch.stack([values(who) for who in range(size)]).sum(0).to(self.device)
            if not fused:
                return reducer.reduce(mine, algorithm), total
            residual, weight = values(91).to(self.device), torch.ones_like(mine[0])
            bundle, after = reducer.boundary(mine, residual, weight, EPS, (PLAIN,), algorithm)
            expected, summed = rms_norm(total, residual, weight, EPS)
            return (
                torch.stack((after, bundle[PLAIN].values)),
                torch.stack((summed, expected[PLAIN].values)),
            )

        with torch.inference_mode():
            found = []
            for seed in range(300):
                shape = SHAPES[int(torch.randint(len(SHAPES), (), generator=order))]
                algorithm = ("one_shot", "two_shot")[int(torch.randint(2, (), generator=order))]
                fused = bool(torch.randint(2, (), generator=order))
                if torch.rand((), generator=delays) < 0.3:
                    torch.cuda._sleep(int(torch.randint(500_000, (), generator=delays)))
                found.append((seed, shape, algorithm, fused, *case(shape, algorithm, fused, seed)))
            for *what, out, expected in found:
                torch.testing.assert_close(out, expected, rtol=0.01, atol=0.01, msg=lambda text: f"{what}: {text}")  # noqa: B023

            graphs = []
            for seed, (shape, algorithm) in enumerate((s, a) for s in SHAPES for a in ("one_shot", "two_shot")):
                x = torch.full(shape, float(rank + seed), device=self.device).bfloat16()
                residual, weight = torch.zeros_like(x), torch.ones_like(x[0])
                reducer.boundary(x, residual, weight, EPS, (PLAIN,), algorithm)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for _ in range(3):
                        _, after = reducer.boundary(x, residual, weight, EPS, (PLAIN,), algorithm)
                graphs.append((graph, x, after, seed))
            for _ in range(100):
                graph, x, after, seed = graphs[int(torch.randint(len(graphs), (), generator=order))]
                step = int(torch.randint(5, (), generator=order))
                x.fill_(float(rank + seed + step))
                if torch.rand((), generator=delays) < 0.3:
                    torch.cuda._sleep(int(torch.randint(500_000, (), generator=delays)))
                graph.replay()
                total = float(sum(r + seed + step for r in range(size)))
                assert bool((after == total).all()), f"replay of {tuple(x.shape)}, graph {seed}: not {total}: {after}"
        collective.barrier()
        collective.close()


@pytest.mark.timeout(300)
def test_no_call_reads_what_another_one_sent() -> None:
    on_ranks(Races(), "race", Races.size, timeout=280)


PROMPTS = ["def fibonacci(n):\n", "import os\n\nclass Path:\n", "for i in range(10):\n    "]
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)


def tokens(*overrides: str) -> list[list[int]]:
    with LLM("tiny", overrides=["engine.dtype=float32", "engine.max_len=256", *overrides]) as llm:
        return [g.token_ids for g in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("graphs", ["true", "false"])
@pytest.mark.parametrize("algorithm", ["measured", "one_shot", "two_shot"])
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
