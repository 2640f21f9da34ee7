"""Whole outputs of gpt-oss through both Harmony parsers, character by character."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.core.interfaces import (
    Content,
    ParserEvent,
    Reasoning,
    Tool,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from dovetail.core.parsing import OutputStream
from dovetail.core.testing.parsers import cuts, joined, run
from dovetail.plugins.reasoning_parser.config import HarmonyConfig as ReasoningConfig
from dovetail.plugins.reasoning_parser.harmony import HarmonyReasoningParser
from dovetail.plugins.tool_parser.config import HarmonyConfig
from dovetail.plugins.tool_parser.harmony import HarmonyToolParser

ANALYSIS = "<|channel|>analysis<|message|>Look it up.<|end|>"
PREAMBLE = "<|start|>assistant<|channel|>commentary<|message|>One moment.<|end|>"
CALL = (
    '<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"place": "Oslo"}<|call|>'
)
FINAL = "<|start|>assistant<|channel|>final<|message|>Rain <|a|>.<|return|>"
CALLED = [ToolCallBegin(0, "weather"), ToolCallArguments(0, '{"place": "Oslo"}'), ToolCallEnd(0)]
REASONED = Reasoning("Look it up.")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ANALYSIS + FINAL, [REASONED, Content("Rain <|a|>.")]),
        (ANALYSIS + CALL, [REASONED, *CALLED]),
        (ANALYSIS + PREAMBLE + CALL, [REASONED, Content("One moment."), *CALLED]),
        (PREAMBLE + "<|start|>assistant" + ANALYSIS + CALL, [Content("One moment."), REASONED, *CALLED]),
        # The output ends within the call, or its last token is not in the text.
        (ANALYSIS + CALL.removesuffix("<|call|>"), [REASONED, *CALLED]),
        (CALL[: CALL.index("Oslo")], [CALLED[0], ToolCallArguments(0, '{"place": "'), ToolCallEnd(0)]),
        # Models state other types, and end calls as other messages.
        (CALL.replace("<|constrain|>json", "code"), CALLED),
        (CALL.replace("<|call|>", "<|end|>") + FINAL, [*CALLED, Content("Rain <|a|>.")]),
        (CALL.replace("<|call|>", "<|return|>"), CALLED),
        # A header with other words is content, or these would be lost.
        (CALL.replace("<|constrain|>json", "jso"), [Content(CALL.replace("<|constrain|>json", "jso")[:-8])]),
        (CALL.replace("nt<|channel", "nt to=a<|channel"), [Content("<|start|>assistant to=a"), *CALLED]),
        # Calls of tools that are not offered, and of those of OpenAI's own, are content.
        (CALL.replace("weather", "stop"), [Content(CALL.replace("weather", "stop"))]),
        (CALL.replace("functions.weather", "python"), [Content(CALL.replace("functions.weather", "python"))]),
    ],
)
def test_outputs(text, expected):
    for pieces in ([text], list(text)):
        reasoning = HarmonyReasoningParser(ReasoningConfig()).stream("Hi<|start|>assistant")
        stream = OutputStream(reasoning, HarmonyToolParser(HarmonyConfig()).stream([Tool("weather")]))
        assert run(stream, pieces) == expected


def test_the_prompt_may_open_the_reasoning():
    stream = HarmonyReasoningParser(ReasoningConfig()).stream("<|start|>assistant<|channel|>analysis<|message|>")
    assert run(stream, ["Look it up.<|end|>", FINAL]) == [REASONED, Content("Rain <|a|>.")]


TEXTS = st.text(st.sampled_from('ab <|>{}\n"é😀'), min_size=1, max_size=8).filter(
    lambda text: text.strip() and "<|" not in text
)
VALUES = st.dictionaries(TEXTS, TEXTS | st.integers(0, 9), max_size=2)
MESSAGES = st.one_of(
    st.tuples(st.just("analysis"), TEXTS),
    st.tuples(st.just("commentary"), TEXTS),
    st.tuples(st.sampled_from(["weather", "stop"]), VALUES),
    st.tuples(st.sampled_from(["in the role", "without a type"]), VALUES),
)


def written(kind: str, value: object) -> str:
    """Return a message as gpt-oss writes it, without the <|start|> that comes before all but the first."""
    if kind in ("analysis", "commentary", "final"):
        return f"assistant<|channel|>{kind}<|message|>{value}{'<|return|>' if kind == 'final' else '<|end|>'}"
    text = f"<|message|>{json.dumps(value)}<|call|>"
    if kind == "in the role":
        return f"assistant to=functions.weather<|channel|>commentary <|constrain|>json{text}"
    if kind == "without a type":
        return f"assistant<|channel|>commentary to=functions.weather{text}"
    return f"assistant<|channel|>commentary to=functions.{kind} <|constrain|>json{text}"


def of_kinds(events: list[ParserEvent], kinds: tuple[type, ...]) -> list[ParserEvent]:
    return joined([event for event in events if isinstance(event, kinds)])


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_random_messages_cut_anywhere(data: st.DataObject) -> None:
    """Reasoning, text to the user and several calls in any order, then a final answer; all in pieces."""
    messages = [*data.draw(st.lists(MESSAGES, max_size=5)), ("final", data.draw(TEXTS))]
    expected: list[ParserEvent] = []
    calls = 0
    for kind, value in messages:
        if kind == "analysis":
            expected.append(Reasoning(str(value)))
        elif kind in ("commentary", "final"):
            expected.append(Content(str(value)))
        else:
            name = kind if kind == "stop" else "weather"
            expected += [ToolCallBegin(calls, name), ToolCallArguments(calls, json.dumps(value)), ToolCallEnd(calls)]
            calls += 1
    text = "<|start|>".join(written(*message) for message in messages).removeprefix("assistant")
    # A call in the role begins before the first channel, which only a prompt without <|start|>assistant leaves open.
    if messages[0][0] == "in the role":
        text = f"<|start|>assistant{text}"
    reasoning = HarmonyReasoningParser(ReasoningConfig()).stream("Hi<|start|>assistant")
    tools = HarmonyToolParser(HarmonyConfig()).stream([Tool("weather"), Tool("stop")])
    found = run(OutputStream(reasoning, tools), data.draw(cuts(text)))
    # Content that may begin a mark is held back, while reasoning passes it.
    for kinds in ((Reasoning,), (Content, ToolCallBegin, ToolCallArguments, ToolCallEnd)):
        assert of_kinds(found, kinds) == of_kinds(expected, kinds)
