"""The contract suite of cost models. Subclass CostContract in a test module and override `make`."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys
from dataclasses import replace
from typing import ClassVar

import pytest

from dovetail.core.compose import EngineConfig
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import CostModel, Formats, ModelSpec, Parameters, Row, RowFlag, RowWork, StepPlan

SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab=32000,
    layers=24,
    hidden=2048,
    heads=16,
    kv_heads=4,
    head_dim=128,
    intermediate=8192,
    max_len=8192,
    dtype="bfloat16",
    parameters=Parameters(65_536_000, 65_536_000, 251_658_240, 1_207_959_552, rest=100_352),
)
"""About 1.6 billion parameters, dense."""
ROWS = (
    RowWork(1, 100),
    RowWork(1, 8000),
    RowWork(3, 500, sampled=3),
    RowWork(64, 64, sampled=0),
    RowWork(512, 4000, sampled=0),
    RowWork(1, 900, times=17),
)
"""Decode rows, one that verifies drafts, chunks."""


class CostContract:
    """Every sentence of dovetail.core.interfaces.CostModel. `make` is the only thing that must be overridden."""

    spec: ClassVar[ModelSpec] = SPEC
    """What it is bound to, with the next two."""
    engine: ClassVar[EngineConfig] = EngineConfig()
    """Settings."""
    formats: ClassVar[Formats] = Formats("bfloat16", 2, 16.0, "bfloat16", 2)
    """Number formats."""

    def make(self) -> CostModel:
        """A fresh cost model, not bound; every call gives an equal one."""
        raise NotImplementedError("return your cost model: MyCost(MyConfig(...))")

    def bound(self) -> CostModel:
        cost = self.make()
        if not cost.predicts:
            pytest.skip("it predicts nothing")
        cost.bind(self.spec, self.engine, self.formats)
        return cost

    def batches(self, count: int = 30) -> list[list[RowWork]]:
        rng = random.Random(0)
        return [[row] for row in ROWS] + [rng.choices(ROWS, k=rng.randrange(2, 9)) for _ in range(count)]

    # Of one step.

    def test_no_rows_take_no_time(self) -> None:
        assert self.bound().step_seconds([]) == 0.0

    def test_every_step_takes_some_time(self) -> None:
        cost = self.bound()
        for rows in self.batches():
            seconds = cost.step_seconds(rows)
            assert isinstance(seconds, float) and 0 < seconds < math.inf, f"{seconds} for {rows}"

    def test_more_work_takes_no_less_time(self) -> None:
        """One more row, more tokens, a longer context."""
        cost = self.bound()
        for rows, more in itertools.product(self.batches(8), ROWS):
            _no_less(cost.step_seconds([*rows, more]), cost.step_seconds(rows), f"{rows} with {more}")
        for row in ROWS:
            for larger in (
                row._replace(bound=2 * row.bound),
                row._replace(tokens=row.tokens + 40, bound=row.bound + 40),
                row._replace(times=row.times + 1),
            ):
                _no_less(cost.step_seconds([larger]), cost.step_seconds([row]), f"{larger} instead of {row}")

    def test_times_stands_for_so_many_equal_rows(self) -> None:
        cost = self.bound()
        for row in ROWS:
            together = cost.step_seconds([ROWS[0], row._replace(times=5)])
            apart = cost.step_seconds([ROWS[0], *[row._replace(times=1)] * 5])
            assert together == pytest.approx(apart), f"five of {row}: {together} with times=5, {apart} one by one"

    def test_the_order_of_rows_does_not_matter(self) -> None:
        cost = self.bound()
        for rows in self.batches():
            assert cost.step_seconds(rows[::-1]) == pytest.approx(cost.step_seconds(rows)), f"{rows} backwards"

    def test_rows_may_come_from_a_generator(self) -> None:
        cost = self.bound()
        for rows in self.batches(8):
            assert cost.step_seconds(row for row in rows) == cost.step_seconds(rows)

    def test_asking_changes_nothing(self) -> None:
        """Schedulers ask about steps that never come."""
        cost, other = self.bound(), self.bound()
        first = [cost.step_seconds(rows) for rows in self.batches()]
        assert [cost.step_seconds(rows) for rows in self.batches()] == first, "asked again, it says something else"
        backwards = [other.step_seconds(rows) for rows in reversed(self.batches())]
        assert backwards[::-1] == first, "what was asked before shows"

    # Of what is made of steps.

    def test_a_plan_takes_what_its_rows_take(self) -> None:
        rows = [
            Row(0, 7, 1, 3, 500, 2, int(RowFlag.SAMPLE | RowFlag.DECODE)),
            Row(1, 8, 1, 64, 64, 0, 0),
            Row(2, 9, 1, 64, 128, 0, int(RowFlag.SAMPLE)),
        ]
        cost = self.bound()
        works = [RowWork(3, 500, 3), RowWork(64, 64, 0), RowWork(64, 128, 1)]
        assert cost.seconds(StepPlan(step=0, rows=rows)) == pytest.approx(cost.step_seconds(works))

    def test_decode_and_prefill_are_sums_of_steps(self) -> None:
        cost = self.bound()
        decode = cost.step_seconds([RowWork(1, 900, times=8)])
        assert cost.decode_seconds(8, 900) == pytest.approx(decode), "decode_seconds is one step of equal rows"
        chunks = [RowWork(256, 356, 0), RowWork(256, 612, 0), RowWork(88, 700, 1)]
        prefill = sum(cost.step_seconds([chunk]) for chunk in chunks)
        assert cost.prefill_seconds(600, cached=100, chunk=256) == pytest.approx(prefill), "a step for each chunk"
        assert cost.prefill_seconds(600) == cost.prefill_seconds(600, chunk=self.engine.token_budget)

    # Of memory.

    def test_bytes_are_counted(self) -> None:
        cost, p, formats = self.bound(), self.spec.parameters, self.formats
        assert p is not None
        linear = (p.attention + p.mlp + p.experts) * formats.weight_bits / 8
        total = linear + (p.embedding + p.head + p.rest) * formats.dtype_bytes
        assert cost.weight_bytes() == pytest.approx(total)
        assert 0 < cost.step_weight_bytes(1) <= cost.step_weight_bytes() <= cost.weight_bytes()
        assert cost.kv_bytes(1000) == 1000 * self.spec.kv_bytes_per_token(formats.kv_bytes)

    # Of what it needs.

    def test_it_refuses_a_model_in_bind_or_predicts(self) -> None:
        """Here one that cannot count its parameters."""
        cost = self.make()
        if not cost.predicts:
            pytest.skip("it predicts nothing")
        try:
            cost.bind(replace(self.spec, parameters=None), self.engine, self.formats)
        except ConfigError:
            return
        assert cost.step_seconds([ROWS[0]]) > 0

    def test_it_needs_no_torch(self) -> None:
        """The planner runs where there is none."""
        code = f"import sys, {type(self.make()).__module__}; sys.exit('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr or "its module imports torch"


def _no_less(more: float, less: float, what: str) -> None:
    assert more >= less * (1 - 1e-9), f"{what}: {more} s after {less} s"
