"""Decides how many drafts each row of a step verifies: as many as should raise the tokens per second of the step.

Drafts of all rows are ranked by the probability that they are accepted (`Acceptance`), and a step takes the first of
them, up to one of a few levels (`Levels`): mean drafts per row, and the most of a row. The time of each level comes
from the cost model, the drafter's passes included, corrected by measured step times. After SmartSpec (Liu et al. 2024),
with drafts chosen by row and position. Levels that are not in use are tried from time to time, at growing intervals,
and so rarely that the trials cost at most a fixed share of the time. Where drafts would not pay, a drafter with layers
of its own does not follow prompts either, but for those whose rows the next trial needs. Rows that it has left behind
are caught up with where drafts pay, or for a trial (CatchingUp)."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from dovetail.core.engine.acceptance import Acceptance, TreeAcceptance
from dovetail.core.engine.catching_up import LATER, CatchingUp
from dovetail.core.engine.draft_buckets import MIN_INTERVAL, Bucket
from dovetail.core.engine.draft_levels import Levels
from dovetail.core.engine.draft_ranking import Ranking
from dovetail.core.engine.following import Following
from dovetail.core.interfaces import CostModel, Row, RowWork, SchedulerLimits, Sequence, StepPlan, StepResult
from dovetail.core.interfaces.plan import DECODE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dovetail.core.interfaces import KVGroup

MAX_INTERVAL = 128
"""Most steps between two trials."""
TRIAL_ROWS = 32
"""Rows with drafts of one trial of a step without drafts, over as many steps as that takes."""
FRUITLESS_ROWS = 8
"""Such a trial ends early once so many rows in a row have accepted none."""
STRONG_PRIOR = 4.0, 3.0
"""Arguments of Acceptance where rows that go without drafts may never have any again: a few rejections in the first
request do not decide."""
LEARNT_ROWS = 16
"""Rows with drafts before a drafter that cannot catch up is given up: else it follows more prompts to find out."""
TRIAL_SHARE = 0.01
"""Trials are put off until the time that they lost is at most this share of the time since."""
LEFT_BEHIND = 0.1
"""Most rows, as a share, that a trial without drafts may leave behind if the drafter can catch up; else none may be:
they would decode alone once the others have ended. Near the break-even point such a trial leaves few, as they have
accepted few drafts."""
PREPARATIONS = 4
"""Steps with fewer drafts that may prepare such a trial. One is enough if results are known before the next choice."""
HOLD = 8
"""Steps for which the choice of no drafts stands: nothing is learnt in them."""
BETTER = 1.01
"""Drafts replace none if they should yield this many times the tokens per second."""
SURELY = 1.5
"""Prompts are followed if drafts should save so many times what that takes: it delays first tokens in any case. They
are followed further while drafts should save as much: among rows that have none, the others' drafts save little."""
WORSE = 1.015
"""No drafts replace some if they should yield this many times their tokens per second and the drafter cannot catch up:
the rows have no drafts later either, when fewer of them run and drafts would pay."""
NOTHING = 1e-9
"""Seconds that drafts save if they are kept although they save none (WORSE)."""
_COMPUTED = attrgetter("computed")
LENGTH_BUCKET, PROMPT_BUCKET = 512, 256
"""Sequence lengths and prompt tokens are rounded to multiples of these for predictions."""


class Drafting:
    """Chooses the drafts of each step of one scheduler."""

    def __init__(self, limits: SchedulerLimits, group: KVGroup | None = None) -> None:
        """`group`: see Following."""
        self._lookahead = lookahead = limits.lookahead
        self._following, self._max_seqs = Following(limits, group), limits.max_seqs
        self._catching_up = CatchingUp(limits, self._following) if limits.draft_catches_up else None
        self._depth = lookahead if limits.draft_depth is None else limits.draft_depth
        self._levels = Levels(lookahead, limits.draft_counts)
        self._may_lose = LEFT_BEHIND if limits.draft_resumes else 0.0
        kind = TreeAcceptance if self._depth < lookahead else Acceptance
        self.acceptance = kind(limits.max_seqs, lookahead, *(STRONG_PRIOR if self._following.needed else ()))
        # A drafter that must follow rows is tried before it has left them behind.
        first = 1 if self._following.needed else MIN_INTERVAL
        self._buckets: defaultdict[int, Bucket] = defaultdict(lambda: Bucket(left=first))
        """Buckets by bit length of the number of rows."""
        self._trial_rows = 0
        """Rows left in the current trial."""
        self._trial_level = 0
        self._preparations = 0
        """Steps left that may prepare the current trial, which has no drafts, by drafting less."""
        # A plain step leaves a row behind that has accepted more in the step before. A tree is not cut off.
        self._most_before_plain = 0
        if limits.draft_window is not None and self._depth == lookahead:
            self._most_before_plain = max(limits.draft_window - 2, 0)
        self._fruitless = 0
        """Latest rows with drafts, at most those since the last trial began, that all accepted none."""
        self._chosen: tuple[int, int] | None = None
        """(decode rows, mean length) of the plan that the scheduler is building."""
        self._launched: deque[tuple[int, int] | None] = deque()
        """The same of each plan in flight."""
        self._predicted: dict[tuple[int, ...], float] = {}
        self._cost: CostModel | None = None
        self._follows = False
        """Whether drafts should repay what it took to follow the latest prompts."""
        self._prepared: int | None = None
        """Uid of the latest sequence whose prompt the drafter follows for a trial alone."""

    def choose(
        self, decoding: list[Sequence], prompts: Iterable[Sequence], budget: int, cost: CostModel
    ) -> Mapping[int, int]:
        """Return the number of drafts of each decode row in the next step by uid; rows without drafts are left out.
        `prompts`: sequences that the step may feed too. `budget`: tokens of the step."""
        if self._catching_up is not None:
            self._catching_up.wanted = []
        if chosen := self._choose(decoding, prompts, budget, cost):
            self._following.drafted(decoding)
        return chosen

    def _choose(
        self, decoding: list[Sequence], prompts: Iterable[Sequence], budget: int, cost: CostModel
    ) -> Mapping[int, int]:
        rows, length = len(decoding), sum(map(_COMPUTED, decoding)) // len(decoding)
        self._cost, self._chosen = cost, (rows, length)
        self.acceptance.tick()
        bucket = self._buckets[rows.bit_length()]
        same = bucket.latest is None or bucket.latest == decoding[-1].uid
        if bucket.hold and same and not self._trial_rows and bucket.left > 1 and not bucket.prepared:
            bucket.hold -= 1
            bucket.left -= 1
            return {}
        able_R = self._following.able(decoding)
        ranking = self._rank(decoding, able_R)
        level, token_seconds, saved = self._best(bucket, rows, length, ranking, cost)
        if not level and self._is_learning and ranking.possible >= rows:
            level = self._levels.of(rows)[1]
        if not self._trial_level and (able_R & ~self._following.able(decoding, steps=1)).mean() > self._may_lose:
            if self._trial_rows > 0 and level and bucket.level and self._preparations:
                # Rows that accept few drafts in this step are not left behind by the next one.
                self._preparations -= 1
                count, each = self._levels.drafts(level, rows)
                return ranking.first(count, min(each, self._most_before_plain))
            self._trial_rows = 0
        if self._trial_rows > 0 and (bucket.level or not level):
            self._trial_rows -= rows
            drafts = self._levels.drafts(self._trial_level, rows)
            seconds = self._seconds(rows, length, *drafts, cost) * bucket.ratio(self._trial_level)
            # Of drafts that are not in use, none may be accepted.
            lost = seconds / token_seconds - rows - (ranking.gain(*drafts) if bucket.level else 0.0)
            bucket.left += max(lost, 0.0) / (TRIAL_SHARE * rows)
            return ranking.first(*drafts) if bucket.level else ranking.least_known(drafts[0])
        self._trial_rows = 0
        if (level > 0) is not (bucket.level > 0):
            bucket.interval = bucket.left = MIN_INTERVAL
        bucket.level = level
        bucket.left -= 1
        if saved <= NOTHING and self._following.needed and ranking.possible < rows * self._lookahead:
            # Other rows may have more drafts than those that were left behind or are near their end.
            saved = self._best(bucket, rows, length, self._rank(decoding), cost)[2]
        bucket.pays, bucket.saved, bucket.length = saved > 0, saved, length
        if self._catching_up is not None and budget > rows and (self._catching_up.trying or not able_R.all()):
            self._catch_up(self._catching_up, bucket, decoding, length, ranking, cost)
        if bucket.left <= 0 or (bucket.prepared and not level and ranking.possible):
            # A drafter that has fallen behind in all rows cannot be tried before it catches up, or the next prompt.
            if level or ranking.possible:
                self._begin_trial(bucket, decoding)
        elif not level:
            other_rows_may = bucket.pays or not ranking.possible
            bucket.hold, bucket.latest = HOLD, decoding[-1].uid if other_rows_may else None
        if level or (self._catching_up is not None and self._catching_up.wanted):
            # The choice of no drafts no longer stands.
            bucket.hold = 0
        if level and (prompt_tokens := _tokens(prompts, budget - rows)):
            level = self._beside_prompts(bucket, rows, length, prompt_tokens, ranking, cost, token_seconds)
        return ranking.first(*self._levels.drafts(level, rows))

    @property
    def _is_learning(self) -> bool:
        """Whether rows without drafts may never have any again, and too few had some to know that these are useless."""
        return self._following.needed and not self._may_lose and self.acceptance.evidence < LEARNT_ROWS

    def launched(self, plan: StepPlan | None, sequences: Mapping[int, Sequence] | None = None) -> None:
        """Take the plan that the last choice was made for; None = nothing could run. Write StepPlan.follows,
        Join.lacking and StepPlan.catch_up. `sequences`: those of the plan by uid; None = their outputs are taken for
        long, and the drafter catches up with none."""
        if plan is not None:
            self._launched.append(self._chosen)
            if self._following.needed:
                self._follow(plan, sequences)
                self._following.planned(plan)
            if self._catching_up is not None and self._catching_up.wanted and sequences is not None:
                self._catching_up.add(plan, sequences)
        self._chosen = None

    def _catch_up(
        self,
        catching_up: CatchingUp,
        bucket: Bucket,
        decoding: list[Sequence],
        length: int,
        ranking: Ranking,
        cost: CostModel,
    ) -> None:
        """Choose the rows with which the drafter catches up in this plan."""
        rows = len(decoding)
        if catching_up.trying:
            bucket.prepared |= not catching_up.goes_on(decoding) and ranking.possible > 0
            return
        if bucket.pays:
            saved = bucket.saved
            if bucket.level:
                saved = self._best(bucket, rows, length, self._rank(decoding), cost)[2]  # that of the other rows alone
            # Chunks are lost at once if drafts turn out to be worse, so these must pay with a standard error less, too.
            saved = min(saved, self._saved_at(bucket, rows, length, cost, -1.0))
            catching_up.where_it_pays(decoding, saved, cost, proposals=bucket.level > 0)
        if bucket.left <= 0 and not ranking.possible and not catching_up.wanted:
            step = self._seconds(rows, length, 0, 0, cost)
            if (seconds := catching_up.for_trial(decoding, step, cost)) is not None:
                bucket.left = max(bucket.left, 0) + MIN_INTERVAL + seconds / TRIAL_SHARE / step

    def _follow(self, plan: StepPlan, sequences: Mapping[int, Sequence] | None) -> None:
        """Decide whether the drafter follows the plan's prompts: where drafts of their outputs would save more time,
        and else, if a trial is due, until one prompt is complete."""
        rows = len(plan.rows)
        bucket = self._buckets[rows.bit_length()]
        prompts = [row for row in plan.rows if not row.flags & DECODE]
        if not prompts or self._cost is None or self._repays(rows, prompts, sequences):
            return
        goes_on = any(row.uid == self._prepared for row in prompts)
        # To catch up with a few rows takes less time than to follow all prompts of a step.
        due = self._catching_up is None and bucket.left <= 0 and bucket.skip <= 0
        plan.follows = goes_on or (due and bool(plan.joins))
        if not plan.follows:
            bucket.skip -= 1
            return
        if not goes_on:
            self._prepared = plan.joins[0].uid
        length = 0 if self._chosen is None else self._chosen[1]
        lost = self._cost.follow_seconds(map(RowWork.of, prompts)) / TRIAL_SHARE
        bucket.left = max(bucket.left, 0) + MIN_INTERVAL + lost / self._seconds(rows, length, 0, 0, self._cost)
        bucket.skip = max(bucket.skip, 0) + lost / self._cost.step_seconds(map(RowWork.of, plan.rows))
        bucket.prepared = True

    def _repays(self, rows: int, prompts: list[Row], sequences: Mapping[int, Sequence] | None) -> bool:
        """Whether drafts would save as much time as it takes to follow these chunks of prompts."""
        assert self._cost is not None
        if sequences is not None:
            # Those that wait decode beside these soon.
            rows = min(len(sequences), self._max_seqs)
        bucket = self._buckets[rows.bit_length()]
        saved = bucket.saved
        if bucket.level < 0 and self.acceptance.evidence >= FRUITLESS_ROWS:
            # Others have measured the acceptance. Rows left behind by chance never have drafts if it cannot catch up.
            errors = 1.0 if self._catching_up is None else 0.0
            saved = self._saved_at(bucket, rows, max(row.bound for row in prompts), self._cost, errors)
        if saved in (0.0, float("inf")) or sequences is None:
            return saved > 0
        followed = [(row.count, sequences[row.uid]) for row in prompts]
        # The longer rows are, the more drafts save. These rows are in the middle of their outputs on average.
        middle = sum((seq.prompt_len + seq.limit) // 2 for _, seq in followed) // len(followed)
        if bucket.length > middle:
            less = self._saved_at(bucket, rows, bucket.length, self._cost)
            less -= self._saved_at(bucket, rows, middle, self._cost)
            saved -= max(less, 0.0)
        shares = (count / seq.prompt_len * (seq.limit - seq.prompt_len) for count, seq in followed)
        worth = saved * sum(shares) / (1.0 if self._catching_up is None else LATER)
        follow = self._cost.follow_seconds(map(RowWork.of, prompts))
        self._follows = worth > (follow if self._follows else SURELY * follow)
        return self._follows

    def _saved_at(self, bucket: Bucket, rows: int, length: int, cost: CostModel, errors: float = 0.0) -> float:
        """Return the seconds that drafts save per token of so many rows, if these accept what others did, or so many
        standard errors more."""
        gain_K = rows * np.cumsum(self.acceptance.expected(errors))
        each = {}
        for level in self._levels.of(rows):
            drafts = self._levels.drafts(level, rows)
            gain = np.interp(drafts[0] / rows, np.arange(len(gain_K) + 1), [0.0, *gain_K])
            seconds = self._seconds(rows, length, *drafts, cost) * bucket.ratio(level)
            each[level] = seconds / (rows + float(gain))
        best = min(each.values())
        return each[0] - best if each[0] > BETTER * best else 0.0

    def _rank(self, decoding: list[Sequence], able_R: NDArray[np.bool_] | None = None) -> Ranking:
        return Ranking(self.acceptance, decoding, self._lookahead, self._depth, able_R)

    def _begin_trial(self, bucket: Bucket, decoding: list[Sequence]) -> None:
        """Let the next steps try another level: after steps without drafts the lowest that drafts for enough rows, or
        else no drafts and the other levels in turn. One step measures the time of a level, two at first; acceptance
        takes more."""
        rows = len(decoding)
        bucket.trials += 1
        # One trial alone is too little evidence: repeat it soon.
        bucket.interval = MIN_INTERVAL if bucket.trials == 1 else min(2 * bucket.interval, MAX_INTERVAL)
        bucket.left = bucket.interval + max(bucket.left, 0)
        if bucket.level:
            others = [level for level in self._levels.of(rows) if level not in (0, bucket.level)]
            turn, plain = divmod(bucket.trials, 2)
            self._trial_level = 0 if plain or not others else others[turn % len(others)]
            self._preparations = PREPARATIONS if self._most_before_plain else 0
            measured = bucket.times[self._trial_level].samples > 1
            self._trial_rows = 1 if measured else 1 + rows
        else:
            # A prompt that was followed for the trial makes a single row able.
            trial_rows = TRIAL_ROWS // 2 if bucket.prepared else TRIAL_ROWS
            self._trial_level, self._trial_rows = self._levels.lowest(min(rows, TRIAL_ROWS), 1, rows), trial_rows
        bucket.prepared = False
        self._fruitless = 0

    def _best(
        self, bucket: Bucket, rows: int, length: int, ranking: Ranking, cost: CostModel
    ) -> tuple[int, float, float]:
        """Return the level with the most tokens per second, its seconds per token, and those that it saves: more than
        0 for any level but 0."""
        each = {}
        for level in self._levels.of(rows):
            drafts = self._levels.drafts(level, rows)
            seconds = self._seconds(rows, length, *drafts, cost) * bucket.ratio(level)
            each[level] = seconds / (rows + ranking.gain(*drafts))
        best = min(each, key=each.__getitem__)
        if bucket.level and self._following.needed and not self._may_lose:
            best = min(list(each)[1:], key=each.__getitem__)
            keep = WORSE * each[0] > each[best]
        else:
            keep = each[0] > BETTER * each[best]
        if not keep:
            best = 0
        return best, each[best], max(each[0] - each[best], NOTHING) if best else 0.0

    def _beside_prompts(
        self,
        bucket: Bucket,
        rows: int,
        length: int,
        prompt_tokens: int,
        ranking: Ranking,
        cost: CostModel,
        token_seconds: float,
    ) -> int:
        """Return the level of a step that also feeds prompts. An accepted draft saves the time of a token in
        later steps, and each draft delays the prompts."""

        def saved(level: int) -> float:
            drafts = self._levels.drafts(level, rows)
            seconds = self._seconds(rows, length, *drafts, cost, prompt_tokens) * bucket.ratio(level)
            return ranking.gain(*drafts) * token_seconds - seconds

        # A step without drafts would leave rows behind.
        return max(self._levels.of(rows)[self._following.needed :], key=saved)

    def _seconds(
        self, rows: int, length: int, drafts: int, each: int, cost: CostModel, prompt_tokens: int = 0
    ) -> float:
        """Return the predicted step time, drafting included; `each`: most drafts of a row. Between multiples of
        LENGTH_BUCKET it is interpolated: a time ratio measured at one length holds at others."""
        prompt_tokens = -(-prompt_tokens // PROMPT_BUCKET) * PROMPT_BUCKET
        buckets, more = divmod(length, LENGTH_BUCKET)
        shorter = self._predict(rows, buckets, drafts, each, cost, prompt_tokens)
        longer = self._predict(rows, buckets + 1, drafts, each, cost, prompt_tokens)
        return shorter + (longer - shorter) * more / LENGTH_BUCKET

    def _predict(self, rows: int, buckets: int, drafts: int, each: int, cost: CostModel, prompt_tokens: int) -> float:
        key = rows, buckets, drafts, each, prompt_tokens
        if (found := self._predicted.get(key)) is None:
            if len(self._predicted) > 1 << 14:
                self._predicted.clear()
            fewer, more = divmod(drafts, rows)
            length = max(buckets * LENGTH_BUCKET, 2 + fewer)
            works = [RowWork(1 + fewer, length, 1 + fewer, rows - more), RowWork(2 + fewer, length, 2 + fewer, more)]
            if prompt_tokens:
                works.append(RowWork(prompt_tokens, prompt_tokens))
            found = cost.step_seconds(work for work in works if work.times)
            if drafts:
                found += cost.draft_seconds(rows, min(each, self._depth), length)
            self._predicted[key] = found
        return found

    def update(self, plan: StepPlan, result: StepResult) -> None:
        """Take the result of the oldest launched plan."""
        launched = self._launched.popleft()
        drafts, most = self._learn(plan, result)
        # The time of a step with prefill chunks, or chunks of the drafter, is not that of its decode rows.
        if launched is None or self._cost is None or not result.device_seconds:
            return
        if plan.catch_up or not plan.rows[-1].flags & DECODE:
            return
        rows, length = launched
        level = self._levels.lowest(drafts, most, rows)
        each = self._levels.drafts(level, rows)[1]
        if (predicted := self._seconds(rows, length, drafts, each, self._cost)) <= 0:
            return
        bucket = self._buckets[rows.bit_length()]
        # All rows ran before this step, so idle time before it was host time: drafting on the host, for one.
        measured = result.device_seconds + result.idle_seconds
        bucket.times[level].add(measured / predicted)

    def _learn(self, plan: StepPlan, result: StepResult) -> tuple[int, int]:
        """Count accepted drafts. Return the number of drafts that the plan has, and the most of a row."""
        counts = [row.draft for row in plan.rows]
        if not (most := max(counts)):
            return 0, 0
        planned = sum(counts), most
        drafted = [
            (row.slot, row.uid, row.draft, max(len(out.tokens) - 1, 0))
            for row, out in zip(plan.rows, result.rows, strict=True)
            if row.draft and (out.drafted or not self._following.had_none(row.slot))
        ]
        if not drafted:
            return planned
        slots_R, uids_R, planned_R, accepted_R = np.array(drafted, np.int64).T
        self.acceptance.update(slots_R, uids_R, planned_R, accepted_R)
        self._fruitless = 0 if accepted_R.any() else self._fruitless + len(drafted)
        if self._trial_level and self._fruitless >= FRUITLESS_ROWS:
            self._trial_rows = 0
        return planned


def _tokens(prompts: Iterable[Sequence], most: int) -> int:
    """Return the number of tokens left to feed, at most `most`."""
    tokens = 0
    for seq in prompts:
        tokens += seq.remaining
        if tokens >= most:
            return max(most, 0)
    return tokens
