"""Grammar compilers with one fault each; the suite must reject them."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from dovetail.core.errors import RequestError
from dovetail.core.interfaces import Grammar, Matcher
from dovetail.core.testing.grammar import GrammarContract, vocabulary
from dovetail.core.testing.suite import failures
from dovetail.plugins.grammar.config import LLGuidanceConfig
from dovetail.plugins.grammar.guidance import LLGuidance

from ..faults import each, rejects, suite, variant


class Wrapped(Matcher):
    """Wraps a correct matcher."""

    def __init__(self, inner: Matcher) -> None:
        self.inner = inner

    def mask(self, out: Any) -> None:
        self.inner.mask(out)

    def advance(self, token: int) -> None:
        self.inner.advance(token)

    def rollback(self, tokens: int) -> None:
        self.inner.rollback(tokens)

    @property
    def accepting(self) -> bool:
        return self.inner.accepting

    @property
    def finished(self) -> bool:
        return self.inner.finished

    def fork(self) -> Matcher:
        return type(self)(self.inner.fork())


fault = partial(variant, Wrapped)


class AddsToWhatWasThere(Wrapped):
    def mask(self, out: Any) -> None:
        fresh = np.zeros_like(out)
        self.inner.mask(fresh)
        out |= fresh


class ShiftsByOne(Wrapped):
    def mask(self, out: Any) -> None:
        self.inner.mask(out)
        bits = np.roll(np.unpackbits(out.view(np.uint8), bitorder="little"), 1)
        out[:] = np.packbits(bits, bitorder="little").view(np.uint32)


class AllowsSpareTokens(Wrapped):
    def mask(self, out: Any) -> None:
        self.inner.mask(out)
        out[-1] |= np.uint32(1 << 31 >> (-vocabulary()[0].size % 32))


class MovesOnWithEachMask(Wrapped):
    """Advances with a token that the mask allows, as if it were sampled."""

    def mask(self, out: Any) -> None:
        self.inner.mask(out)
        tokens = np.flatnonzero(np.unpackbits(out.view(np.uint8), bitorder="little"))
        if len(tokens) == 1 and tokens[0] > 2:
            self.inner.advance(int(tokens[0]))


class SwallowsWrongTokens(Wrapped):
    def advance(self, token: int) -> None:
        with suppress(RequestError):
            self.inner.advance(token)


class NeverFinishes(Wrapped):
    """Never finishes, and its mask does not show the end either."""

    finished = False  # type: ignore[assignment]

    def mask(self, out: Any) -> None:
        self.inner.mask(out)
        if self.inner.finished:
            out[:] = 0xFFFFFFFF


class ForksStartAnew(Wrapped):
    def __init__(self, inner: Matcher, start: Matcher | None = None) -> None:
        super().__init__(inner)
        self.start = (start or inner).fork()

    def fork(self) -> Matcher:
        return type(self)(self.start.fork(), self.start)


class Compiler(LLGuidance):
    matcher: type[Wrapped] = Wrapped

    def compile(self, grammar: Grammar) -> Matcher:
        return self.matcher(super().compile(grammar))


class CompilesAnything(Compiler):
    def compile(self, grammar: Grammar) -> Matcher:
        try:
            return super().compile(grammar)
        except RequestError:
            return super().compile(Grammar(kind="json_object"))


class NamesNoReason(Compiler):
    def compile(self, grammar: Grammar) -> Matcher:
        try:
            return super().compile(grammar)
        except RequestError:
            raise KeyError(grammar.kind) from None


class RemembersTheLast(Compiler):
    """Keeps the grammar being compiled in the compiler."""

    def compile(self, grammar: Grammar) -> Matcher:
        self.last = grammar
        time.sleep(0.02)
        return super().compile(self.last)


BROKEN: dict[str, list[type]] = {
    "test_other_texts_are_not_allowed": [fault("AllowsEverything", mask=lambda self, out: out.fill(0xFFFFFFFF))],
    "test_mask_overwrites_and_changes_nothing": [AddsToWhatWasThere, MovesOnWithEachMask],
    "test_matching_texts_are_allowed": [ShiftsByOne, fault("MayNeverEnd", accepting=False)],
    "test_special_tokens_and_spare_ids_are_never_allowed": [AllowsSpareTokens],
    "test_a_token_that_is_not_allowed_is_refused": [SwallowsWrongTokens],
    "test_random_outputs_match": [fault("MayAlwaysEnd", accepting=True)],
    "test_an_output_that_can_only_end_is_finished": [
        # Ends at the first point where the output may end.
        fault("EndsTooSoon", finished=True),
        NeverFinishes,
    ],
    "test_tokens_are_taken_back": [
        fault("KeepsWhatItHas", rollback=lambda self, tokens: None),
        fault("TakesOneBack", rollback=lambda self, tokens: self.inner.rollback(min(tokens, 1))),
    ],
    "test_expected_tokens_are_allowed": [fault("ExpectsTheImpossible", forced=lambda self: (0,))],
    "test_forks_are_independent": [fault("ForksShare", fork=lambda self: type(self)(self.inner)), ForksStartAnew],
    "test_a_wrong_grammar_is_refused_with_its_reason": [CompilesAnything, NamesNoReason],
    "test_threads_may_compile_fork_and_mask_concurrently": [RemembersTheLast],
}


def suite_of(broken: type) -> GrammarContract:
    compiler = broken if issubclass(broken, Compiler) else variant(Compiler, "Its", matcher=broken)
    return suite(GrammarContract, make=lambda self, vocabulary: compiler(LLGuidanceConfig(), vocabulary))


@each(BROKEN)
def test_the_suite_rejects(broken: type, test: str) -> None:
    assert rejects(suite_of(broken), test)


def test_the_unbroken_one_passes() -> None:
    assert failures(suite_of(Compiler)) == {}
