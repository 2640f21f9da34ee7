"""Cases of single formats that the contract suites do not cover, and the building blocks of parsers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.core.compose import installed
from dovetail.core.interfaces import (
    Content,
    Reasoning,
    Tool,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from dovetail.core.json_scanner import JsonScanner
from dovetail.core.parsing import OutputStream, fitting
from dovetail.core.testing.parsers import run

TOOLS = (Tool("f"), Tool("g"))


def parser(kind: str, name: str, **options: Any) -> Any:
    registered = installed().get(kind, name)
    return registered.target()(registered.component.config(**options))


def call(index: int, name: str, arguments: str) -> list[object]:
    return [ToolCallBegin(index, name), ToolCallArguments(index, arguments), ToolCallEnd(index)]


F, G = call(0, "f", '{"a": 1}'), call(1, "g", "{}")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "hermes",
            'So:\n<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call> <tool_call>{"name": "g"}</tool_call>\nok',
            [Content("So:\n"), *F, *G, Content("\nok")],
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', F),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}', F),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, "no": 2}', [*F, Content(', "no": 2}')]),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": "a"}',
            [Content('<tool_call>{"name": "f", "arguments": "a"}')],
        ),
        ("hermes", '<tool_call>{"id": "7", "type": "function", "name": "f", "arguments": {"a": 1}}', F),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": 1]} x',
            [ToolCallBegin(0, "f"), ToolCallArguments(0, '{"a": 1'), ToolCallEnd(0), Content("]} x")],
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}', call(0, "f", '{"a": "x\\ny"}')),
        ("llama3", '\n{"name": "f", "arguments": {"a": 1}}\n{"name": "g"}\n', [*F, *G]),
        ("llama3", 'See {"name": "g", "parameters": {}}', [Content('See {"name": "g", "parameters": {}}')]),
        ("llama3", '<|python_tag|>print("g")', [Content('<|python_tag|>print("g")')]),
        ("llama3", '{"name": "f", "parameters": {"a": 1}}; {"name": "h"}', [*F, Content('; {"name": "h"}')]),
        ("mistral", 'Ok.[TOOL_CALLS]f[CALL_ID]x1[ARGS]{"a": 1}[TOOL_CALLS]g{}', [Content("Ok."), *F, *G]),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, 3]', [*F, Content(", 3]")]),
        ("mistral", "[TOOL_CALLS]h[ARGS]{}", [Content("[TOOL_CALLS]h[ARGS]{}")]),
    ],
)
def test_formats(name: str, text: str, expected: list[object]) -> None:
    for pieces in ([text], list(text)):
        assert run(parser("tool_parser", name).stream(TOOLS), pieces) == expected


def test_a_list_without_its_token_is_a_call_only_where_it_was_forced() -> None:
    text = '[{"name": "f", "arguments": {"a": 1}}]'
    mistral = parser("tool_parser", "mistral")
    assert run(mistral.stream(TOOLS, forced=True), list(text)) == F
    assert run(mistral.stream(TOOLS), list(text)) == [Content(text)]


def test_arguments_nested_deeper_than_python_recurses() -> None:
    arguments = '{"a":' * 20_000 + "1" + "}" * 20_000
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert run(parser("tool_parser", "hermes").stream(TOOLS), [text]) == call(0, "f", arguments)


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("", "<think>so", [Reasoning("so")]),
        ("<think>\n", "<think>\nso</think>yes", [Reasoning("so"), Content("yes")]),
        ("<think>\n\n</think>\n\n", "yes", [Content("yes")]),
        ("", "yes <think>no</think>", [Content("yes <think>no</think>")]),
        ("", "<think>\n\n</think>\n\nyes", [Content("yes")]),
    ],
)
def test_reasoning(prompt: str, text: str, expected: list[object]) -> None:
    for pieces in ([text], list(text)):
        assert run(parser("reasoning_parser", "think").stream(prompt), pieces) == expected


def test_marks_of_reasoning_are_options() -> None:
    think = parser("reasoning_parser", "think", open="[THINK]", close="[/THINK]", always=True)
    assert think.special == ("[THINK]", "[/THINK]")
    assert run(think.stream(""), list("so[/THINK]yes")) == [Reasoning("so"), Content("yes")]


def test_a_call_within_the_reasoning_is_reasoning() -> None:
    text = '<think>I could <tool_call>{"name": "g"}</tool_call></think><tool_call>{"name": "f"}</tool_call>'
    both = OutputStream(parser("reasoning_parser", "think").stream(""), parser("tool_parser", "hermes").stream(TOOLS))
    thought = Reasoning('I could <tool_call>{"name": "g"}</tool_call>')
    assert run(both, list(text)) == [thought, *call(0, "f", "{}")]


def test_the_parser_is_detected_from_the_template() -> None:
    parsers = {name: parser("tool_parser", name) for name in installed().options("tool_parser")}
    assert fitting(parsers, "{{ '<tool_call>' }}") == "hermes"
    assert fitting(parsers, "[TOOL_CALLS]") == "mistral"
    assert fitting(parsers, "<tool_call><function=") is None


def accepted(text: str) -> bool:
    scanner = JsonScanner()
    if not all(not scanner.done and scanner.feed(char) for char in text):
        return False
    if not scanner.done:
        scanner.feed("x")  # A number ends with the character after it.
    return scanner.done


def valid(text: str) -> bool:
    try:
        json.loads(text, strict=False, parse_constant=lambda name: 1 / 0)
    except (ValueError, ZeroDivisionError):
        return False
    return True


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(st.text(alphabet='{}[]",:\\u0a1-.eE+ \ntrfalsn', max_size=12).filter(lambda text: text == text.rstrip()))
def test_the_scanner_agrees_with_json(text: str) -> None:
    assert accepted(text) == valid(text)


@pytest.mark.parametrize(
    "text", ["01", "1.", "-", "1e", "tru", '"\\x"', '"\\u00g0"', "{,}", "[1,]", '{"a" 1}', "[}", ""]
)
def test_the_scanner_refuses(text: str) -> None:
    assert not accepted(text) and not valid(text)


@pytest.mark.parametrize(
    "text", ['{"a": [1, -0.5e+3, true, null, "\\u00e9\\n", {}], "b": {"c": []}}', "12", '"x"', "[[]]"]
)
def test_the_scanner_accepts(text: str) -> None:
    assert accepted(text) and valid(text)
