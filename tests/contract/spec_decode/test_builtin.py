"""The contract suite over every built-in drafter."""

from __future__ import annotations

import pytest

from dovetail.core.interfaces import Drafter
from dovetail.core.testing.spec_decode import DrafterContract
from dovetail.plugins.spec_decode.config import NgramConfig, NoneConfig
from dovetail.plugins.spec_decode.ngram import NgramDrafter
from dovetail.plugins.spec_decode.none import NoDrafter


class TestNone(DrafterContract):
    def make(self) -> Drafter:
        return NoDrafter(NoneConfig())


class TestNgram(DrafterContract):
    def make(self) -> Drafter:
        return NgramDrafter(NgramConfig())


class TestNgramOfOneToken(DrafterContract):
    def make(self) -> Drafter:
        return NgramDrafter(NgramConfig(lookahead=1, min_match=1, max_match=1))


class TestNgramFarAhead(DrafterContract):
    def make(self) -> Drafter:
        return NgramDrafter(NgramConfig(lookahead=9, min_match=3, max_match=3))


def test_the_suite_must_be_given_a_drafter() -> None:
    with pytest.raises(NotImplementedError):
        DrafterContract().make()
