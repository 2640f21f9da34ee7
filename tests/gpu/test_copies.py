"""Boundaries of half-batches through copy engines: contract, ranks of unequal speed, engine tokens, a dead rank."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.core.interfaces import PLAIN, Collective, Partial
from dovetail.core.layers import RMSNorm
from dovetail.core.testing.collective import CollectiveContract
from dovetail.core.testing.ranks import on_ranks
from dovetail.core.worker.two_batch_overlap import Side, SideStream, interleave
from dovetail.plugins.collective.config import SymmMemConfig
from dovetail.plugins.collective.symm_mem.collective import SymmMemCollective
from dovetail.plugins.collective.symm_mem.copies import CopiedRows
from dovetail.plugins.quant.fp8.format import FP8_TOKEN
from dovetail.plugins.quant.int8.format import INT8_TOKEN

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"), pytest.mark.timeout(300)]
ROWS = (96, 64, 256, 40, 512, 250)
"""Rows of a half in consecutive calls. Memory has to grow in between."""
CALLS, COLUMNS = 48, 1024
CYCLES = (0, 0, 100_000, 2_000_000)
"""Delays of a stream: one millisecond at most."""


class TestCopies(CollectiveContract):
    size = max(2, GPUS)
    device = torch.device("cuda")

    def make(self) -> Collective:
        collective = SymmMemCollective(SymmMemConfig())
        collective.overlapped = True
        return collective


class Lagging(SideStream):
    def __init__(self, device: torch.device, seed: int) -> None:
        super().__init__(device)
        self.random = random.Random(seed)

    def start(self, call: Any) -> Any:
        def late() -> Any:
            torch.cuda._sleep(self.random.choice(CYCLES))
            return call()

        return super().start(late)

    def finish(self, started: Any) -> Any:
        result = super().finish(started)
        torch.cuda._sleep(self.random.choice(CYCLES))
        return result


class OneSlot(CopiedRows):
    """Broken: gathers into the same memory each time."""

    def _gather_layout(self, *what: Any) -> Any:
        self._gather_buffers = self._gather_buffers[::-1]
        return super()._gather_layout(*what)


class Halves:
    """Two half-batches whose boundaries have known sums. Values are small integers, so that sums are exact."""

    size = max(2, GPUS)
    device = torch.device("cuda")

    def run(self, rank: int, size: int, address: str) -> None:
        collective = SymmMemCollective(SymmMemConfig())
        collective.connect(rank, size, address, self.device)
        try:
            with torch.inference_mode():
                for seed in range(4):
                    side = Lagging(torch.device("cuda", torch.cuda.current_device()), 10 * rank + seed)
                    assert self.wrong(collective, side, seed) == []
                collective.barrier()
                # The test must detect memory that is reused too early.
                broken = OneSlot(collective._memory, collective.copies._driver, rank, size)  # type: ignore[arg-type, union-attr]
                collective.copies = broken
                side = Lagging(torch.device("cuda", torch.cuda.current_device()), rank)
                found = [self.wrong(collective, side, seed) for seed in range(4)]
                assert any(found), "the test sees nothing"
                collective.barrier()
        finally:
            collective.close()

    def wrong(self, collective: SymmMemCollective, side: Side, seed: int) -> list[tuple[int, int]]:
        """Return (half, call) of each boundary with a wrong bundle."""
        build: Any = SimpleNamespace(dtype=torch.bfloat16, device=self.device)
        norm = RMSNorm("norm", build, COLUMNS, 1e-5)
        norm.weight.fill_(1.0)
        collective.overlapped = True
        halves: list[Any] = [half(collective, norm, seed, index) for index in range(2)]
        try:
            found: Any = interleave(halves, side)
        finally:
            collective.overlapped = False
        torch.cuda.synchronize()
        return [
            (index, call)
            for index, checks in enumerate(found)
            for call, (got, expected) in enumerate(checks)
            if not torch.equal(got, expected)
        ]


def half(collective: SymmMemCollective, norm: RMSNorm, seed: int, index: int) -> Iterator[Any]:
    checks = []
    for call in range(CALLS):
        rows = ROWS[call % len(ROWS)]

        def summand(rank: int, rows: int = rows, call: int = call) -> torch.Tensor:
            generator = torch.Generator("cuda").manual_seed(100_000 * seed + 1000 * call + 10 * rank + index)
            return torch.randint(-4, 5, (rows, COLUMNS), generator=generator, device="cuda").bfloat16()

        # One kernel writes all formats; if it cannot, several do.
        emit = ((PLAIN, FP8_TOKEN), (FP8_TOKEN,), (FP8_TOKEN, INT8_TOKEN))[call % 3]
        bundle, _ = yield partial(collective.boundary, Partial(summand(collective.rank)), None, norm, emit)
        wanted, _ = norm(torch.stack([summand(rank) for rank in range(collective.size)]).sum(0), None, emit)
        # Read late, while the other half's call is running.
        torch.cuda._sleep(random.choice(CYCLES))
        for fmt in emit:
            got, expected = bundle[fmt], wanted[fmt]
            checks.append((got.values.view(torch.uint8).clone(), expected.values.view(torch.uint8)))
            if got.scale is not None:
                checks.append((got.scale.clone(), expected.scale))
    return checks  # type: ignore[return-value]


def test_lagging_halves_and_ranks_change_no_bit() -> None:
    halves = Halves()
    on_ranks(halves, "run", halves.size, timeout=280)


MODEL = [
    "engine.dtype=float32",
    "engine.max_len=512",
    "engine.device=cuda",
    "executor=multiproc",
    "engine.tp=2",
    "attention=triton",
    "collective=symm_mem",
    "engine.overlap_tokens=64",
    "engine.graph_tokens=0",
]
PROMPTS = ["def fibonacci(n):\n" * 12, "import os\n\nclass Path:\n" * 9, "for i in range(10):\n    "]
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)


def tokens(llm: LLM) -> list[list[int]]:
    return [found.token_ids for found in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("beside", ["copies", "nccl"])
def test_halves_give_the_tokens_of_one_cpu(beside: str) -> None:
    with LLM("tiny", overrides=["engine.dtype=float32", "engine.max_len=512", "engine.device=cpu"]) as llm:
        expected = tokens(llm)
    with LLM("tiny", overrides=[*MODEL, f"collective.beside={beside}"]) as llm:
        assert [tokens(llm) for _ in range(3)] == [expected] * 3


def test_a_killed_rank_ends_copies_that_wait_for_it() -> None:
    with LLM("tiny", overrides=[*MODEL, "engine.max_seqs=4"]) as llm:
        victim = llm.engine.executor.worker_pids[-1]  # type: ignore[attr-defined]
        params = SamplingParams(temperature=0.0, max_tokens=1)
        threading.Timer(0.5, os.kill, (victim, signal.SIGKILL)).start()
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="rank"):
            while time.monotonic() - began < 60:
                llm.generate([f"{index} {prompt}" for index, prompt in enumerate(PROMPTS * 4)], params)
        assert time.monotonic() - began < 30
