"""Executors without a device, for cpu_step.py: the host's work is real, and the answers are made up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from dovetail.core.interfaces import (
    Blobs,
    Executor,
    ExecutorInfo,
    ForwardContext,
    Hidden,
    KVGroup,
    LateInputs,
    Progress,
    RowFlag,
    RowResult,
    StepPlan,
    StepResult,
)
from dovetail.core.parallel.encoding import encode_blob, encode_plan
from dovetail.core.parallel.slot_ledger import SlotLedger
from dovetail.core.testing.executor_scripts import small_composition
from dovetail.core.testing.toy import SPEC, VOCAB
from dovetail.core.worker.loader import load_rank
from dovetail.core.worker.runner import Runner

PAGE = 16
MIXED = 1024
"""Most tokens of a mixed step that runs as a graph."""
SAMPLE = int(RowFlag.SAMPLE)


class InstantDevice(Executor):
    """Encodes each plan as for several ranks and answers with a token for each row that samples."""

    again = lookahead = 0
    """Tokens of a cached prefix that are fed again, and drafts, which ToyComposition reads."""

    def __init__(self, pages: int, max_len: int, running: int) -> None:
        self.pages, self.max_len, self.running = pages, max_len, running
        self._ledger = SlotLedger()
        self._plans: deque[StepPlan] = deque()

    def start(self, progress: Progress) -> ExecutorInfo:
        groups = (KVGroup(0, (0,), page_tokens=PAGE),)
        return ExecutorInfo(SPEC, groups, {0: self.pages}, self.max_len, 0, "instant", {})

    def submit(self, plan: StepPlan, blobs: Blobs) -> None:
        encode_plan(plan, self._ledger.digest)
        self._ledger.apply(plan)
        for key, blob in blobs.items():
            encode_blob(*key, blob)
        self._plans.append(plan)

    def complete(self, late: LateInputs) -> None:
        raise ValueError("no plan here waits for late inputs")

    def collect(self) -> StepResult:
        plan = self._plans.popleft()
        rows = (
            RowResult(i, row.uid, row.epoch, (1 + plan.step % (VOCAB - 1),) if row.flags & SAMPLE else ())
            for i, row in enumerate(plan.rows)
        )
        return StepResult(plan.step, tuple(rows))

    @property
    def pending(self) -> int:
        return len(self._plans)

    def shutdown(self) -> None:
        self._plans.clear()


class OneRank(Executor):
    """The runner of a process with a GPU, except for the model: its layers and sampling are graphs that do nothing."""

    again = lookahead = 0

    def __init__(self, pages: int, max_len: int, running: int) -> None:
        self.pages, self.max_len, self.running = pages, max_len, running
        self._ledger = SlotLedger()
        self._in_flight = 0

    def start(self, progress: Progress) -> ExecutorInfo:
        torch.set_num_threads(1)
        words = f"engine.max_seqs={self.running} engine.max_len={self.max_len} model.hf.max_position_embeddings=4096"
        rank = load_rank(small_composition(*words.split()), progress)
        parts, info = rank.parts, rank.info
        model, attention = _NoModel(parts.model.build), _NoAttention()
        parts = replace(parts, model=model, attention=attention, graph_tokens=MIXED)  # type: ignore[arg-type]
        self._runner = Runner(parts, info.num_pages, lambda graphs: graphs.capture(_nothing, progress))
        return replace(info, num_pages=dict.fromkeys(info.num_pages, self.pages))

    def submit(self, plan: StepPlan, blobs: Blobs) -> None:
        self._ledger.apply(plan)
        self._runner.execute(plan, blobs)
        self._in_flight += 1

    def complete(self, late: LateInputs) -> None:
        raise ValueError("no plan here waits for late inputs")

    def collect(self) -> StepResult:
        self._in_flight -= 1
        return self._runner.collect()

    @property
    def pending(self) -> int:
        return self._in_flight

    def shutdown(self) -> None:
        self._runner.close()


class _NoModel:
    kv_groups = ()

    def __init__(self, build: Any) -> None:
        self.build = build

    def embed(self, tokens_T: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(tokens_T), self.build.spec.hidden)

    def forward(self, embeds_TC: torch.Tensor, ctx: ForwardContext, taps: tuple[int, ...]) -> Hidden:
        return Hidden(embeds_TC, {})

    def logits(self, states_BC: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(states_BC), self.build.spec.vocab)

    def local_logits(self, states_BC: torch.Tensor) -> tuple[torch.Tensor, int]:
        return self.logits(states_BC), 0


class _NoAttention:
    def bind(self, pools: object) -> None:
        """Nothing."""

    def plan_host(self, host: object) -> None:
        """Plan nothing."""

    def plan_device(self, *given: object) -> None:
        """Plan nothing."""


def _nothing(call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Capture a graph that does nothing: its outputs keep their first values."""
    return lambda: None, call()


EXECUTORS: dict[str, type[InstantDevice | OneRank]] = {"ranks": InstantDevice, "runner": OneRank}
