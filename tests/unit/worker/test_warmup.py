"""Warm-up steps are possible steps, and include the extremes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core.interfaces import FedTokens, RowFlag
from dovetail.core.ops.choices import temporarily
from dovetail.core.testing.executor_scripts import SMALL_LLAMA, VOCAB, small_runner
from dovetail.core.worker.warmup import (
    WarmupStep,
    run_warmup_steps,
    tuned_rows,
    warmup_masks,
    warmup_plan,
    warmup_steps,
)
from dovetail.plugins.spec_decode.draft_model import DraftModel

from ..ops.shipped import SHIPPED

NUMBERS = st.integers(1, 400)


@given(budget=NUMBERS, most=NUMBERS, longest=NUMBERS, lookahead=st.integers(0, 7))
@temporarily(SHIPPED)
def test_warm_up_steps_are_possible(budget: int, most: int, longest: int, lookahead: int) -> None:
    plans = [warmup_plan(step, [])[0] for step in warmup_steps(budget, most, longest, lookahead)]
    for plan in plans:
        assert 0 < len(plan.rows) <= most
        assert sum(row.count for row in plan.rows) <= budget
        assert all(0 < row.count <= row.bound <= longest for row in plan.rows)
    full = min(budget, most * longest)
    assert sum(row.count for row in plans[0].rows) == sum(row.count for row in plans[1].rows) == full
    assert len(plans[1].rows) == min(most, full), "every slot samples"
    drafts = min(lookahead, budget - 1, min(longest, full) - 2)
    if drafts > 0:
        drafted = [plan for plan in plans if plan.rows[0].draft]
        rows = min(most, budget // (1 + drafts))
        assert len(drafted[0].rows) == rows and drafted[0].rows[0].draft == drafts
        found = {(len(plan.rows), plan.rows[0].draft) for plan in drafted[1:]}
        assert found == {(count, fewer) for fewer in range(1, drafts + 1) for count in (1, 2) if count < rows}
        assert all(row.draft == row.count - 1 == plan.rows[0].draft for plan in drafted for row in plan.rows)
    alone = {plan.rows[0].count for plan in plans if len(plan.rows) == 1}
    assert {1, min(longest, full)} <= alone, "single chunks, the shortest and the longest"
    assert {64, 128} <= set(tuned_rows())
    assert {min(count, longest, full) for count in tuned_rows()} <= alone, "and those with dedicated matmul kernels"
    if most > 1 and longest > 1 and budget > 1:
        decoding = [sum(bool(row.flags & RowFlag.DECODE) for row in plan.rows) for plan in plans]
        assert max(decoding) > 0


@temporarily(SHIPPED)
def test_chunks_run_beside_as_many_decode_rows_as_one_kernel_serves() -> None:
    """One more decode row may need another kernel of attention."""
    steps = [step for step in warmup_steps(4096, 160, 1899) if 0 < step.decodes < step.rows]
    assert {count for count in SHIPPED.turns() if count < 157} | {157} == {step.decodes for step in steps}
    assert len(steps) > 6 and all(step.tokens > step.decodes for step in steps)


@pytest.mark.parametrize("decodes", [0, 1, 4])
def test_warm_up_steps_have_masks_for_rows_with_grammars(decodes: int) -> None:
    """They run where memory is measured, on a GPU: here by hand."""
    runner = small_runner()
    plan, blobs = warmup_plan(WarmupStep(30, 4, decodes, context=2), runner.parts.groups)
    assert plan.num_tokens == 30 and sum(row.flags & RowFlag.DECODE > 0 for row in plan.rows) == min(decodes, 3)
    runner.execute(plan, blobs)
    runner.complete(warmup_masks(plan, VOCAB))
    assert all(len(row.tokens) == 1 for row in runner.collect().rows)
    runner.close()


def test_a_warm_up_step_verifies_drafts() -> None:
    runner = small_runner("spec_decode=ngram", "spec_decode.min_match=1")
    plan, blobs = warmup_plan(WarmupStep(12, 4, 4, context=2, drafts=2), runner.parts.groups)
    assert plan.num_tokens == 12 and not plan.late
    runner.execute(plan, blobs)
    assert [row.drafted for row in runner.collect().rows] == [2] * 4
    runner.close()


def test_warm_up_steps_catch_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a decode row whose chunk has room in the token budget."""
    model = f"spec_decode.model.hf={SMALL_LLAMA}", "model@spec_decode.model=llama", "spec_decode.model.load=dummy"
    runner, fed = small_runner("spec_decode=draft_model", *model), []
    budget, catch_up = runner.parts.engine.token_budget, DraftModel.catch_up

    def watched(drafter: DraftModel, tokens: FedTokens, lengths_B: torch.Tensor) -> None:
        fed.append((len(tokens.ids_T), lengths_B.tolist()))
        catch_up(drafter, tokens, lengths_B)

    monkeypatch.setattr(DraftModel, "catch_up", watched)
    run_warmup_steps(runner.parts)
    assert fed and all(0 < count <= min(budget - 1, length) for count, (length,) in fed)
    runner.close()
