"""Parsers with one fault each; the suites must reject them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hypothesis import Phase, settings

from dovetail.core.interfaces import (
    Content,
    Grammar,
    ParserEvent,
    ParserStream,
    Reasoning,
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

from ..faults import each, rejects, suite, variant

QUICK = settings(ToolParserContract.check_settings, phases=[Phase.generate])
"""Failing examples are not minimized."""


fault = partial(variant, HermesParser)


def with_stream(stream: type[HermesStream]) -> type[ToolParser]:
    return fault(stream.__name__, stream=lambda self, tools, *, forced=False: stream(tools))


def streams(name: str, **members: Any) -> type[ToolParser]:
    return with_stream(variant(HermesStream, name, **members))


def loses_what_it_holds(self: ParserStream) -> list[ParserEvent]:
    type(self).__base__.finish(self)
    return []


def whole(ends: Callable[[Any, list[ParserEvent]], bool]) -> Callable[[Any], list[ParserEvent]]:
    """Method that holds a stream's events back until the condition is true."""

    def _run(self: Any) -> list[ParserEvent]:
        self.waiting = [*getattr(self, "waiting", []), *type(self).__base__._run(self)]
        if not ends(self, self.waiting):
            return []
        events, self.waiting = self.waiting, []
        return events

    return _run


class WaitsForTheEnd(HermesStream):
    held = ""

    def feed(self, text: str) -> list[ParserEvent]:
        self.held += text
        return []

    def finish(self) -> list[ParserEvent]:
        return [*super().feed(self.held), *super().finish()]


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


class HasNoLimits(HermesParser):
    def grammar(self, tools: Sequence[Tool], *, parallel: bool = True) -> Grammar:
        return super().grammar([Tool(tool.name) for tool in tools], parallel=parallel)


BROKEN: dict[str, list[type[ToolParser]]] = {
    "test_nothing_is_lost": [
        streams("LosesWhatItHolds", finish=loses_what_it_holds),
        with_stream(RaisesOnWhatIsMalformed),
    ],
    "test_plain_text_is_not_held_back": [with_stream(WaitsForTheEnd)],
    "test_cuts_make_no_difference": [streams("WantsAMarkInOnePiece", _overlap=lambda self, mark: 0)],
    "test_calls_of_tools_that_are_not_offered_are_content": [streams("TakesAnyName", offered=lambda self, name: name)],
    "test_text_without_a_call_is_unchanged": [with_stream(DropsWhatIsMalformed)],
    "test_calls_are_found": [with_stream(CountsFromOne), streams("NeverEndsACall", end=lambda self: None)],
    "test_arguments_are_not_held_back": [
        streams(
            "SendsArgumentsWhole",
            _run=whole(
                lambda self, waiting: (
                    self.ended
                    or not any(isinstance(event, ToolCallBegin) for event in waiting)
                    or isinstance(waiting[-1], ToolCallEnd | Content)
                )
            ),
        )
    ],
    "test_cost_is_linear_in_the_text": [with_stream(ReadsEverythingAnew)],
    "test_streams_share_nothing": [OneStreamForAll],
    "test_it_fits_only_the_templates_of_its_models": [fault("FitsAnything", fits=lambda self, chat_template: True)],
    "test_texts_of_the_grammar_are_calls": [
        fault(
            "AllowsWhatItDoesNotRead",
            grammar=lambda self, tools, *, parallel=True: Grammar(
                kind="lark", value=f'start: "<tool>" call "</tool>"\n{call_rules(tools)}'
            ),
        ),
        fault(
            "AllowsMoreThanOne",
            grammar=lambda self, tools, *, parallel=True: HermesParser.grammar(self, tools, parallel=True),
        ),
        HasNoLimits,
    ],
}


def render(self: ToolParserContract, calls: Sequence[Call]) -> str:
    bodies = [json.dumps({"name": call.name, "arguments": call.arguments}) for call in calls]
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def tool_suite(parser: type[ToolParser]) -> ToolParserContract:
    return suite(
        ToolParserContract,
        check_settings=QUICK,
        marks=("<tool_call>", "</tool_call>"),
        make=lambda self: parser(HermesConfig()),
        render=render,
    )


@each(BROKEN)
def test_the_suite_rejects_a_tool_parser(broken: type[ToolParser], test: str) -> None:
    assert rejects(tool_suite(broken), test)


think = partial(variant, ThinkStream)


class ReasonsAnywhere(ThinkStream):
    """Starts a second reasoning at a mark inside the answer."""

    def parse(self) -> Steps[None]:
        while (yield from self.until("<think>")):
            yield from self.until("</think>", Reasoning)


class KeepsTheBlanks(ThinkStream):
    """Includes the line breaks next to the tags in the reasoning."""

    def blanks(self) -> Steps[str]:
        return (yield from self.peek())


class AlwaysReasons(ThinkStream):
    def __init__(self, open: str, close: str, opened: bool) -> None:
        super().__init__(open, close, True)


BROKEN_REASONING: dict[str, list[type[ThinkStream]]] = {
    "test_reasoning_comes_first_and_nothing_is_lost": [ReasonsAnywhere],
    "test_the_beginning_of_a_mark_is_not_lost": [think("LosesItsTail", finish=loses_what_it_holds)],
    "test_text_is_not_held_back": [
        think(
            "HoldsTheReasoning",
            _run=whole(lambda self, waiting: self.ended or any(isinstance(event, Content) for event in waiting)),
        )
    ],
    "test_reasoning_is_found": [KeepsTheBlanks],
    "test_cuts_make_no_difference": [think("ClosesInOnePiece", _overlap=lambda self, mark: 0)],
    "test_text_without_marks_is_unchanged": [AlwaysReasons],
}


def reasoning_suite(stream: type[ThinkStream]) -> ReasoningParserContract:
    class Parser(ThinkParser):
        def stream(self, prompt: str) -> ParserStream:
            return stream("<think>", "</think>", prompt.rstrip().endswith("<think>"))

    return suite(
        ReasoningParserContract,
        check_settings=QUICK,
        marks=("<think>", "</think>"),
        make=lambda self: Parser(ThinkConfig()),
        render=lambda self, reasoning, answer: ("Hi", f"<think>\n{reasoning}\n</think>\n\n{answer}"),
    )


@each(BROKEN_REASONING)
def test_the_suite_rejects_a_reasoning_parser(broken: type[ThinkStream], test: str) -> None:
    assert rejects(reasoning_suite(broken), test)


def test_the_unbroken_ones_pass() -> None:
    assert failures(tool_suite(HermesParser)) == {}
    assert failures(reasoning_suite(ThinkStream)) == {}
