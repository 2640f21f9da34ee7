"""Contract suites for the built-in parsers."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from dovetail.core.interfaces import ReasoningParser, ToolParser
from dovetail.core.testing.parsers import Call, ReasoningParserContract, ToolParserContract
from dovetail.plugins.reasoning_parser.config import HarmonyConfig as HarmonyReasoningConfig
from dovetail.plugins.reasoning_parser.config import NoneConfig as NoReasoningConfig
from dovetail.plugins.reasoning_parser.config import ThinkConfig
from dovetail.plugins.reasoning_parser.harmony import HarmonyReasoningParser
from dovetail.plugins.reasoning_parser.none import NoReasoningParser
from dovetail.plugins.reasoning_parser.think import ThinkParser
from dovetail.plugins.tool_parser.config import HarmonyConfig, HermesConfig, Llama3Config, MistralConfig, NoneConfig
from dovetail.plugins.tool_parser.harmony import HarmonyToolParser
from dovetail.plugins.tool_parser.hermes import HermesParser
from dovetail.plugins.tool_parser.llama3 import Llama3Parser
from dovetail.plugins.tool_parser.mistral import MistralParser
from dovetail.plugins.tool_parser.none import NoToolParser


def as_json(call: Call, arguments: str = "arguments") -> str:
    return json.dumps({"name": call.name, arguments: call.arguments})


class TestHermes(ToolParserContract):
    marks = ("<tool_call>", "</tool_call>", "<tool", '"arguments": {')
    template = "{{ '<tool_call>' }}"

    def make(self) -> ToolParser:
        return HermesParser(HermesConfig())

    def render(self, calls: Sequence[Call]) -> str:
        return "\n".join(f"<tool_call>\n{as_json(call)}\n</tool_call>" for call in calls)


class TestLlama3(ToolParserContract):
    marks = ("<|python_tag|>", "<|python", '"parameters": {')
    template = '<|start_header_id|> {"name": function name, "parameters": dictionary}'

    def make(self) -> ToolParser:
        return Llama3Parser(Llama3Config())

    def render(self, calls: Sequence[Call]) -> str:
        return "; ".join(as_json(call, "parameters") for call in calls)


@pytest.mark.nightly
class TestLlama3WithTag(TestLlama3):
    def render(self, calls: Sequence[Call]) -> str:
        return "<|python_tag|>" + super().render(calls)


class TestMistral(ToolParserContract):
    marks = ("[TOOL_CALLS]", "[TOOL", "[ARGS]", "[CALL_ID]", '"arguments": {')
    template = "[TOOL_CALLS]"

    def make(self) -> ToolParser:
        return MistralParser(MistralConfig())

    def render(self, calls: Sequence[Call]) -> str:
        return f"[TOOL_CALLS] [{', '.join(map(as_json, calls))}]"


@pytest.mark.nightly
class TestMistralByName(TestMistral):
    def render(self, calls: Sequence[Call]) -> str:
        return "".join(f"[TOOL_CALLS]{call.name}[ARGS]{json.dumps(call.arguments)}" for call in calls)


class TestHarmony(ToolParserContract):
    marks = (
        "<|start|>assistant",
        "<|channel|>",
        "<|message|>",
        "<|end|>",
        "<|call|>",
        " to=functions.stop",
        "commentary",
    )
    template = "{{ '<|channel|>analysis<|message|>' }}"

    def make(self) -> ToolParser:
        return HarmonyToolParser(HarmonyConfig())

    def render(self, calls: Sequence[Call]) -> str:
        head = "<|channel|>commentary to=functions."
        return "<|start|>assistant".join(
            f"{head}{name} <|constrain|>json<|message|>{json.dumps(arguments)}<|call|>" for name, arguments in calls
        )


@pytest.mark.nightly
class TestHarmonyToolInTheRole(TestHarmony):
    def render(self, calls: Sequence[Call]) -> str:
        head = "<|start|>assistant to=functions."
        return "".join(
            f"{head}{name}<|channel|>commentary json<|message|>{json.dumps(arguments)}<|call|>"
            for name, arguments in calls
        )


class TestNone(ToolParserContract):
    finds_calls = False
    marks = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")

    def make(self) -> ToolParser:
        return NoToolParser(NoneConfig())


class TestThink(ReasoningParserContract):
    marks = ("<think>", "</think>", "<thi", "</")
    template = "{{ content.split('</think>')[-1] }}"

    def make(self) -> ReasoningParser:
        return ThinkParser(ThinkConfig())

    def render(self, reasoning: str, answer: str) -> tuple[str, str]:
        return "Hi", f"<think>\n{reasoning}\n</think>\n\n{answer}"


@pytest.mark.nightly
class TestThinkOpenedByThePrompt(TestThink):
    def render(self, reasoning: str, answer: str) -> tuple[str, str]:
        return "Hi<think>\n", f"{reasoning}\n</think>\n\n{answer}"


class TestHarmonyReasoning(ReasoningParserContract):
    alternates = True
    marks = (
        *("<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|end|>", "<|call|>", "<|start|>assistant"),
        "<|channel|>commentary to=functions.stop<|message|>",
    )
    template = "{{ '<|channel|>analysis<|message|>' }}"

    def make(self) -> ReasoningParser:
        return HarmonyReasoningParser(HarmonyReasoningConfig())

    def render(self, reasoning: str, answer: str) -> tuple[str, str]:
        text = f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant<|channel|>final<|message|>{answer}"
        return "Hi<|start|>assistant", f"{text}<|return|>"


class TestNoReasoning(ReasoningParserContract):
    finds_reasoning = False
    marks = ("<think>", "</think>")

    def make(self) -> ReasoningParser:
        return NoReasoningParser(NoReasoningConfig())
