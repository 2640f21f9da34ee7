"""The contract suite of executors. Subclass ExecutorContract in a test module and override `make`.

Plans are written by hand, over a small Llama with random weights that every rank makes for itself.
"""

from __future__ import annotations

import copy
import json
import tempfile
import threading
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dovetail.core.arithmetic import ceil_div
from dovetail.core.compose import Composition, compose
from dovetail.core.errors import DovetailError, RequestError
from dovetail.core.interfaces import (
    Executor,
    ExecutorInfo,
    Join,
    JoinBlob,
    LateInputs,
    PageDelta,
    Request,
    Row,
    RowFlag,
    SamplingParams,
    StepPlan,
    StepResult,
)
from dovetail.core.worker.loader import load_rank
from dovetail.core.worker.runner import Runner

SLOTS, MAX_LEN, PAGE, VOCAB = 4, 64, 16, 97
PAGES_PER_SLOT = MAX_LEN // PAGE
SMALL_LLAMA = (
    "{architectures: [LlamaForCausalLM], hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
    f"num_attention_heads: 4, num_key_value_heads: 2, vocab_size: {VOCAB}, max_position_embeddings: 128, "
    "rms_norm_eps: 1.0e-5, rope_theta: 10000.0, eos_token_id: 2, torch_dtype: float32}"
)
SAMPLE, DECODE, LATE = RowFlag.SAMPLE, RowFlag.DECODE | RowFlag.SAMPLE, RowFlag.LATE
TIMEOUT = 60.0
"""Seconds that reading a small adapter may take."""
NOBODY = 7777
"""A uid that never joins."""


def small_composition(*overrides: str) -> Composition:
    """Everything at its default, on the CPU, with the small model."""
    return compose(
        [
            "app=generate",
            "model=llama",
            "model.load=dummy",
            f"model.hf={SMALL_LLAMA}",
            "engine.device=cpu",
            "engine.dtype=float32",
            f"engine.max_seqs={SLOTS}",
            f"engine.max_len={MAX_LEN}",
            f"engine.page_size={PAGE}",
            f"engine.kv_pages={SLOTS * PAGES_PER_SLOT}",
            "engine.token_budget=64",
            *overrides,
        ]
    )


def quiet(phase: str, share: float | None) -> None:
    """No progress bar."""


def small_runner(*overrides: str) -> Runner:
    """One rank with the small model, ready to run plans."""
    rank = load_rank(small_composition(*overrides), quiet)
    return rank.bind(rank.info.num_pages)


@dataclass
class Script:
    """Plans of a few sequences, in slots whose pages stand where their number says. Goes on where `after` ended."""

    after: Script | None = None
    steps: list[tuple[StepPlan, dict[tuple[int, int], JoinBlob]]] = field(default_factory=list)
    held: set[int] = field(default_factory=set)
    """Slots, after the last step."""
    late: dict[int, LateInputs] = field(default_factory=dict)
    """By step."""

    def add(
        self,
        rows: Seq[Row],
        joins: Mapping[Join, Seq[int]] | None = None,
        leaves: Seq[int] = (),
        masks: Mapping[int, Seq[int]] | None = None,
        adapter: str = "",
    ) -> None:
        """joins: each with its known tokens, and the first with the adapter, in its only slot. masks: by row, the
        tokens that it may sample."""
        before = self if self.steps else self.after
        step = before.plans[-1].step + 1 if before else 0
        if before is self.after and before:
            leaves = sorted(before.held)
        plan = StepPlan(step, list(rows), leaves=list(leaves))
        self.held = self.held - set(leaves) | {join.slot for join in joins or ()}
        blobs: dict[tuple[int, int], JoinBlob] = {}
        for join, tokens in (joins or {}).items():
            plan.joins.append(join)
            plan.pages += [
                PageDelta(0, join.slot, index, join.slot * PAGES_PER_SLOT + index + 1)
                for index in range(PAGES_PER_SLOT)
            ]
            key = "" if blobs else adapter
            request = Request(join.uid, tuple(tokens), SamplingParams(temperature=0.0), eos_ids=(2,), adapter=key)
            blobs[join.uid, join.epoch] = JoinBlob(request.prompt_ids, request, 0, 0 if key else -1)
        self.steps.append((plan, blobs))
        if masks is not None:
            bits = np.zeros((len(masks), ceil_div(VOCAB, 32)), np.uint32)
            for m, tokens in enumerate(masks.values()):
                for token in tokens:
                    bits[m, token // 32] |= np.uint32(1 << token % 32)
            self.late[step] = LateInputs(step, tuple(masks), bits)

    @property
    def plans(self) -> list[StepPlan]:
        return [plan for plan, _ in self.steps]


def prompt(length: int, first: int) -> tuple[int, ...]:
    return tuple((first + 7 * i * i) % VOCAB for i in range(length))


A, B, C = prompt(23, 3), prompt(5, 50), prompt(18, 11)


def whole_life(after: Script | None = None) -> Script:
    """Chunks, decodes, a slot that changes hands, a sequence that comes back in another slot."""
    script = Script(after)
    script.add([Row(0, 1, 1, 16, 16, 0, 0), Row(2, 2, 1, 5, 5, 0, SAMPLE)], {Join(0, 1, 1, 0): A, Join(2, 2, 1, 0): B})
    script.add([Row(2, 2, 1, 1, 6, 0, DECODE), Row(0, 1, 1, 7, 23, 0, SAMPLE)])
    script.add([Row(0, 1, 1, 1, 24, 0, DECODE), Row(2, 2, 1, 1, 7, 0, DECODE)])
    script.add([Row(0, 1, 1, 1, 25, 0, DECODE), Row(2, 3, 1, 18, 18, 0, SAMPLE)], {Join(2, 3, 1, 0): C}, leaves=[2])
    script.add([Row(0, 1, 1, 1, 26, 0, DECODE), Row(2, 3, 1, 1, 19, 0, DECODE)])
    script.add([Row(2, 3, 1, 1, 20, 0, DECODE), Row(1, 1, 2, 23, 23, 0, SAMPLE)], {Join(1, 1, 2, 0): A}, leaves=[0])
    script.add([Row(1, 1, 2, 1, 24, 0, DECODE), Row(2, 3, 1, 1, 21, 0, DECODE)])
    return script


def alone(tokens: Seq[int], uid: int, decodes: int, after: Script | None = None) -> Script:
    """One sequence, its prompt at once."""
    script, count = Script(after), len(tokens)
    script.add([Row(0, uid, 1, count, count, 0, SAMPLE)], {Join(0, uid, 1, 0): tokens})
    for i in range(1, decodes + 1):
        script.add([Row(0, uid, 1, 1, count + i, 0, DECODE)])
    return script


def with_masks(after: Script | None = None) -> Script:
    """Sequence 1 may sample a few tokens only, once sits a step out, and is free at last; sequence 2 is free always."""
    script = Script(after)
    rows = [Row(0, 1, 1, 23, 23, 0, SAMPLE | LATE), Row(2, 2, 1, 5, 5, 0, SAMPLE)]
    script.add(rows, {Join(0, 1, 1, 0): A, Join(2, 2, 1, 0): B}, masks={0: (7, 40, 96)})
    for bound, masks in ((24, {0: (13,)}), (25, {}), (25, {0: (64, 65)}), (26, None)):
        flags = DECODE if masks is None else DECODE | LATE
        mine, other = Row(0, 1, 1, 1, bound, 0, flags), Row(2, 2, 1, 1, 5 + len(script.steps), 0, DECODE)
        script.add([mine, other], masks=masks)
    return script


def with_adapters() -> Script:
    """Two sequences of one prompt with an adapter each, one after the other; a third runs beside them without."""
    script = Script()
    rows = [Row(0, 1, 1, 23, 23, 0, SAMPLE), Row(2, 2, 1, 5, 5, 0, SAMPLE)]
    script.add(rows, {Join(0, 1, 1, 0): A, Join(2, 2, 1, 0): B}, adapter="x@1")
    script.add([Row(0, 1, 1, 1, 24, 0, DECODE), Row(2, 2, 1, 1, 6, 0, DECODE)])
    rows = [Row(2, 2, 1, 1, 7, 0, DECODE), Row(0, 3, 1, 23, 23, 0, SAMPLE)]
    script.add(rows, {Join(0, 3, 1, 0): A}, leaves=[0], adapter="y@2")
    script.add([Row(0, 3, 1, 1, 24, 0, DECODE), Row(2, 2, 1, 1, 8, 0, DECODE)])
    return script


def save_adapter(folder: Path, seed: int, rank: int = 4) -> None:
    """A LoRA of the small model's down projections."""
    random = torch.Generator().manual_seed(seed)
    tensors = {
        f"base_model.model.model.layers.{layer}.mlp.down_proj.lora_{factor}.weight": torch.randn(
            shape, generator=random
        )
        for layer in range(2)
        for factor, shape in (("A", (rank, 64)), ("B", (32, rank)))
    }
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8 * rank, "target_modules": ["down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))


class ExecutorContract:
    """Every sentence of dovetail.core.interfaces.Executor. `make` is the only thing that must be overridden."""

    overrides: tuple[str, ...] = ()
    """For the composition, such as ("engine.tp=2", "executor=mine")."""

    def make(self, composition: Composition) -> Executor:
        raise NotImplementedError("return your executor: MyExecutor(MyConfig(), composition)")

    def kill_a_rank(self, executor: Executor) -> None:
        """End one rank of a running executor by force; override where ranks can die alone."""
        pytest.skip("its ranks cannot die alone")

    # Drivers.

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
        """Every plan in flight before the first result is asked for."""
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
        """What the core's own runner makes of it, as one rank."""
        with _own_grad_mode():
            runner = small_runner()
            for plan, blobs in script.steps:
                runner.execute(plan, blobs)
            results = [runner.collect() for _ in script.steps]
            runner.close()
        return results

    # Start.

    def test_start_reports_what_the_engine_needs(self) -> None:
        said: list[tuple[str, float | None]] = []
        composition = small_composition(*self.overrides)
        with _own_grad_mode():
            executor = self.make(composition)
            try:
                info = executor.start(lambda phase, share: said.append((phase, share)))
            finally:
                executor.shutdown()
        assert isinstance(info, ExecutorInfo)
        assert (info.spec.vocab, info.spec.layers) == (VOCAB, 2)
        assert info.max_len == MAX_LEN
        assert info.lookahead == composition.build("spec_decode").lookahead
        ids = [group.id for group in info.groups]
        assert ids and len(set(ids)) == len(ids), f"KV groups {ids}"
        assert set(info.num_pages) == set(ids), f"pages of {set(info.num_pages)}, groups {ids}"
        assert all(0 < pages <= SLOTS * PAGES_PER_SLOT for pages in info.num_pages.values()), info.num_pages
        assert sorted(layer for group in info.groups for layer in group.layers) == [0, 1], info.groups
        assert info.device
        assert info.phases and all(seconds >= 0 for seconds in info.phases.values()), info.phases
        assert all(isinstance(note, str) for note in info.notes)
        assert said and all(phase and (share is None or 0 <= share <= 1) for phase, share in said), said

    def test_a_start_that_fails_names_the_cause(self) -> None:
        """And leaves nothing that shutdown could not clear."""
        folder = "/nonexistent/of-the-executor-contract"
        with _own_grad_mode():
            executor = self.make(compose(["app=generate", "model=llama", f"model.path={folder}", *self.overrides]))
            try:
                with pytest.raises(DovetailError, match=folder):
                    executor.start(quiet)
            finally:
                executor.shutdown()
                executor.shutdown()

    # Steps.

    def test_results_come_in_order_with_their_keys(self) -> None:
        script = whole_life()
        given = copy.deepcopy(script.steps)
        with self.running() as executor:
            assert executor.pending == 0
            for number, (plan, blobs) in enumerate(script.steps, start=1):
                executor.submit(plan, blobs)
                assert executor.pending == number, "pending is what was submitted and not collected"
            assert script.steps == given, "the executor changed a plan or its blobs"
            for left, plan in reversed([*enumerate(reversed(script.plans))]):
                result = executor.collect()
                assert executor.pending == left
                assert result.step == plan.step, "results come in plan order"
                assert [(r.row, r.uid, r.epoch) for r in result.rows] == [
                    (i, row.uid, row.epoch) for i, row in enumerate(plan.rows)
                ]
                for found, row in zip(result.rows, plan.rows, strict=True):
                    assert len(found.tokens) == bool(row.flags & SAMPLE), f"{row} brought {found.tokens}"
                assert result.device_seconds >= 0 and result.idle_seconds >= 0

    def test_tokens_are_those_of_the_plans_in_order(self) -> None:
        """Whether a result is waited for before the next plan or not, and as the core's runner has them."""
        script = whole_life()
        expected = _tokens(self.reference(script))
        with self.running() as executor:
            assert _tokens(self.at_once(executor, script)) == expected
            assert _tokens(self.one_by_one(executor, whole_life(after=script))) == expected

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
                assert found == tokens, f"sequence {uid}, epoch {epoch}: {tokens} among others, {found} alone"

    def test_collecting_what_was_not_submitted_is_a_clear_error(self) -> None:
        script = None
        with self.running() as executor:
            for _ in range(2):
                with pytest.raises((ValueError, RuntimeError), match="collect|pending|submit"):
                    executor.collect()
                assert executor.pending == 0
                script = alone(B, 1, 1, after=script)
                results = self.at_once(executor, script)
                assert [result.step for result in results] == [plan.step for plan in script.plans], (
                    "it goes on as before"
                )

    # Adapters.

    def test_adapters_come_and_go_in_order_with_plans(self) -> None:
        """Every rank reads them; one that is unloaded serves the plans submitted before; a wrong one harms nobody."""
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
                    pytest.skip("it loads no adapters")
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
                assert _tokens([executor.collect() for _ in script.steps]) == expected

    # Late inputs.

    def test_rows_sample_what_their_masks_allow(self) -> None:
        """A row whose mask is missing samples nothing, and its next step feeds the same token. Others do not notice."""
        script = with_masks()
        with self.running() as executor:
            results = self.at_once(executor, script)
            first, other = ([result.rows[i].tokens for result in results] for i in range(2))
            assert first[0][0] in (7, 40, 96) and first[1] == (13,) and first[3][0] in (64, 65), first
            assert first[2] == (), f"it had no mask and sampled {first[2]}"
            known = A + first[0] + first[1] + first[3]
            for tokens, found in ((known, first[4:]), (B, other)):
                script = alone(tokens, 9, len(found) - 1, after=script)
                assert [result.rows[0].tokens for result in self.at_once(executor, script)] == found

    def test_a_plan_with_late_rows_waits_for_them(self) -> None:
        """And earlier results can be had meanwhile."""
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
            assert executor.collect().step == first.step
            executor.complete(script.late[second.step])
            assert executor.collect().rows[0].tokens == (13,)

    # Errors.

    @pytest.mark.parametrize("wrong", ["a row of nobody", "a join without its blob"])
    def test_an_error_in_a_plan_surfaces_and_names_the_cause(self, wrong: str) -> None:
        good = alone(B, 1, 1)
        bad = Script(after=good)
        if wrong == "a row of nobody":
            bad.add([Row(3, NOBODY, 1, 1, 1, 0, DECODE)])
        else:
            bad.add([Row(3, NOBODY, 1, 5, 5, 0, SAMPLE)], {Join(3, NOBODY, 1, 0): B})
            bad.steps[0][1].clear()
        with self.running() as executor:
            self.at_once(executor, good)
            with pytest.raises(Exception, match=str(NOBODY)):
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

    def test_an_interrupt_hurts_nobody_who_does_not_wait(self) -> None:
        """From another thread, before start and after shutdown too."""
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
            assert executor.pending == 0

    # Shutdown.

    def test_shutdown_is_idempotent(self) -> None:
        """Also with plans on the way, and before start."""
        executor = self.make(small_composition(*self.overrides))
        executor.shutdown()
        with self.running() as executor:
            for plan, blobs in whole_life().steps[:3]:
                executor.submit(plan, blobs)
            executor.shutdown()
            assert executor.pending == 0, "what was on the way is gone"
            executor.shutdown()
        with self.running() as executor:
            executor.submit(*with_masks().steps[0])
            executor.shutdown()
            assert executor.pending == 0, "what waited for late inputs is gone"


def _tokens(results: Seq[StepResult]) -> list[list[tuple[int, ...]]]:
    return [[row.tokens for row in result.rows] for result in results]


@contextmanager
def _own_grad_mode() -> Iterator[None]:
    """A rank in this process may turn gradients off for good."""
    before = torch.is_grad_enabled()
    try:
        yield
    finally:
        torch.set_grad_enabled(before)
