"""Start-up compiles every kernel that a step can need. Otherwise a step and all its requests wait for a compilation.

The plans come from a real engine with a simulated device. A rank on an H200 that is not there runs them.
DOVETAIL_KERNELS=all adds models, and uses presets unchanged.
"""

from __future__ import annotations

import importlib.util
import os
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy

import pytest

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton's launcher", allow_module_level=True)

import torch
import triton

from dovetail.core.compose import Composition, compose
from dovetail.core.engine.engine import start_engine
from dovetail.core.interfaces import RowFlag, SamplingParams
from dovetail.core.ops.kernels import launch
from dovetail.core.testing.executor_scripts import quiet
from dovetail.core.testing.no_gpu import no_gpu
from dovetail.core.worker import two_batch_overlap
from dovetail.core.worker.loader import load_rank
from dovetail.core.worker.runner import Runner
from dovetail.plugins.collective.nccl import NcclCollective
from dovetail.plugins.collective.symm_mem import collective as symm_mem
from dovetail.plugins.collective.symm_mem.collective import SymmMemCollective
from dovetail.plugins.collective.symm_mem.size_table import SizeTable

from ..nowhere import lone_copies, lone_reducer

EVERYTHING = os.environ.get("DOVETAIL_KERNELS") == "all"
# Widths are those of the model, since they determine the kernels. Layers are alike. No sequence is as long as a step.
SHAPES = ["model.load=dummy", "model.hf.num_hidden_layers=2", "engine.kv_pages=4000", "engine.max_len=1900"]
if not EVERYTHING:
    SHAPES += ["engine.max_seqs=160", "engine.graph_tokens=64", "engine.token_budget=4096"]
PRESETS, MODELS = ["h200_fp8_tp1"], ["llama3_8b"]
if EVERYTHING:
    PRESETS += ["h200_bf16_tp1", "h200_int4_tp1", "h200_w4a8_tp1"]
    MODELS += ["llama2_7b", "llama3_70b", "mistral_7b", "qwen25_7b", "qwen3_8b", "falcon_7b", "gptj_6b"]
CASES = [f"+preset={preset} model={model}" for preset in PRESETS for model in MODELS]
RANKS = ["+preset=h200_fp8_tp8 engine.max_seqs=24 engine.graph_tokens=32"]
SIMULATED = ["executor=simulated", "engine.device=cpu", "attention=sdpa", "cost=none", "engine.kv_dtype=auto"]
MOST_VARIANTS = 85
KINDS = {
    "greedy": dict(temperature=0.0),
    "random": dict(temperature=0.7),
    "filtered": dict(temperature=0.7, top_p=0.9, top_k=20, min_p=0.01),
    "logprobs": dict(temperature=0.7, top_p=0.9, logprobs=20),
    "prompt": dict(prompt_logprobs=2, logprobs=0),
    "penalties": dict(temperature=0.7, presence_penalty=0.5, logit_bias={5: 1.0}, min_tokens=1),
}
DECODE = int(RowFlag.DECODE)
Do = Callable[[Runner], None]


def served(rng: random.Random, *overrides: str, drafts: int = 0) -> Iterator[Do]:
    """Yield the calls that a rank receives while requests come and go: few and many, of all kinds, in chunks and one
    token per step. In one of three steps decode rows get `drafts` drafts, and in one each row gets a number of its own,
    since the simulated device has none."""
    engine = start_engine(compose([*SHAPES, *overrides, *SIMULATED]))
    calls: deque[Do] = deque()
    submit, complete = engine.executor.submit, engine.executor.complete

    def recorded_submit(plan, blobs):
        mine = deepcopy(plan), dict(blobs)
        if drafts and plan.step % 3:
            for i, row in enumerate(plan.rows):
                if row.flags & DECODE:
                    own = drafts if plan.step % 3 == 1 else row.slot % (1 + drafts)
                    mine[0].rows[i] = row._replace(count=1 + own, bound=row.bound + own, draft=own)
        calls.append(lambda runner: runner.execute(*mine))
        submit(plan, blobs)

    def recorded_complete(late):
        calls.append(lambda runner: runner.complete(late))
        complete(late)

    engine.executor.submit, engine.executor.complete = recorded_submit, recorded_complete
    try:
        # The last crowd stays while it grows, so that steps have chunks and any number of decode rows.
        for crowd, prompts, outputs, kinds in (
            (1, (17,), (4,), ["greedy"]),
            # Split over eight ranks, these rows make 16 each, though they are no multiple of 16.
            (1, (123,), (2,), ["greedy"]),
            (3, (1, 500), (4,), ["greedy", "filtered"]),
            (60, (1, 64, 500, 1800), (1, 4), list(KINDS)),
            (engine.limits.max_seqs, (100, 200, 500), (60,), ["greedy", "random"]),
        ):
            for _ in range(crowd):
                prompt = [rng.randrange(1000) for _ in range(rng.choice(prompts))]
                params = SamplingParams(max_tokens=rng.choice(outputs), ignore_eos=True, **KINDS[rng.choice(kinds)])
                engine.add(prompt[: engine.info.max_len - params.max_tokens - 1], params)
            while engine.has_work:
                engine.step()
                yield from calls
                calls.clear()
    finally:
        engine.shutdown()


class OneOfEight(SymmMemCollective):
    """A rank without its peers: launches its kernels, and returns tensors shaped like NCCL's."""

    def connect(self, rank: int, size: int, address: str, device: torch.device) -> None:
        self.rank, self.size, self._device = rank, size, device
        self.reducer, self.copies = lone_reducer(rank, size), lone_copies(rank, size)
        self.sums = self.boundaries = SizeTable((1 << 18, 1 << 24, 1 << 30), ("one_shot", "two_shot", "nccl"))
        sharded = SizeTable((1 << 18, 1 << 30), ("two_shot", "sharded"))
        self.sharded_boundaries = {False: sharded, True: sharded}

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x] * self.size, dim=-1)

    def barrier(self) -> None: ...


@pytest.mark.nightly
@pytest.mark.parametrize("case", RANKS)
def test_no_step_of_several_ranks_launches_an_uncompiled_kernel(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large steps run in halves, and sums go through symmetric memory."""
    alone = ["engine.tp=1", "engine.overlap_tokens=0", "collective=nccl"]
    calls = list(served(random.Random(1), *case.split(), *alone))
    monkeypatch.setattr(symm_mem, "SymmMemCollective", OneOfEight)
    monkeypatch.setattr(NcclCollective, "all_reduce", lambda self, x: x)
    monkeypatch.setattr(two_batch_overlap, "SideStream", lambda device: two_batch_overlap.Inline())
    kept: list[torch.device] = []
    monkeypatch.setattr(launch, "keep_shared_memory", kept.append)
    assert not launched_uncompiled(compose([*SHAPES, *case.split()]), calls, size=8)
    assert [device.type for device in kept] == ["cuda"], "otherwise matmuls find no room after an edge"


@pytest.mark.parametrize("case", CASES)
def test_no_step_launches_an_uncompiled_kernel(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list(served(random.Random(0), *case.split()))
    kept: list[torch.device] = []
    monkeypatch.setattr(launch, "keep_shared_memory", kept.append)
    assert not launched_uncompiled(compose([*SHAPES, *case.split()]), calls)
    assert [device.type for device in kept] == ["cuda"], "otherwise matmuls find no room after a norm"


@pytest.mark.skipif(not EVERYTHING, reason="takes half a minute; .ci/nightly runs it")
def test_no_step_with_or_without_drafts_launches_an_uncompiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    case = ["+preset=h200_fp8_tp1", "model=llama3_8b", "engine.max_seqs=24", "engine.graph_tokens=256"]
    calls = list(served(random.Random(2), *case, drafts=4))
    monkeypatch.setattr(launch, "keep_shared_memory", lambda device: None)
    assert not launched_uncompiled(compose([*SHAPES, *case, "spec_decode=ngram"]), calls)


def launched_uncompiled(composition: Composition, calls: Iterable[Do], **place: int) -> list[tuple[str, str]]:
    """Return the kernels and their variants that steps launched and start-up did not."""
    with triton.knobs.compilation.scope(), no_gpu(machine_code=False) as compiled:
        rank = load_rank(composition, quiet, **place)  # type: ignore[arg-type]
        runner = rank.bind(rank.info.num_pages)
        ready = len(compiled.variants)
        assert triton.knobs.compilation.listener is not None, "an uncompiled kernel would be reported"
        for call in calls:
            call(runner)
        uncompiled = list(compiled.variants)[ready:]
    assert ready > 30, "start-up launched kernels"
    assert EVERYTHING or ready <= MOST_VARIANTS, "start-up compiles more variants than it did"
    return uncompiled
