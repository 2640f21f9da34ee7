"""Contract suite for executors. Subclass ExecutorContract in a test module and override `make`.

Plans are hand-written, for a small Llama whose random weights every rank generates itself.
"""

from __future__ import annotations

import copy
import tempfile
import threading
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from dovetail.core.compose import Composition, compose
from dovetail.core.errors import DovetailError, RequestError
from dovetail.core.interfaces import Executor, ExecutorInfo, Join, Row, StepPlan, StepResult
from dovetail.core.interfaces.plan import SAMPLE
from dovetail.core.testing.executor_scripts import (
    MAX_LEN,
    PAGES_PER_SLOT,
    SLOTS,
    VOCAB,
    A,
    B,
    C,
    Script,
    alone,
    decode_row,
    quiet,
    save_adapter,
    small_composition,
    small_runner,
    whole_life,
    with_adapters,
    with_masked_drafts,
    with_masks,
)

TIMEOUT = 60.0
"""Seconds allowed for reading a small adapter."""
UNKNOWN = 7777
"""A uid that never joins."""


class ExecutorContract:
    """Tests of the rules of dovetail.core.interfaces.Executor. Only `make` must be overridden."""

    overrides: tuple[str, ...] = ()
    """Composition overrides, for instance ("engine.tp=2", "executor=mine")."""

    def make(self, composition: Composition) -> Executor:
        raise NotImplementedError("return your executor: MyExecutor(MyConfig(), composition)")

    def kill_a_rank(self, executor: Executor) -> None:
        """Kill one rank of a running executor. Override if ranks are separate processes."""
        pytest.skip("kill_a_rank is not overridden: one rank cannot die alone")

    # Drivers

    @contextmanager
    def running(self, *overrides: str) -> Iterator[Executor]:
        with _own_grad_mode():
            executor = self.make(small_composition(*self.overrides, *overrides))
            try:
                executor.start(quiet)
                yield executor
            finally:
                executor.shutdown()

    def at_once(self, executor: Executor, script: Script) -> list[StepResult]:
        """Submit every plan before collecting the first result."""
        for plan, blobs in script.steps:
            executor.submit(plan, blobs)
            if plan.late:
                executor.complete(script.late[plan.step])
        return [executor.collect() for _ in script.steps]

    def one_by_one(self, executor: Executor, script: Script) -> list[StepResult]:
        results = []
        for plan, blobs in script.steps:
            executor.submit(plan, blobs)
            results.append(executor.collect())
        return results

    def reference(self, script: Script) -> list[StepResult]:
        """Run the script on the core's Runner as a single rank."""
        with _own_grad_mode():
            runner = small_runner()
            for plan, blobs in script.steps:
                runner.execute(plan, blobs)
            results = [runner.collect() for _ in script.steps]
            runner.close()
        return results

    # Start

    def test_start_reports_what_the_engine_needs(self) -> None:
        reported: list[tuple[str, float | None]] = []
        composition = small_composition(*self.overrides)
        with _own_grad_mode():
            executor = self.make(composition)
            try:
                info = executor.start(lambda phase, share: reported.append((phase, share)))
            finally:
                executor.shutdown()
        assert isinstance(info, ExecutorInfo), f"start must return an ExecutorInfo, got {info!r}"
        assert (info.spec.vocab, info.spec.layers) == (VOCAB, 2), f"`spec` must be the model's, got {info.spec}"
        assert info.max_len == MAX_LEN, f"`max_len` must be engine.max_len = {MAX_LEN}, got {info.max_len}"
        assert info.lookahead == composition.build("spec_decode").lookahead, "`lookahead` must be the drafter's"
        ids = [group.id for group in info.groups]
        assert ids and len(set(ids)) == len(ids), f"`groups` must have distinct ids and not be empty, got {ids}"
        assert set(info.num_pages) == set(ids), f"`num_pages` must name the groups {ids}, got {set(info.num_pages)}"
        most = SLOTS * PAGES_PER_SLOT
        fits = all(0 < pages <= most for pages in info.num_pages.values())
        assert fits, f"each group must have 1 to engine.kv_pages = {most} pages, got {info.num_pages}"
        layers = sorted(layer for group in info.groups for layer in group.layers)
        assert layers == [0, 1], f"`groups` must contain each layer once, got {layers}"
        assert info.device, "`device` must name the device"
        timed = info.phases and all(seconds >= 0 for seconds in info.phases.values())
        assert timed, f"`phases` must give the seconds of each start phase, got {info.phases}"
        assert all(isinstance(note, str) for note in info.notes), f"`notes` must be strings, got {info.notes}"
        valid = reported and all(phase and (share is None or 0 <= share <= 1) for phase, share in reported)
        assert valid, f"start must report progress as (phase, share in 0 to 1 or None), got {reported}"

    def test_a_start_that_fails_names_the_cause(self) -> None:
        """After a failed start, shutdown must still work."""
        folder = "/nonexistent/of-the-executor-contract"
        with _own_grad_mode():
            executor = self.make(compose(["app=generate", "model=llama", f"model.path={folder}", *self.overrides]))
            try:
                with pytest.raises(DovetailError, match=folder):
                    executor.start(quiet)
            finally:
                executor.shutdown()
                executor.shutdown()

    # Steps

    def test_results_come_in_order_with_their_keys(self) -> None:
        script = whole_life()
        given = copy.deepcopy(script.steps)
        with self.running() as executor:
            assert executor.pending == 0, "nothing is submitted, so `pending` must be 0"
            for number, (plan, blobs) in enumerate(script.steps, start=1):
                executor.submit(plan, blobs)
                assert executor.pending == number, "`pending` must count the plans submitted but not collected"
            assert script.steps == given, "an executor must not change a plan or its blobs"
            for left, plan in reversed([*enumerate(reversed(script.plans))]):
                result = executor.collect()
                assert executor.pending == left, "`pending` must count the plans submitted but not collected"
                assert result.step == plan.step, "results must come in the order of the plans"
                keys = [(r.row, r.uid, r.epoch) for r in result.rows]
                expected = [(i, row.uid, row.epoch) for i, row in enumerate(plan.rows)]
                assert keys == expected, "a result must have (row, uid, epoch) of each row of its plan, in order"
                for found, row in zip(result.rows, plan.rows, strict=True):
                    count = int(bool(row.flags & SAMPLE))
                    assert len(found.tokens) == count, f"{row} must give {count} tokens, got {found.tokens}"
                assert result.device_seconds >= 0 and result.idle_seconds >= 0, "seconds must not be negative"
            executor.submit(StepPlan(script.plans[-1].step + 1, []), {})
            result = executor.collect()
            assert result.rows == (), f"a plan without rows must have a result without rows, got {result.rows}"

    def test_tokens_are_those_of_the_plans_in_order(self) -> None:
        """Tokens equal those of the core's runner, whether or not each result is collected before the next plan."""
        script = whole_life()
        expected = _tokens(self.reference(script))
        with self.running() as executor:
            assert _tokens(self.at_once(executor, script)) == expected, "all plans submitted, then all collected"
            found = _tokens(self.one_by_one(executor, whole_life(after=script)))
            assert found == expected, "each plan collected before the next is submitted"

    def test_a_sequence_does_not_see_the_others(self) -> None:
        by_sequence: dict[tuple[int, int], list[int]] = {}
        script = whole_life()
        with self.running() as executor:
            for result in self.at_once(executor, script):
                for row in result.rows:
                    by_sequence.setdefault((row.uid, row.epoch), []).extend(row.tokens)
            for (uid, epoch), tokens in by_sequence.items():
                own = {1: A, 2: B, 3: C}[uid]
                script = alone(own, uid, len(tokens) - 1, after=script)
                found = [t for result in self.at_once(executor, script) for row in result.rows for t in row.tokens]
                assert found == tokens, f"sequence {uid}, epoch {epoch}: {tokens} in a batch, but {found} alone"

    def test_collecting_what_was_not_submitted_is_a_clear_error(self) -> None:
        script = None
        with self.running() as executor:
            for _ in range(2):
                with pytest.raises((ValueError, RuntimeError), match="collect|pending|submit"):
                    executor.collect()
                assert executor.pending == 0, "a failed collect must not change `pending`"
                script = alone(B, 1, 1, after=script)
                steps = [result.step for result in self.at_once(executor, script)]
                assert steps == [plan.step for plan in script.plans], "after a failed collect, steps must run as before"

    # Adapters

    def test_adapters_come_and_go_in_order_with_plans(self) -> None:
        """Every rank loads them. An unloaded adapter still serves earlier plans; an invalid one affects no other."""
        script, overrides = with_adapters(), ("adapter=lora", "adapter.slots=1")
        with tempfile.TemporaryDirectory() as name, _own_grad_mode():
            folders = {key: Path(name) / key for key in ("x@1", "y@2", "wide@3")}
            for seed, (key, folder) in enumerate(folders.items()):
                save_adapter(folder, seed, rank=32 if key == "wide@3" else 4)
            runner = small_runner(*overrides)
            for key in ("x@1", "y@2"):
                runner.load_adapter(key, str(folders[key])).result(TIMEOUT)
            for plan, blobs in script.steps:
                runner.execute(plan, blobs)
            expected = _tokens([runner.collect() for _ in script.steps])
            runner.close()
            with self.running(*overrides) as executor:
                if type(executor).load_adapter is Executor.load_adapter:
                    pytest.skip("load_adapter is not overridden")
                executor.load_adapter("x@1", str(folders["x@1"])).result(TIMEOUT)
                with pytest.raises(RequestError, match="rank 32"):
                    executor.load_adapter("wide@3", str(folders["wide@3"])).result(TIMEOUT)
                for plan, blobs in script.steps[:2]:
                    executor.submit(plan, blobs)
                executor.unload_adapter("x@1")
                executor.unload_adapter("wide@3")
                executor.load_adapter("y@2", str(folders["y@2"])).result(TIMEOUT)
                for plan, blobs in script.steps[2:]:
                    executor.submit(plan, blobs)
                executor.unload_adapter("y@2")
                found = _tokens([executor.collect() for _ in script.steps])
                assert found == expected, "a plan must run with the adapter that was loaded when it was submitted"

    # Late inputs

    def test_rows_sample_what_their_masks_allow(self) -> None:
        """A row without its mask samples nothing, and its next step feeds the same token. Other rows are unaffected."""
        script = with_masks()
        with self.running() as executor:
            results = self.at_once(executor, script)
            first, other = ([result.rows[i].tokens for result in results] for i in range(2))
            allowed = first[0][0] in (7, 40, 96) and first[1] == (13,) and first[3][0] in (64, 65)
            assert allowed, f"a row sampled a token that its mask forbids: {first}"
            assert first[2] == (), f"a LATE row without a mask must sample nothing, got {first[2]}"
            known = A + first[0] + first[1] + first[3]
            for tokens, found in ((known, first[4:]), (B, other)):
                script = alone(tokens, 9, len(found) - 1, after=script)
                again = [result.rows[0].tokens for result in self.at_once(executor, script)]
                assert again == found, "tokens after a step without a mask, or in a batch with masked rows"

    def test_masks_behind_drafts(self) -> None:
        """`drafted` returns the drafts of a plan that waits for its masks. The row verifies as many as have a mask."""
        script = with_masked_drafts()
        with self.running("spec_decode=ngram", "spec_decode.lookahead=2") as executor:
            if type(executor).drafted is Executor.drafted:
                pytest.skip("drafted is not overridden")
            found = []
            for plan, blobs in script.steps:
                with pytest.raises(ValueError):
                    executor.drafted()
                executor.submit(plan, blobs)
                if plan.late:
                    given = {1: plan.drafts[0].tokens}
                    drafts = executor.drafted()
                    assert drafts == given, f"row 1 has drafts {given[1]}, and `drafted` returned {drafts}"
                    executor.complete(script.late[plan.step])
            found = [executor.collect().rows[-1] for _ in script.steps][1:]
        assert [row.tokens for row in found] == [(5, 6, 7), (8, 10)], "each position must have the mask of its own"
        assert [row.drafted for row in found] == [2, 1], "`drafted` of a result must count the drafts verified"

    def test_a_plan_with_late_rows_waits_for_them(self) -> None:
        """Earlier results can be collected while a plan waits for its late inputs."""
        script = with_masks()
        first, second, third = script.plans[:3]
        with self.running() as executor:
            executor.submit(*script.steps[0])
            with pytest.raises(ValueError, match=str(first.step)):
                executor.collect()
            with pytest.raises(ValueError, match=str(second.step)):
                executor.submit(*script.steps[1])
            with pytest.raises(ValueError, match=str(third.step)):
                executor.complete(script.late[third.step])
            executor.complete(script.late[first.step])
            with pytest.raises(ValueError, match=str(first.step)):
                executor.complete(script.late[first.step])
            executor.submit(*script.steps[1])
            assert executor.collect().step == first.step, "earlier results must be available while a plan waits"
            executor.complete(script.late[second.step])
            assert executor.collect().rows[0].tokens == (13,), "the mask allows only token 13"

    # Errors

    @pytest.mark.parametrize("wrong", ["a row without a sequence", "a join without its blob"])
    def test_an_error_in_a_plan_surfaces_and_names_the_cause(self, wrong: str) -> None:
        good = alone(B, 1, 1)
        bad = Script(after=good)
        if wrong == "a row without a sequence":
            bad.add([decode_row(3, UNKNOWN, 1, 1)])
        else:
            bad.add([Row(3, UNKNOWN, 1, 5, 5, 0, SAMPLE)], {Join(3, UNKNOWN, 1, 0): B})
            bad.steps[0][1].clear()
        with self.running() as executor:
            self.at_once(executor, good)
            with pytest.raises(Exception, match=str(UNKNOWN)):
                self.at_once(executor, bad)

    def test_a_rank_that_dies_is_an_error_of_the_next_calls(self) -> None:
        script = alone(B, 1, 1)
        with self.running() as executor:
            self.at_once(executor, script)
            self.kill_a_rank(executor)
            with pytest.raises(DovetailError, match="rank"):
                for _ in range(100):
                    script = alone(B, 1, 1, after=script)
                    self.at_once(executor, script)

    def test_an_interrupt_without_a_waiting_call_is_harmless(self) -> None:
        """interrupt may be called from another thread, before start and after shutdown."""
        executor = self.make(small_composition(*self.overrides))
        executor.interrupt()
        executor.shutdown()
        executor.interrupt()
        with self.running() as executor:
            self.at_once(executor, alone(B, 1, 1))
            thread = threading.Thread(target=executor.interrupt)
            thread.start()
            thread.join()
            executor.shutdown()
            assert executor.pending == 0, "`pending` must be 0 after shutdown"

    # Shutdown

    def test_shutdown_is_idempotent(self) -> None:
        """shutdown works before start, twice, and with plans in flight."""
        executor = self.make(small_composition(*self.overrides))
        executor.shutdown()
        with self.running() as executor:
            for plan, blobs in whole_life().steps[:3]:
                executor.submit(plan, blobs)
            executor.shutdown()
            assert executor.pending == 0, "shutdown must drop the plans in flight"
            executor.shutdown()
        with self.running() as executor:
            executor.submit(*with_masks().steps[0])
            executor.shutdown()
            assert executor.pending == 0, "shutdown must drop a plan that waits for late inputs"


def _tokens(results: Seq[StepResult]) -> list[list[tuple[int, ...]]]:
    return [[row.tokens for row in result.rows] for result in results]


def _own_grad_mode() -> torch.set_grad_enabled:
    """Restore the gradient mode at exit, since a rank in this process may disable gradients permanently."""
    return torch.set_grad_enabled(torch.is_grad_enabled())
