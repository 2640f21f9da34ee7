"""Parsers with one fault each; the suites must reject them."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import Phase, settings

from dovetail.core.interfaces import (
    Content,
    Grammar,
    ParserEvent,
    ParserStream,
    Reasoning,
    ReasoningParser,
    Tool,
    ToolCallBegin,
    ToolCallEnd,
    ToolParser,
)
from dovetail.core.parsing import Steps, call_rules
from dovetail.core.testing.parsers import Call, ReasoningParserContract, ToolParserContract
from dovetail.core.testing.suite import failures
from dovetail.plugins.reasoning_parser.config import ThinkConfig
from dovetail.plugins.reasoning_parser.think import ThinkParser, ThinkStream
from dovetail.plugins.tool_parser.config import HermesConfig
from dovetail.plugins.tool_parser.hermes import HermesParser, HermesStream

QUICK = settings(ToolParserContract.check_settings, phases=[Phase.generate])
"""Failing examples are not minimized."""


def with_stream(stream: type[HermesStream]) -> type[ToolParser]:
    class Parser(HermesParser):
        def stream(self, tools: Sequence[Tool], *, forced: bool = False) -> ParserStream:
            return stream(tools)

    Parser.__name__ = stream.__name__
    return Parser


class LosesWhatItHolds(HermesStream):
    def finish(self) -> list[ParserEvent]:
        super().finish()
        return []


class WaitsForTheEnd(HermesStream):
    held = ""

    def feed(self, text: str) -> list[ParserEvent]:
        self.held += text
        return []

    def finish(self) -> list[ParserEvent]:
        return [*super().feed(self.held), *super().finish()]


class WantsAMarkInOnePiece(HermesStream):
    def _overlap(self, mark: str) -> int:
        return 0


class TakesAnyName(HermesStream):
    def offered(self, name: str) -> str:
        return name


class DropsWhatIsMalformed(HermesStream):
    def parse(self) -> Steps[None]:
        found = False
        while (yield from self.until("<tool_call>", drop=found)):
            found = yield from self.attempt(self.call)
            yield from self.closing("</tool_call>")


class CountsFromOne(HermesStream):
    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self._index = 0


class NeverEndsACall(HermesStream):
    def end(self) -> None:
        pass


class SendsArgumentsWhole(HermesStream):
    def _run(self) -> list[ParserEvent]:
        self.waiting = [*getattr(self, "waiting", []), *super()._run()]
        if any(isinstance(event, ToolCallBegin) for event in self.waiting):
            if not self.ended and not isinstance(self.waiting[-1], ToolCallEnd | Content):
                return []
        events, self.waiting = self.waiting, []
        return events


class RaisesOnWhatIsMalformed(HermesStream):
    def finish(self) -> list[ParserEvent]:
        events = super().finish()
        if any(isinstance(event, Content) for event in events):
            raise ValueError("this is no call")
        return events


class ReadsEverythingAnew(HermesStream):
    def feed(self, text: str) -> list[ParserEvent]:
        self.everything = getattr(self, "everything", "") + text
        for _ in self.everything:
            pass
        return super().feed(text)


class OneStreamForAll(HermesParser):
    def __init__(self, config: object) -> None:
        super().__init__(config)
        self.streams: dict[tuple[Tool, ...], ParserStream] = {}

    def stream(self, tools: Sequence[Tool], *, forced: bool = False) -> ParserStream:
        return self.streams.setdefault(tuple(tool.name for tool in tools), HermesStream(tools))  # type: ignore[call-overload, no-any-return]


class FitsAnything(HermesParser):
    def fits(self, chat_template: str) -> bool:
        return True


class AllowsWhatItDoesNotRead(HermesParser):
    def grammar(self, tools: Sequence[Tool], *, parallel: bool = True) -> Grammar:
        return Grammar(kind="lark", value=f'start: "<tool>" call "</tool>"\n{call_rules(tools)}')


class AllowsMoreThanOne(HermesParser):
    def grammar(self, tools: Sequence[Tool], *, parallel: bool = True) -> Grammar:
        return super().grammar(tools, parallel=True)


class HasNoLimits(HermesParser):
    def grammar(self, tools: Sequence[Tool], *, parallel: bool = True) -> Grammar:
        return super().grammar([Tool(tool.name) for tool in tools], parallel=parallel)


BROKEN: dict[type[ToolParser], str] = {
    with_stream(LosesWhatItHolds): "test_nothing_is_lost",
    with_stream(WaitsForTheEnd): "test_plain_text_is_not_held_back",
    with_stream(WantsAMarkInOnePiece): "test_cuts_make_no_difference",
    with_stream(TakesAnyName): "test_calls_of_tools_that_are_not_offered_are_content",
    with_stream(DropsWhatIsMalformed): "test_text_without_a_call_is_unchanged",
    with_stream(CountsFromOne): "test_calls_are_found",
    with_stream(NeverEndsACall): "test_calls_are_found",
    with_stream(SendsArgumentsWhole): "test_arguments_are_not_held_back",
    with_stream(RaisesOnWhatIsMalformed): "test_nothing_is_lost",
    with_stream(ReadsEverythingAnew): "test_cost_is_linear_in_the_text",
    OneStreamForAll: "test_streams_share_nothing",
    FitsAnything: "test_it_fits_only_the_templates_of_its_models",
    AllowsWhatItDoesNotRead: "test_texts_of_the_grammar_are_calls",
    AllowsMoreThanOne: "test_texts_of_the_grammar_are_calls",
    HasNoLimits: "test_texts_of_the_grammar_are_calls",
}


def tool_suite(parser: type[ToolParser]) -> ToolParserContract:
    class Suite(ToolParserContract):
        check_settings = QUICK
        marks = ("<tool_call>", "</tool_call>")

        def make(self) -> ToolParser:
            return parser(HermesConfig())

        def render(self, calls: Sequence[Call]) -> str:
            bodies = [json.dumps({"name": call.name, "arguments": call.arguments}) for call in calls]
            return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)

    return Suite()


@pytest.mark.parametrize(("broken", "test"), BROKEN.items(), ids=[broken.__name__ for broken in BROKEN])
def test_the_suite_rejects_a_tool_parser(broken: type[ToolParser], test: str) -> None:
    others = tuple(name for name in dir(ToolParserContract) if name != test)
    assert test in failures(tool_suite(broken), skip=others), "the suite accepts it"


class ReasonsAnywhere(ThinkStream):
    """Starts a second reasoning at a mark inside the answer."""

    def parse(self) -> Steps[None]:
        while (yield from self.until("<think>")):
            yield from self.until("</think>", Reasoning)


class LosesItsTail(ThinkStream):
    def finish(self) -> list[ParserEvent]:
        super().finish()
        return []


class HoldsTheReasoning(ThinkStream):
    def _run(self) -> list[ParserEvent]:
        self.waiting = [*getattr(self, "waiting", []), *super()._run()]
        if self.ended or any(isinstance(event, Content) for event in self.waiting):
            events, self.waiting = self.waiting, []
            return events
        return []


class KeepsTheBlanks(ThinkStream):
    """Includes the line breaks next to the tags in the reasoning."""

    def blanks(self) -> Steps[str]:
        return (yield from self.peek())


class ClosesInOnePiece(ThinkStream):
    def _overlap(self, mark: str) -> int:
        return 0


class AlwaysReasons(ThinkStream):
    def __init__(self, open: str, close: str, opened: bool) -> None:
        super().__init__(open, close, True)


BROKEN_REASONING: dict[type[ThinkStream], str] = {
    ReasonsAnywhere: "test_reasoning_comes_first_and_nothing_is_lost",
    LosesItsTail: "test_the_beginning_of_a_mark_is_not_lost",
    HoldsTheReasoning: "test_text_is_not_held_back",
    KeepsTheBlanks: "test_reasoning_is_found",
    ClosesInOnePiece: "test_cuts_make_no_difference",
    AlwaysReasons: "test_text_without_marks_is_unchanged",
}


def reasoning_suite(stream: type[ThinkStream]) -> ReasoningParserContract:
    class Parser(ThinkParser):
        def stream(self, prompt: str) -> ParserStream:
            return stream("<think>", "</think>", prompt.rstrip().endswith("<think>"))

    class Suite(ReasoningParserContract):
        check_settings = QUICK
        marks = ("<think>", "</think>")

        def make(self) -> ReasoningParser:
            return Parser(ThinkConfig())

        def render(self, reasoning: str, answer: str) -> tuple[str, str]:
            return "Hi", f"<think>\n{reasoning}\n</think>\n\n{answer}"

    return Suite()


@pytest.mark.parametrize(("broken", "test"), BROKEN_REASONING.items(), ids=[b.__name__ for b in BROKEN_REASONING])
def test_the_suite_rejects_a_reasoning_parser(broken: type[ThinkStream], test: str) -> None:
    others = tuple(name for name in dir(ReasoningParserContract) if name != test)
    assert test in failures(reasoning_suite(broken), skip=others), f"the suite accepts it: {broken.__doc__}"


def test_the_unbroken_ones_pass() -> None:
    assert failures(tool_suite(HermesParser)) == {}
    assert failures(reasoning_suite(ThinkStream)) == {}
