"""Whole outputs of gpt-oss through both Harmony parsers, character by character."""

from __future__ import annotations

import pytest

from dovetail.core.interfaces import Content, Reasoning, Tool, ToolCallArguments, ToolCallBegin, ToolCallEnd
from dovetail.core.parsing import OutputStream
from dovetail.core.testing.parsers import run
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
