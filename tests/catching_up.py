"""Draft models that are left behind and catch up by chunks, by turns."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest

from dovetail.core.engine.drafting import Drafting
from dovetail.core.interfaces import Sequence, StepPlan


def by_turns(patch: pytest.MonkeyPatch, lookahead: int = 4) -> None:
    """Let every third step follow its prompts. Of twelve steps with decode rows, six have no drafts; in the others the
    drafter catches up with rows that are behind, and the others have all drafts. For `lookahead` drafts in a chain, and
    an engine that weighs drafts by a cost model."""
    steps = itertools.count()

    def follow(drafting: Drafting, plan: StepPlan, sequences: object) -> None:
        plan.follows = plan.step % 3 == 0

    def choose(drafting: Drafting, decoding: list[Sequence], *rest: object) -> Mapping[int, int]:
        if next(steps) % 12 < 6:
            return {}
        able_R = drafting._following.able(decoding).tolist()
        able = {seq.uid: one for seq, one in zip(decoding, able_R, strict=True)}
        assert drafting._catching_up is not None
        drafting._catching_up.wanted = [uid for uid, one in able.items() if not one]
        return {uid: lookahead for uid, one in able.items() if one}

    patch.setattr(Drafting, "_follow", follow)
    patch.setattr(Drafting, "_choose", choose)
