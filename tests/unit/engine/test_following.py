"""Drafters that must follow a row's text: rows that they have left behind have no drafts and are no evidence."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import pytest

from dovetail.core.engine.drafting import Drafting
from dovetail.core.interfaces import (
    Join,
    Row,
    RowFlag,
    RowResult,
    RowWork,
    SchedulerLimits,
    Sequence,
    StepPlan,
    StepResult,
)

from .test_drafting import DECODE, K, ToyCost, sequence

SAMPLE = int(RowFlag.SAMPLE)
PROMPT, OUTPUT, WINDOW = 700, 150, K + 1


class Device:
    """Runs rows that are replaced when their output is complete, and follows their text as drafters do."""

    def __init__(
        self,
        rows: int,
        *,
        resumes: bool,
        passes: float = 1.0,
        chunks: bool = False,
        budget: int = 1 << 16,
        limited: bool = False,
        slowdown: float = 1.0,
    ) -> None:
        """`limited`: whether the drafter knows where rows end. `slowdown`: measured times of steps with drafts over
        predicted ones."""
        self.budget, self.limited, self.slowdown = budget, limited, slowdown
        limits = SchedulerLimits(
            budget, rows, 9999, K, draft_window=WINDOW, draft_resumes=resumes, draft_catches_up=chunks
        )
        self.drafting = Drafting(limits)
        self.resumes, self.cost, self.random = resumes, ToyCost(64, passes=passes), random.Random(1)
        self.rows, self.known, self.uid, self.prompts, self.followed = [], [], 0, 0, 0
        self.entering: list[int] = []
        """Slots whose sequences feed their prompts in the next step."""
        for slot in range(rows):
            self.rows.append(sequence(slot))
            self.known.append(0)
            self._enter(slot, OUTPUT - slot * OUTPUT // rows)
        self.seconds, self.fed = 0.0, 0
        """Time of all steps; tokens of chunks with which it caught up."""
        self.useless = 0
        """Drafts planned for rows that the drafter could not draft for."""

    def _enter(self, slot: int, output: int = OUTPUT) -> None:
        self.uid += 1
        seq = self.rows[slot]
        seq.end = PROMPT + output
        if self.limited:
            seq.limit = seq.end + 1
        seq.uid, seq.computed, seq.prompt_len = self.uid, PROMPT, PROMPT
        self.entering.append(slot)

    def run(self, steps: int, share: float) -> list[int]:
        """Return the drafts that each step with decode rows verified. `share`: probability that one is accepted."""
        found = []
        for step in range(steps):
            entering, self.entering = self.entering, []
            decoding: list[Sequence] = [seq for seq in self.rows if seq.slot not in entering]
            wanted = self.drafting.choose(decoding, (), 1 << 16, self.cost) if decoding else {}  # type: ignore[arg-type]
            plan, results = StepPlan(step, []), []
            for seq in decoding:
                slot = seq.slot
                own = wanted.get(seq.uid, 0)
                able = seq.computed - self.known[slot] < WINDOW
                self.useless += own * (not able)
                accepted = 0
                while able and accepted < own and self.random.random() < share:
                    accepted += 1
                if wanted and able:
                    self.known[slot] = seq.computed + 1
                elif wanted and self.resumes:
                    self.known[slot] = min(self.known[slot] + WINDOW, seq.computed + 1)
                elif wanted:
                    self.known[slot] = -(1 << 30)
                plan.rows.append(Row(slot, seq.uid, 0, 1 + own, seq.computed + 1 + own, own, DECODE))
                results.append(RowResult(slot, seq.uid, 0, (7,) * (accepted + 1), drafted=own * able))
                seq.computed += accepted + 1
            for slot in entering:
                plan.joins.append(Join(slot, self.rows[slot].uid, 0, 0))
                plan.rows.append(Row(slot, self.rows[slot].uid, 0, PROMPT, PROMPT, 0, SAMPLE))
                results.append(RowResult(slot, self.rows[slot].uid, 0, (7,)))
            total = sum(wanted.values())
            seconds = self.cost.step_seconds([]) + 5e-3 * max(1.0, (len(self.rows) + total) / 64)
            seconds += 1e-3 * self.cost.passes * bool(total)
            seconds *= self.slowdown if total else 1.0
            if decoding:
                found.append(sum(out.drafted for out in results))
            self._launch(plan)
            seconds += 5e-6 * sum(chunk.count for chunk in plan.catch_up)
            self.seconds += seconds
            for slot in entering:
                # A row that was not followed lacks its whole prompt.
                self.known[slot] = PROMPT if plan.follows else 0
                self.followed += plan.follows
                self.prompts += 1
            self.drafting.update(plan, StepResult(step, tuple(results), seconds))
            for seq in self.rows:
                if seq.computed >= seq.end:
                    self._enter(seq.slot)
        return found

    def _launch(self, plan: StepPlan) -> None:
        for seq in self.rows:
            seq.known_len = seq.max_len = seq.computed + 1
        before = {row.uid: row.bound - row.count + 1 for row in plan.rows}
        for seq in self.rows:
            seq.known_len = before.get(seq.uid, seq.known_len)
        self.drafting.launched(plan, {seq.uid: seq for seq in self.rows})
        assert not plan.catch_up or plan.num_tokens + sum(chunk.count for chunk in plan.catch_up) <= self.budget
        for slot, first, count in plan.catch_up:
            assert self.known[slot] >= first, "a gap"
            self.known[slot] = max(self.known[slot], first + count)
            self.fed += count


def share_of_rows(drafts: list[int], rows: int) -> float:
    return sum(drafts) / (len(drafts) * rows * K)


@pytest.mark.parametrize(("passes", "most"), [(0.11, 300), (1.0, 60)])
@pytest.mark.parametrize("resumes", [True, False])
@pytest.mark.parametrize("rows", [1, 8])
def test_drafting_begins_again_with_new_rows(rows: int, resumes: bool, passes: float, most: int) -> None:
    """Drafts were useless for long, so all rows are left behind, also if they cost but 2 % of a step, which allows
    trials of more steps. Then they are good."""
    device = Device(rows, resumes=resumes, passes=passes)
    device.run(600, 0.0)
    assert sum(map(bool, device.run(400, 0.0))) < most
    device.run(2500, 0.9)
    device.useless = 0
    assert share_of_rows(device.run(300, 0.9), rows) > 0.8
    assert device.useless == 0


@pytest.mark.parametrize("rows", [1, 8])
def test_no_row_of_a_drafter_that_cannot_catch_up_is_left_behind_where_drafts_pay(rows: int) -> None:
    """Trials of steps without drafts would leave rows behind for good."""
    device = Device(rows, resumes=False)
    device.run(100, 0.95)
    drafts = device.run(600, 0.95)
    assert min(drafts) > 0 and share_of_rows(drafts, rows) > 0.9


@pytest.mark.parametrize("passes", [0.02, 0.11, 1.0])
def test_the_last_steps_of_the_only_row_do_not_decide_about_the_next_prompt(passes: float) -> None:
    """They have no room for drafts, which save nothing there, however little they take."""
    device = Device(1, resumes=False, passes=passes, limited=True)
    device.run(20, 0.9)
    device.prompts = device.followed = 0
    drafts = device.run(600, 0.9)
    assert device.followed == device.prompts > 10
    assert share_of_rows(drafts, 1) > 0.9


@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("rows", [1, 8, 40])
def test_no_drafts_are_tried_although_rows_accept_as_many_as_the_drafter_can_catch_up_with(
    rows: int, share: float
) -> None:
    """Drafts take five times as long as predicted, which only the times of steps without them show. Such a step would
    leave behind rows that have just accepted all drafts, so the one before it has fewer."""
    device = Device(rows, resumes=False, passes=1.0, slowdown=5.0)
    assert sum(map(bool, device.run(60, share))) > 10
    device.run(600, share)
    assert sum(map(bool, device.run(400, share))) < 40


def test_no_drafts_are_tried_although_rows_were_left_behind_before() -> None:
    """Half of the rows have no drafts any more, so a step without drafts loses nothing of them."""
    device = Device(8, resumes=False, passes=1.0, slowdown=5.0)
    for seq in device.rows:
        seq.end = seq.limit = 1 << 20
    device.run(2, 0.5)
    for slot in range(4):
        device.known[slot] = device.drafting._following._known_S[slot] = -(1 << 40)
    device.run(600, 0.5)
    assert sum(map(bool, device.run(400, 0.5))) < 40


@pytest.mark.parametrize("rows", [1, 8])
def test_it_is_tried_before_it_has_left_the_first_rows_behind(rows: int) -> None:
    """Drafting takes longer than a step, so it does not pay at the acceptance that is assumed at first."""
    device = Device(rows, resumes=False, passes=6.0)
    device.run(30, 0.95)  # with the first trial of steps without drafts
    assert share_of_rows(device.run(40, 0.95), rows) > 0.9


@pytest.mark.parametrize("resumes", [True, False])
def test_prompts_are_not_followed_while_drafts_do_not_pay(resumes: bool) -> None:
    """But for those of trials. It takes as long to follow one as a third of a step."""
    device = Device(8, resumes=resumes, passes=1.5)
    device.run(600, 0.0)
    device.prompts = device.followed = 0
    device.run(1200, 0.0)
    assert 0 < device.followed < 0.2 * device.prompts
    device.run(2500, 0.95)
    device.prompts = device.followed = 0
    device.run(600, 0.95)
    assert device.followed == device.prompts > 0


class ByLength(ToyCost):
    """Rows of 1000 tokens and more read so much that drafts are free; those of shorter ones take as long as tokens."""

    def step_seconds(self, rows: Iterable[RowWork]) -> float:
        rows = list(rows)
        return sum(row.times * (1.0 if row.bound > 1000 else row.tokens) for row in rows) * 1e-3

    def follow_seconds(self, rows: Iterable[RowWork]) -> float:
        return 1e-2


def follows(drafting: Drafting, output: int, prompt: int = 700) -> bool:
    """Whether the next prompt of so many tokens is followed, if it has so many outputs."""
    seq = sequence(0)
    seq.prompt_len, seq.limit = prompt, prompt + output
    plan = StepPlan(0, [Row(0, 0, 0, prompt, prompt, 0, SAMPLE)])
    drafting.launched(plan, {0: seq})
    return plan.follows


def drafting_that_saves(seconds: float, length: int) -> Drafting:
    """With one row, drafts saved so many seconds of each token when it had this length."""
    drafting = Drafting(SchedulerLimits(1 << 16, 4, 9999, K, draft_window=WINDOW, draft_resumes=True))
    drafting._cost = ByLength()  # type: ignore[assignment]
    bucket = drafting._buckets[1]
    bucket.level, bucket.saved, bucket.length, bucket.left = 1, seconds, length, 1e9
    return drafting


def test_prompts_are_followed_further_while_drafts_save_what_that_takes() -> None:
    """10 ms here. They are first followed if drafts save one and a half times that."""
    drafting = drafting_that_saves(1e-4, length=701)
    wanted = [(120, False), (140, False), (160, True), (120, True), (110, True), (90, False), (120, False), (160, True)]
    assert [follows(drafting, output) for output, _ in wanted] == [one for _, one in wanted]


def test_what_drafts_saved_in_long_rows_is_not_expected_of_short_ones() -> None:
    drafting = drafting_that_saves(2e-4, length=3000)
    # Its rows have 1300 and 750 tokens in the middle of their outputs.
    assert follows(drafting, 1200) and not follows(drafting, 100)
    assert follows(drafting_that_saves(2e-4, length=701), 100)


@pytest.mark.parametrize(("slowdown", "wanted"), [(1.0, True), (9.0, False)])
def test_prompts_are_weighed_by_measured_times(slowdown: float, wanted: bool) -> None:
    """No number of drafts was chosen yet for so few rows. All drafts are accepted, and free by prediction."""
    drafting, slots = drafting_that_saves(0.0, length=0), np.arange(4)
    for _ in range(4):
        drafting.acceptance.update(slots, slots, np.full(4, K), np.full(4, K))
    bucket = drafting._buckets[1]
    bucket.level = -1
    for level in drafting._levels.of(1):
        for _ in range(2):
            bucket.times[level].add(slowdown if level else 1.0)
    assert follows(drafting, 1200, prompt=2000) is wanted


class ByToken(ToyCost):
    """Chunks take 5 us a token, and 1 ms of a pass."""

    def follow_seconds(self, rows: Iterable[RowWork]) -> float:
        return 1e-3 + 5e-6 * sum(row.tokens * row.times for row in rows)

    catch_up_seconds = follow_seconds


@pytest.mark.parametrize(("rows", "budget"), [(1, 64), (8, 512), pytest.param(24, 4096, marks=pytest.mark.nightly)])
def test_it_catches_up_with_rows_that_go_on(rows: int, budget: int) -> None:
    """Drafts were useless, so all rows are left behind. Then they are good: some rows are caught up with for a trial,
    and after it all of them, by chunks within the token budget. No prompt begins anew."""
    device = Device(rows, resumes=True, chunks=True, budget=budget)
    device.cost = ByToken(64, passes=1.0)
    for seq in device.rows:
        seq.end = seq.limit = 1 << 20
    device.run(600, 0.0)
    before, device.fed = device.seconds, 0
    assert sum(map(bool, device.run(600, 0.0))) < 30
    assert 0 < 5e-6 * device.fed < 0.02 * (device.seconds - before)
    device.run(2000, 0.9)
    device.useless = 0
    assert share_of_rows(device.run(200, 0.9), rows) > 0.8 and device.useless == 0


def test_it_does_not_catch_up_with_rows_that_end_soon() -> None:
    """Their drafts would save less than the chunks take."""
    device = Device(8, resumes=True, chunks=True)
    device.cost = ByToken(64, passes=1.0)
    device.run(100, 0.9)
    lacking, catching_up = [sequence(slot) for slot in range(8)], device.drafting._catching_up
    assert catching_up is not None
    for output, wanted in ((10, []), (2000, list(range(8)))):
        for seq in lacking:
            seq.computed, seq.max_len, seq.limit = 5000, 5001, 5001 + output
        catching_up.where_it_pays(lacking, 1e-4, device.cost, proposals=False)  # type: ignore[arg-type]
        assert sorted(catching_up.wanted) == wanted
        catching_up._pause = 0


class Launched(ByToken):
    """The host launches a chunk for half a second."""

    def catch_up_seconds(self, rows: Iterable[RowWork]) -> float:
        return max(self.follow_seconds(rows), 0.5)


@pytest.mark.parametrize(("cost", "wanted"), [(ByToken, True), (Launched, False)])
def test_chunks_are_weighed_with_their_launch(cost: type[ByToken], wanted: bool) -> None:
    """Drafts save 0.32 s, and the device needs 0.2 s for the chunks."""
    device = Device(8, resumes=True, chunks=True)
    rows, catching_up = [sequence(slot) for slot in range(8)], device.drafting._catching_up
    assert catching_up is not None
    for seq in rows:
        seq.computed, seq.max_len, seq.limit = 5000, 5001, 5401
    catching_up.where_it_pays(rows, 1e-4, cost(64, passes=1.0), proposals=False)  # type: ignore[arg-type]
    assert bool(catching_up.wanted) is wanted


@pytest.mark.parametrize("number", [16, 4])
def test_the_last_rows_are_not_left_behind(number: int) -> None:
    """Two rows were wanted, and would not be chosen now that others draft. Of four, two are not the last ones."""
    device = Device(number, resumes=True, chunks=True)
    device.cost = ByToken(64, passes=1.0)
    rows, catching_up = [sequence(slot) for slot in range(number)], device.drafting._catching_up
    assert catching_up is not None
    for seq in rows:
        seq.computed, seq.max_len, seq.limit = 500, 501, 700
    following = device.drafting._following

    def wanted(saved: float, *, proposals: bool) -> list[int]:
        catching_up.wanted, catching_up._pause = [], 0
        catching_up.where_it_pays(rows, saved, device.cost, proposals=proposals)  # type: ignore[arg-type]
        return sorted(catching_up.wanted)

    assert wanted(1e-4, proposals=False) == [seq.uid for seq in rows]
    for seq in rows[2:]:
        following.caught_up(seq.slot, 501, 501)
    assert wanted(1e-6, proposals=True) == ([seq.uid for seq in rows[:2]] if number == 16 else [])
    assert wanted(1e-6, proposals=False) == []
    for seq in rows:
        following.caught_up(seq.slot, 501, 501)
    assert wanted(1e-4, proposals=True) == [] and not catching_up._begun
