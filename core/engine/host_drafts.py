"""Drafts that the host gives or must see: of drafters that work on the host, and of rows with a grammar."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from operator import index
from typing import TYPE_CHECKING

import numpy as np

from dovetail.core.engine.tracked import Tracked
from dovetail.core.interfaces import Drafter, HostDraft, LateInputs, StepPlan

if TYPE_CHECKING:
    from numpy.typing import NDArray


def host_drafts(
    plan: StepPlan, tracked: Mapping[int, Tracked], in_flight: Iterable[StepPlan], drafter: Drafter | None
) -> list[HostDraft]:
    """Return the drafts that a plan gets from the host: the tokens that a row's grammar expects next, or else those of
    `drafter`, if it works on the host. `in_flight`: plans without a result yet."""
    drafts = []
    for row in plan.rows:
        if not row.draft or (one := tracked.get(row.uid)) is None:
            continue
        found: Seq[int] = ()
        if one.grammar is not None and one.grammar.forced:
            # Plans in flight draw and verify tokens that the host has not seen: probably the first expected ones.
            pending = sum(1 + older.draft for each in in_flight for older in each.rows if older.uid == row.uid)
            found = one.grammar.forced[pending:][: row.draft]
        if not found and drafter is not None:
            found = _of_the_host(drafter, one.seq.tokens, row.draft)
        if found or drafter is not None:
            drafts.append(HostDraft(row.slot, tuple(found)))
    return drafts


def _of_the_host(drafter: Drafter, tokens: list[int], k: int) -> Seq[int]:
    """Return the drafts of a drafter that works on the host. Ids that no vocabulary has become -1."""
    found = drafter.propose_host(tokens, k)
    try:
        return [token if 0 <= token < 2**31 else -1 for token in map(index, found)]
    except TypeError:
        kind = type(drafter)
        raise TypeError(
            f"{kind.__module__}.{kind.__name__}.propose_host returned {found!r:.80}, not a sequence of token ids"
        ) from None


def late_inputs(step: int, rows: Mapping[int, int], masks: Mapping[int, Seq[NDArray[np.uint32]]]) -> LateInputs:
    """Return the late inputs of a step. `rows`: index of each row, by uid."""
    stacked = [mask_W for each in masks.values() for mask_W in each]
    return LateInputs(
        step,
        tuple(rows[uid] for uid in masks),
        np.stack(stacked) if stacked else np.zeros((0, 0), np.uint32),
        tuple(len(each) - 1 for each in masks.values()) if len(stacked) > len(masks) else (),
    )
