"""Contract suite for cost models. Subclass CostContract in a test module and override `make`."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import ClassVar

import pytest

from dovetail.core.compose import EngineConfig
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import CostModel, Formats, ModelSpec, Parameters, Row, RowFlag, RowWork, StepPlan
from dovetail.core.testing.suite import assert_torch_free

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
"""Dense model of about 1.6 billion parameters."""
ROWS = (
    RowWork(1, 100),
    RowWork(1, 8000),
    RowWork(3, 500, sampled=3),
    RowWork(64, 64, sampled=0),
    RowWork(512, 4000, sampled=0),
    RowWork(1, 900, times=17),
)
"""Decode rows, a row with drafts, and chunks."""


class CostContract:
    """Tests of the rules of dovetail.core.interfaces.CostModel. Only `make` must be overridden."""

    spec: ClassVar[ModelSpec] = SPEC
    """Model that the cost model is bound to."""
    engine: ClassVar[EngineConfig] = EngineConfig()
    """Engine settings that it is bound to."""
    formats: ClassVar[Formats] = Formats("bfloat16", 2, 16.0, "bfloat16", 2)
    """Number formats that it is bound to."""

    def make(self) -> CostModel:
        """Return a fresh, unbound cost model. Every call must return an equal one."""
        raise NotImplementedError("return your cost model: MyCost(MyConfig(...))")

    def bound(self) -> CostModel:
        cost = self.make()
        if not cost.predicts:
            pytest.skip("predicts = False")
        cost.bind(self.spec, self.engine, self.formats)
        return cost

    def batches(self, count: int = 30) -> list[list[RowWork]]:
        rng = random.Random(0)
        return [[row] for row in ROWS] + [rng.choices(ROWS, k=rng.randrange(2, 9)) for _ in range(count)]

    # One step

    def test_no_rows_take_no_time(self) -> None:
        assert self.bound().step_seconds([]) == 0.0, "a step without rows takes 0 s"

    def test_every_step_takes_some_time(self) -> None:
        cost = self.bound()
        for rows in self.batches():
            seconds = cost.step_seconds(rows)
            valid = isinstance(seconds, float) and 0 < seconds < math.inf
            assert valid, f"step_seconds must be a positive finite float, got {seconds!r} for {rows}"

    def test_more_work_takes_no_less_time(self) -> None:
        """A further row, more tokens or a longer context never lower the predicted time."""
        cost = self.bound()
        for rows, more in itertools.product(self.batches(8), ROWS):
            _no_less(cost.step_seconds([*rows, more]), cost.step_seconds(rows), f"{rows} plus {more}")
        for row in ROWS:
            for larger in (
                row._replace(bound=2 * row.bound),
                row._replace(tokens=row.tokens + 40, bound=row.bound + 40),
                row._replace(times=row.times + 1),
            ):
                _no_less(cost.step_seconds([larger]), cost.step_seconds([row]), f"{larger} instead of {row}")

    def test_times_multiplies_a_row(self) -> None:
        cost = self.bound()
        for row in ROWS:
            together = cost.step_seconds([ROWS[0], row._replace(times=5)])
            apart = cost.step_seconds([ROWS[0], *[row._replace(times=1)] * 5])
            assert together == pytest.approx(apart), f"{row} with times=5 takes {together} s, five such rows {apart} s"

    def test_the_order_of_rows_does_not_matter(self) -> None:
        cost = self.bound()
        for rows in self.batches():
            reverse = cost.step_seconds(rows[::-1])
            assert reverse == pytest.approx(cost.step_seconds(rows)), f"reverse order changes the time of {rows}"

    def test_rows_may_come_from_a_generator(self) -> None:
        cost = self.bound()
        for rows in self.batches(8):
            assert cost.step_seconds(row for row in rows) == cost.step_seconds(rows), "rows may be any iterable"

    def test_predictions_are_pure(self) -> None:
        """Schedulers also ask about steps that never run."""
        cost, other = self.bound(), self.bound()
        first = [cost.step_seconds(rows) for rows in self.batches()]
        assert [cost.step_seconds(rows) for rows in self.batches()] == first, "equal calls must give equal seconds"
        backwards = [other.step_seconds(rows) for rows in reversed(self.batches())]
        assert backwards[::-1] == first, "seconds must not depend on earlier calls"

    def test_launches_take_no_negative_time(self) -> None:
        cost = self.bound()
        decodes = [Row(slot, slot, 1, 1, 500, 0, int(RowFlag.SAMPLE | RowFlag.DECODE)) for slot in range(8)]
        prompts = [Row(9, 9, 1, 64, 64, 0, 0), Row(10, 10, 1, 64, 128, 0, int(RowFlag.SAMPLE))]
        for rows in (decodes, prompts, decodes + prompts):
            plan = StepPlan(step=0, rows=rows)
            seconds = cost.launch_seconds(plan)
            valid = isinstance(seconds, float) and 0 <= seconds < math.inf
            assert valid, f"launch_seconds must be a finite float of at least 0, got {seconds!r} for {rows}"
            assert cost.launch_seconds(plan) == seconds, "equal calls must give equal seconds"

    # Parts and sums of steps

    def test_terms_make_up_the_step(self) -> None:
        cost = self.bound()
        for rows in [[], *self.batches()]:
            if (terms := cost.terms(rows)) is None:
                pytest.skip("terms() is None: the model cannot be calibrated")
            assert min(terms) >= 0, f"no term may be negative, got {terms}"
            assert terms.seconds == pytest.approx(cost.step_seconds(rows)), f"{terms} must make up step_seconds"

    def test_a_plan_takes_as_long_as_its_rows(self) -> None:
        rows = [
            Row(0, 7, 1, 3, 500, 2, int(RowFlag.SAMPLE | RowFlag.DECODE)),
            Row(1, 8, 1, 64, 64, 0, 0),
            Row(2, 9, 1, 64, 128, 0, int(RowFlag.SAMPLE)),
        ]
        cost = self.bound()
        works = [RowWork(3, 500, 3), RowWork(64, 64, 0), RowWork(64, 128, 1)]
        found = cost.seconds(StepPlan(step=0, rows=rows))
        assert found == pytest.approx(cost.step_seconds(works)), "seconds(plan) must equal step_seconds of its rows"

    def test_decode_and_prefill_are_sums_of_steps(self) -> None:
        cost = self.bound()
        decode = cost.step_seconds([RowWork(1, 900, times=8)])
        assert cost.decode_seconds(8, 900) == pytest.approx(decode), "decode_seconds must be one step of equal rows"
        chunks = [RowWork(256, 356, 0), RowWork(256, 612, 0), RowWork(88, 700, 1)]
        prefill = sum(cost.step_seconds([chunk]) for chunk in chunks)
        found = cost.prefill_seconds(600, cached=100, chunk=256)
        assert found == pytest.approx(prefill), "prefill_seconds must be the sum of one step per chunk"
        found = cost.prefill_seconds(600, chunk=self.engine.token_budget)
        assert cost.prefill_seconds(600) == found, "the default chunk must be engine.token_budget"

    def test_lanes_take_the_time_of_the_slowest(self) -> None:
        cost, rows = self.bound(), list(ROWS)
        whole = cost.step_seconds(rows)
        equal = cost.lanes_seconds([rows, rows, rows])
        assert equal == pytest.approx(whole), "lanes with equal rows must take the time of one of them"
        alone = cost.lanes_seconds([rows[:1], rows, []])
        assert 0 < alone <= whole * (1 + 1e-9), f"other lanes have fewer rows: at most {whole} s, got {alone} s"
        if (terms := cost.lanes_terms([rows[:1], rows, []])) is not None:
            assert len(terms) == 3 and terms[2].seconds == 0.0, "lanes_terms must be those of each lane"

    def test_drafting_takes_time_if_the_drafter_has_a_model(self) -> None:
        cost = self.bound()
        assert cost.draft_seconds(8, 4, 900) == 0.0, "drafting takes 0 s unless the drafter has a model"
        cost.drafter = self.bound()
        assert cost.draft_seconds(8, 0, 900) == cost.draft_seconds(0, 4, 900) == 0.0, "no drafts take 0 s"
        passes = [cost.draft_seconds(8, drafts, 900) for drafts in range(1, 5)]
        assert 0 < passes[0] and passes == sorted(set(passes)), f"each further draft takes time, got {passes} s"
        _no_less(cost.draft_seconds(16, 4, 900), passes[-1], "drafting for 16 rows instead of 8")
        cost.drafts_in_one_pass = True
        few = cost.draft_seconds(8, 4, 900)
        assert 0 < few < passes[-1], f"drafts of one pass take less time than {passes[-1]} s of passes, got {few} s"

    # Memory

    def test_bytes_are_counted(self) -> None:
        cost, p, formats = self.bound(), self.spec.parameters, self.formats
        assert p is not None
        linear = (p.attention + p.mlp + p.experts) * formats.weight_bits / 8
        total = linear + (p.embedding + p.head + p.rest) * formats.dtype_bytes
        assert cost.weight_bytes() == pytest.approx(total), "weight_bytes must count every parameter in its format"
        cost.bind(self.spec, self.engine, replace(formats, head_bits=4.0))
        assert cost.weight_bytes() == pytest.approx(total - (p.head or p.embedding) * (formats.dtype_bytes - 0.5)), (
            "weight_bytes must count the matrix of logits with formats.head_bits"
        )
        sparse = replace(self.spec, parameters=replace(p, experts=8_000_000, active_experts=1_000_000))
        cost.bind(sparse, self.engine, formats)
        each = cost.weight_bytes() - 1_000_000 * (formats.weight_bits - 4.0)
        cost.bind(sparse, self.engine, replace(formats, expert_bits=4.0))
        assert cost.weight_bytes() == pytest.approx(each), (
            "weight_bytes must count routed experts with formats.expert_bits"
        )
        cost.bind(self.spec, self.engine, replace(formats, head_bits=4.0))
        ordered = 0 < cost.step_weight_bytes(1) <= cost.step_weight_bytes() <= cost.weight_bytes()
        assert ordered, "a step must not read more bytes than weight_bytes, nor fewer for more tokens"
        kv_bytes = 1000 * self.spec.kv_bytes_per_token(formats.kv_bytes)
        assert cost.kv_bytes(1000) == kv_bytes, "kv_bytes must be tokens times the model's KV bytes per token"

    # Requirements

    def test_it_refuses_a_model_in_bind_or_predicts(self) -> None:
        """bind may refuse a model that has no parameter count; otherwise predictions must work."""
        cost = self.make()
        if not cost.predicts:
            pytest.skip("predicts = False")
        try:
            cost.bind(replace(self.spec, parameters=None), self.engine, self.formats)
        except ConfigError:
            return
        assert cost.step_seconds([ROWS[0]]) > 0, "bind accepted the model, so step_seconds must be positive"

    def test_it_needs_no_torch(self) -> None:
        """The planner also runs without torch."""
        assert_torch_free(type(self.make()).__module__)


def _no_less(more: float, less: float, what: str) -> None:
    assert more >= less * (1 - 1e-9), f"more work must not take less time: {what} takes {more} s instead of {less} s"
