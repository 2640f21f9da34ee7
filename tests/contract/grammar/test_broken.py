"""Grammar compilers with one fault each; the suite must reject them."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from dovetail.core.errors import RequestError
from dovetail.core.interfaces import Grammar, GrammarCompiler, Matcher
from dovetail.core.testing.grammar import GrammarContract, vocabulary
from dovetail.core.testing.suite import failures
from dovetail.plugins.grammar.config import LLGuidanceConfig
from dovetail.plugins.grammar.guidance import LLGuidance


class Wrapped(Matcher):
    """Wraps a correct matcher."""

    def __init__(self, inner: Matcher) -> None:
        self.inner = inner

    def mask(self, out: Any) -> None:
        self.inner.mask(out)

    def advance(self, token: int) -> None:
        self.inner.advance(token)

    @property
    def accepting(self) -> bool:
        return self.inner.accepting

    @property
    def finished(self) -> bool:
        return self.inner.finished

    def fork(self) -> Matcher:
        return type(self)(self.inner.fork())


class AllowsEverything(Wrapped):
    def mask(self, out: Any) -> None:
        out[:] = 0xFFFFFFFF


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
        try:
            self.inner.advance(token)
        except RequestError:
            pass


class MayAlwaysEnd(Wrapped):
    accepting = True  # type: ignore[assignment]


class MayNeverEnd(Wrapped):
    accepting = False  # type: ignore[assignment]


class EndsTooSoon(Wrapped):
    """Ends at the first point where the output may end."""

    @property
    def finished(self) -> bool:
        return True


class NeverFinishes(Wrapped):
    """Never finishes, and its mask does not show the end either."""

    finished = False  # type: ignore[assignment]

    def mask(self, out: Any) -> None:
        self.inner.mask(out)
        if self.inner.finished:
            out[:] = 0xFFFFFFFF


class ForksShare(Wrapped):
    def fork(self) -> Matcher:
        return type(self)(self.inner)


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
        time.sleep(0.001)
        return super().compile(self.last)


BROKEN: dict[type, str] = {
    AllowsEverything: "test_other_texts_are_not_allowed",
    AddsToWhatWasThere: "test_mask_overwrites_and_changes_nothing",
    ShiftsByOne: "test_matching_texts_are_allowed",
    AllowsSpareTokens: "test_special_tokens_and_spare_ids_are_never_allowed",
    MovesOnWithEachMask: "test_mask_overwrites_and_changes_nothing",
    SwallowsWrongTokens: "test_a_token_that_is_not_allowed_is_refused",
    MayAlwaysEnd: "test_random_outputs_match",
    MayNeverEnd: "test_matching_texts_are_allowed",
    EndsTooSoon: "test_an_output_that_can_only_end_is_finished",
    NeverFinishes: "test_an_output_that_can_only_end_is_finished",
    ForksShare: "test_forks_are_independent",
    ForksStartAnew: "test_forks_are_independent",
    CompilesAnything: "test_a_wrong_grammar_is_refused_with_its_reason",
    NamesNoReason: "test_a_wrong_grammar_is_refused_with_its_reason",
    RemembersTheLast: "test_threads_may_compile_fork_and_mask_concurrently",
}


def suite_of(broken: type) -> GrammarContract:
    compiler = broken if issubclass(broken, Compiler) else type("Its", (Compiler,), {"matcher": broken})

    class Suite(GrammarContract):
        def make(self, vocabulary: Any) -> GrammarCompiler:
            return compiler(LLGuidanceConfig(), vocabulary)

    return Suite()


@pytest.mark.parametrize(("broken", "test"), BROKEN.items(), ids=[broken.__name__ for broken in BROKEN])
def test_the_suite_rejects(broken: type, test: str) -> None:
    others = tuple(name for name in dir(GrammarContract) if name != test)
    assert test in failures(suite_of(broken), skip=others), f"the suite accepts it: {broken.__doc__}"


def test_the_unbroken_one_passes() -> None:
    assert failures(suite_of(Compiler)) == {}
