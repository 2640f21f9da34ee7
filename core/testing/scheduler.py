"""Contract suite for schedulers. Subclass SchedulerContract in a test module and override `make`.

Every test drives the real engine on a ToyDevice, which checks every plan, page and token.
"""

from __future__ import annotations

import copy
import itertools
import random
import sys
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest

from dovetail.core.compose import EngineConfig
from dovetail.core.engine.engine import Engine, start_engine
from dovetail.core.interfaces import (
    FinishReason,
    Grammar,
    KVAllocator,
    KVGroup,
    Request,
    RequestOptions,
    RowFlag,
    SamplingParams,
    Scheduler,
    SchedulerContext,
    SchedulerLimits,
    Sequence,
    Status,
)
from dovetail.core.testing.reference import allocator_without_reuse, default_allocator
from dovetail.core.testing.toy import ToyComposition, ToyDevice, expected_output

PAGE = 4
ADAPTERS = "abc"
"""Adapter names, one letter each."""


@dataclass
class Job:
    """One request of a test's load."""

    prompt: list[int]
    max_tokens: int
    arrival: int
    """Engine step at which it is added."""
    abort_at: int | None = None
    n: int = 1
    ignore_eos: bool = False
    request: dict[str, Any] | None = None
    grammar: Grammar | None = None


def random_load(
    seed: int, jobs: int = 14, *, aborts: bool = True, shared: bool = True, grammars: bool = False, adapters: str = ""
) -> list[Job]:
    """Requests that arrive over time. Some share a prefix, are aborted, ask for several samples, or have a grammar or
    an adapter."""
    rng = random.Random(seed)
    common = [rng.randrange(1, 50) for _ in range(rng.randrange(0, 14))] if shared else []
    load = []
    for _ in range(jobs):
        own = [rng.randrange(1, 50) for _ in range(rng.randrange(1, 20))]
        load.append(
            Job(
                prompt=(common if rng.random() < 0.5 else []) + own,
                max_tokens=rng.randrange(1, 16),
                arrival=rng.randrange(0, 30),
                abort_at=rng.randrange(0, 60) if aborts and rng.random() < 0.2 else None,
                n=rng.choice([1, 1, 1, 2, 3]),
                ignore_eos=rng.random() < 0.3,
                request={
                    "user": rng.choice("ab"),
                    "priority": rng.randrange(3),
                    "cache_salt": rng.choice(["", "", "x"]),
                    "adapter": rng.choice(["", *adapters]) if adapters else "",
                    "hints": {"output_tokens": 4.0} if seed % 2 else {},
                },
                grammar=_toy_grammar(rng) if grammars and rng.random() < 0.5 else None,
            )
        )
    return load


def _toy_grammar(rng: random.Random) -> Grammar:
    return Grammar(kind="regex", value=f"{rng.randrange(5)}:{rng.randrange(1, 13)}")


class SchedulerContract:
    """Tests that every scheduler must pass. `make` is the only method that must be overridden."""

    loads: ClassVar[int] = 4
    """Number of random loads that each output test runs."""
    oldest_first: ClassVar[bool] = False
    """Whether old requests end however many new ones arrive, also if they are preempted often. Set it if the policy
    promises that; a policy that prefers new or short requests does not."""

    def make(self, limits: SchedulerLimits, kv: KVAllocator) -> Scheduler:
        raise NotImplementedError("return your scheduler: MyScheduler(MyConfig(), limits, kv)")

    def make_kv(self, groups: Seq[KVGroup], num_pages: dict[int, int]) -> KVAllocator:
        """Return the allocator that the scheduler uses. Override to test the scheduler with another one."""
        return default_allocator(groups, num_pages)

    # Drivers.

    def engine(
        self,
        *,
        pages: int = 60,
        depth: int = 1,
        lookahead: int = 0,
        again: int = 0,
        max_seqs: int = 6,
        budget: int = 16,
        max_len: int = 64,
        delay: int = 0,
        mask_wait: float = 1.0,
        window_pages: int = 0,
        adapter_slots: int = 0,
        reuse: bool = True,
    ) -> Engine:
        """Start an engine on a ToyDevice. reuse=False replaces `make_kv` by an allocator that finds no prefix again."""
        groups = [KVGroup(0, (0,), page_tokens=PAGE), KVGroup(1, (1,), page_tokens=2 * PAGE)]
        num_pages = {0: pages, 1: pages // 2}
        if window_pages:
            groups.append(KVGroup(2, (2,), kind="window", window=7, page_tokens=PAGE))
            num_pages[2] = window_pages
        sizes = {"max_seqs": max_seqs, "max_len": max_len, "lookahead": lookahead, "again": again}
        device = ToyDevice(groups, num_pages, delay=delay, adapter_slots=adapter_slots, **sizes)
        config = EngineConfig(token_budget=budget, max_seqs=max_seqs, max_len=max_len, depth=depth, mask_wait=mask_wait)
        make_kv = self.make_kv if reuse else allocator_without_reuse
        engine = start_engine(ToyComposition(self.make, make_kv, device, config))  # type: ignore[arg-type]
        # A clock that counts: no decision depends on the speed of this machine.
        engine.clock = partial(next, itertools.count(0.0))
        for name in ADAPTERS if adapter_slots else "":
            engine.load_adapter(name, name)
        return engine

    def run(self, engine: Engine, load: Seq[Job], limit: int = 3000) -> dict[tuple[int, int], list[int]]:
        """Step until every job is done. Return outputs by (job, sample), without those of aborted jobs."""
        sequences: dict[int, tuple[int, Sequence]] = {}
        requests: list[tuple[Request, Request]] = []
        outputs: dict[tuple[int, int], list[int]] = {}
        open_ = set(range(len(load)))
        for step in range(limit):
            for i, job in enumerate(load):
                if job.arrival == step:
                    given = {"max_tokens": job.max_tokens, "n": job.n, "grammar": job.grammar}
                    params = SamplingParams(temperature=0, ignore_eos=job.ignore_eos, **given)
                    for seq in engine.add(job.prompt, params, RequestOptions(**(job.request or {}))):
                        sequences[seq.uid] = (i, seq)
                        outputs[i, seq.sample] = []
                    requests.append((seq.request, copy.deepcopy(seq.request)))
                if job.abort_at is not None and step == max(job.abort_at, job.arrival + 1):
                    for uid, (owner, seq) in sequences.items():
                        if owner == i:
                            engine.abort(uid)
                            outputs.pop((i, seq.sample), None)
            open_ = {i for i in open_ if load[i].arrival > step}
            if engine.has_work:
                events = engine.step()
                if not events:  # Else an engine that waits for no mask takes all steps before a thread computes one.
                    time.sleep(1e-4)
                for event in events:
                    owner, seq = sequences[event.uid]
                    rejected = event.reason is FinishReason.REJECTED
                    assert not rejected, f"a request that fits was rejected: {event.detail}"
                    outputs[owner, seq.sample] += event.tokens
                engine.kv.check()
            elif not open_:
                break
        else:
            stats = f"{engine.scheduler.stats()}, {engine.kv.stats()}"
            raise AssertionError(f"some requests did not finish within {limit} steps: {stats}")
        for request, before in requests:
            assert request == before, f"a scheduler must not change a request: {before} became {request}"
        return outputs

    def check_outputs(self, engine: Engine, load: Seq[Job], outputs: dict[tuple[int, int], list[int]]) -> None:
        for (i, sample), tokens in outputs.items():
            job = load[i]
            expected = expected_output(job.prompt, job.max_tokens, engine.limits.max_len, job.ignore_eos, job.grammar)
            assert tokens == expected, f"job {i}, sample {sample}: expected tokens {expected}, got {tokens}"
        kv, stats = engine.kv.stats(), engine.scheduler.stats()
        assert kv.owned == 0, f"every request has ended, but some pages are still owned: {kv}"
        assert stats.waiting == stats.running == 0, f"every request has ended, but the scheduler reports {stats}"

    # Tests.

    @pytest.mark.parametrize("depth", [1, 2, 4])
    @pytest.mark.parametrize("lookahead", [0, 3])
    @pytest.mark.parametrize("pages", [24, 200], ids=["tight", "roomy"])
    def test_every_request_gets_its_own_output(self, depth: int, lookahead: int, pages: int) -> None:
        """Arrivals, aborts, samples that share a prompt and preemption must not change a token."""
        for seed in range(self.loads):
            load = random_load(seed)
            again = int(lookahead > 0)
            engine = self.engine(pages=pages, depth=depth, lookahead=lookahead, again=again, delay=depth - 1)
            self.check_outputs(engine, load, self.run(engine, load))

    @pytest.mark.parametrize("depth", [1, 2])
    @pytest.mark.parametrize(("max_seqs", "pages"), [(1, 60), (2, 12), (2, 60)])
    def test_every_preemption_is_worth_it(self, depth: int, max_seqs: int, pages: int) -> None:
        """Samples of one prompt, and prompts of several steps, share few slots or few pages. Preempted sequences
        start over: if they displace each other before any of them yields a token, none ever ends."""
        # With 18 tokens, and with 27, a chunk ends where the prompt does: samples may enter, and the parent that was
        # preempted has yielded nothing yet.
        lengths = (18, 27, 22)
        load = [
            Job([1 + i, *range(2, 1 + lengths[i % 3])], 8, arrival=6 * i, n=2 + i % 2, ignore_eos=True)
            for i in range(6)
        ]
        engine = self.engine(
            max_seqs=max_seqs, pages=pages, max_len=48, budget=9, depth=depth, delay=depth - 1, reuse=False
        )
        self.check_outputs(engine, load, self.run(engine, load, limit=2000))

    @pytest.mark.parametrize("depth", [1, 2, 4])
    @pytest.mark.parametrize("patient", [True, False])
    def test_rows_with_a_grammar(self, depth: int, patient: bool) -> None:
        """Such rows sample late, their drafts included. An engine that does not wait runs without rows that lack a
        mask."""
        for seed in range(self.loads):
            load = random_load(seed, grammars=True)
            wait = 1.0 if patient else 0.0
            engine = self.engine(pages=24, depth=depth, lookahead=3, delay=depth - 1, mask_wait=wait)
            self.check_outputs(engine, load, self.run(engine, load))
            late = any(plan.late for plan in engine.executor.plans)
            assert late, "no plan sets `late`, although rows with a grammar need their mask after the forward"
            engine.shutdown()

    @pytest.mark.parametrize("lookahead", [0, 2])
    def test_a_window_group_that_holds_one_sequence(self, lookahead: int) -> None:
        """Prompts are longer than the group's pages: they run in chunks and may be preempted between chunks."""
        options: dict[str, Any] = {"budget": 9, "depth": 3, "lookahead": lookahead, "delay": 2}
        large = self.engine(**options, window_pages=60)
        least = large.kv.pages_needed(large.limits.max_len, large.limits.ahead)[2]
        large.shutdown()
        for seed in range(self.loads):
            load = random_load(seed, grammars=seed % 2 > 0)
            engine = self.engine(**options, window_pages=least + seed // 2 % 2, mask_wait=0.0)
            self.check_outputs(engine, load, self.run(engine, load))
            engine.shutdown()

    @pytest.mark.parametrize("depth", [1, 2, 4])
    def test_sequences_wait_for_their_adapters(self, depth: int) -> None:
        """With more adapters than slots, a sequence runs only with its own adapter, and the others keep running."""
        load = random_load(depth, adapters=ADAPTERS)
        slots = 2 if depth == 1 else 1
        engine = self.engine(pages=24, depth=depth, lookahead=2, delay=depth - 1, adapter_slots=slots)
        self.check_outputs(engine, load, self.run(engine, load))
        engine.shutdown()

    def test_an_adapter_in_use_does_not_keep_others_out(self) -> None:
        """A steady stream of requests for one adapter must not starve a request for another."""
        engine = self.engine(max_seqs=6, adapter_slots=1)
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        other = None
        for step in range(400):
            if step % 4 == 0:
                engine.add([1 + step % 40, 2, 3], params, RequestOptions(adapter="a"))
            if step == 10:
                (other,) = engine.add([7, 7], params, RequestOptions(adapter="b"))
            engine.step()
            if other is not None and other.status is Status.FINISHED:
                return
        stats = engine.scheduler.stats()
        raise AssertionError(f"a request for another adapter did not finish within {step + 1} steps: {stats}")

    def test_equal_calls_give_equal_plans(self) -> None:
        plans = []
        for _ in range(2):
            engine = self.engine(pages=30, depth=2, lookahead=2)
            self.run(engine, random_load(3))
            plans.append(engine.executor.plans)
        assert plans[0] == plans[1], "equal calls gave different plans: a plan must depend on the calls alone"

    def test_token_values_do_not_matter(self) -> None:
        """Requests of equal lengths give equal plans, whatever their tokens are."""
        prompts = [[1 + (7 * i + 11 * k) % 49 for k in range(4 + 5 * i % 11)] for i in range(14)]
        plans = []
        for flip in (False, True):
            tokens = [[50 - token if flip else token for token in prompt] for prompt in prompts]
            load = [Job(prompt, 3 + i % 4, i // 2, ignore_eos=True) for i, prompt in enumerate(tokens)]
            engine = self.engine(pages=30, max_seqs=3, reuse=False)
            self.run(engine, load)
            plans.append(engine.executor.plans)
        assert plans[0] == plans[1], "other tokens gave other plans: a scheduler must not read the tokens of a sequence"

    def test_ended_sequences_are_forgotten(self) -> None:
        """A server runs for months: what is kept must not grow with the number of requests."""
        engine, params = self.engine(), SamplingParams(temperature=0, max_tokens=1)
        sequences: list[Sequence] = []
        for i in range(200):
            sequences += engine.add([1 + i % 40, 2], params)
            while engine.has_work:
                engine.step()
        # The list, the loop's variable and the call each have a reference.
        kept = sum(sys.getrefcount(seq) > 3 for seq in sequences)
        assert kept <= 100, f"200 requests have ended, and {kept} of their sequences are still referenced"

    def test_preempted_requests_do_not_starve(self) -> None:
        """While more requests arrive than can run, and pages are few, the first ones still end."""
        if not self.oldest_first:
            pytest.skip("oldest_first is False: the policy may prefer new requests")
        engine = self.engine(max_seqs=4, pages=14, max_len=40, reuse=False)
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        first: list[Sequence] = []
        for step in range(1200):
            if step % 5 == 0:
                added = engine.add([1 + step % 40, 2, 3], params)
                first += added if len(first) < 12 else []
            engine.step()
            if len(first) == 12 and all(seq.status is Status.FINISHED for seq in first):
                return
        left = [(seq.uid, seq.preemptions) for seq in first if seq.status is not Status.FINISHED]
        raise AssertionError(f"of 12 requests these (uid, preemptions) did not end within {step + 1} steps: {left}")

    @pytest.mark.parametrize("lookahead", [0, 3])
    def test_limits_hold(self, lookahead: int) -> None:
        engine = self.engine(budget=9, max_seqs=4, lookahead=lookahead, depth=2)
        self.run(engine, random_load(5, jobs=20))
        for plan in engine.executor.plans:
            assert 0 < plan.num_tokens <= 9, f"a plan must have 1 to token_budget = 9 tokens: {plan}"
            assert len(plan.rows) <= 4, f"a plan must have at most max_seqs = 4 rows: {plan}"
            assert len({row.slot for row in plan.rows}) == len(plan.rows), f"two rows share a slot: {plan}"
            assert all(row.count >= 1 for row in plan.rows), f"every row must feed a token: {plan}"
            assert all(row.draft <= lookahead for row in plan.rows), f"a row has over {lookahead} drafts: {plan}"
            order = [(not row.flags & RowFlag.DECODE, row.slot) for row in plan.rows]
            assert order == sorted(order), f"rows must be ordered by slot, decode rows first: {plan}"

    def test_a_prompt_longer_than_the_budget_is_fed_in_chunks(self) -> None:
        engine = self.engine(budget=5)
        load = [Job(list(range(1, 31)), 4, 0)]
        self.check_outputs(engine, load, self.run(engine, load))
        chunks = sum(len(plan.rows) for plan in engine.executor.plans if plan.rows[0].flags == 0)
        assert chunks >= 5, f"30 prompt tokens with a budget of 5 need 5 rows that do not sample, got {chunks}"

    def test_finish_and_abort_at_any_time(self) -> None:
        """Every request is finished or aborted after a random number of steps, with plans in flight."""
        for seed in range(8):
            rng = random.Random(seed)
            engine = self.engine(pages=40, depth=4, lookahead=2, delay=3)
            alive: list[Sequence] = []
            for job in random_load(seed, aborts=False):
                alive += engine.add(job.prompt, SamplingParams(temperature=0, max_tokens=12, n=job.n))
            while engine.has_work:
                engine.step()
                engine.kv.check()
                if alive and rng.random() < 0.3:
                    seq = alive.pop(rng.randrange(len(alive)))
                    if rng.random() < 0.5:
                        engine.abort(seq.uid)
                    else:
                        engine.finish(seq.uid, min(seq.known_len, seq.prompt_len + 1), FinishReason.STOP)
                        engine.finish(seq.uid, 0, FinishReason.STOP)
                    assert seq.status is Status.FINISHED, f"finish() must set Status.FINISHED, not {seq.status}"
            assert engine.kv.stats().owned == 0, f"every request has ended, but pages are owned: {engine.kv.stats()}"

    def test_what_can_never_run_is_rejected(self) -> None:
        engine = self.engine(pages=8, max_len=64)
        (seq,) = engine.add([1] * 40, SamplingParams(max_tokens=20, temperature=0))
        (event,) = engine.step()
        assert (event.uid, event.reason) == (seq.uid, FinishReason.REJECTED), "a request that can never fit"
        assert "pages" in event.detail, f"the detail of a rejection must name the missing pages: {event.detail!r}"
        assert not engine.has_work, "a rejected request must not remain queued"

    def test_nothing_to_do_is_no_plan(self) -> None:
        engine = self.engine()
        plan = engine.scheduler.schedule(SchedulerContext(0, 0.0, 0, 1, engine.kv))
        assert plan is None, f"schedule() without requests must return None, not {plan}"

    def test_no_request_starves(self) -> None:
        """Under a steady stream of requests each one finishes within a bounded number of steps."""
        engine = self.engine(max_seqs=3)
        load = [Job([1 + i % 40, 2, 3], 6, arrival=2 * i, ignore_eos=True) for i in range(40)]
        self.check_outputs(engine, load, self.run(engine, load, limit=1500))
