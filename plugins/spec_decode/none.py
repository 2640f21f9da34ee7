"""Speculation off."""

from __future__ import annotations

from dovetail.core.interfaces import Draft, DraftContext, Drafter


class NoDrafter(Drafter):
    @property
    def lookahead(self) -> int:
        return 0

    def propose(self, ctx: DraftContext) -> Draft:
        raise AssertionError("propose() is not called with lookahead 0")
