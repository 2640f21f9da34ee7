"""Limits of an engine's scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.core.interfaces import Drafter, ExecutorInfo, SchedulerLimits

if TYPE_CHECKING:
    from dovetail.core.compose import EngineConfig


def scheduler_limits(engine: EngineConfig, info: ExecutorInfo, drafter: Drafter) -> SchedulerLimits:
    return SchedulerLimits(
        engine.token_budget,
        engine.max_seqs,
        info.max_len,
        info.lookahead,
        engine.depth,
        draft_depth=drafter.depth,
        weighs_drafts=engine.drafts == "paying",
        draft_window=drafter.window,
        draft_resumes=drafter.resumes,
        draft_counts=drafter.draft_counts,
        draft_catches_up=drafter.catches_up,
        again=int(info.lookahead > 0 and drafter.follows_features),
    )
