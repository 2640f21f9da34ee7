"""Tool calls and reasoning through the official client.

A regular expression forces the bundled model to write what a trained one would.
"""

from __future__ import annotations

import json

import openai
import pytest

from .conftest import wrote

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["Oslo", "Rome"]}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}
STOP = {
    "type": "function",
    "function": {"name": "stop", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}


@pytest.fixture
def client(conversing):
    return conversing.client()


ASK = dict(model="tiny", messages=[{"role": "user", "content": "Weather?"}], tools=[WEATHER, STOP], max_tokens=200)


def streamed(chunks) -> tuple[str, str, list[dict], list[str]]:
    """Return content, reasoning, calls and finish reasons, merged from the stream as a client does."""
    content = reasoning = ""
    calls: list[dict] = []
    reasons = []
    for choice in (chunk.choices[0] for chunk in chunks):
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            if call.index == len(calls):
                assert call.id and call.type == "function"
                calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
            calls[call.index]["arguments"] += call.function.arguments
        reasons += [choice.finish_reason] if choice.finish_reason else []
    return content, reasoning, calls, reasons


CALL = '{"name": "get_weather", "arguments": {"place": "Rome"}}'
TEXT = f"<think>\nRome?\n</think>\n\nLet me see.\n<tool_call>\n{CALL}\n</tool_call>"
ARRAY = {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}


def test_a_call_that_the_model_chose(client):
    message = client.chat.completions.create(**ASK, extra_body=wrote(TEXT)).choices[0]
    assert message.finish_reason == "tool_calls"
    assert message.message.content == "Let me see.\n" and message.message.reasoning_content == "Rome?"
    (call,) = message.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"place": "Rome"}')
    content, reasoning, calls, reasons = streamed(
        client.chat.completions.create(**ASK, stream=True, extra_body=wrote(TEXT))
    )
    assert (content, reasoning, reasons) == ("Let me see.\n", "Rome?", ["tool_calls"])
    assert [(c["name"], c["arguments"]) for c in calls] == [("get_weather", '{"place": "Rome"}')]


def test_channels_of_harmony(client):
    call = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"place": "Rome"}<|call|>'
    text = f"<|channel|>analysis<|message|>Rome?<|end|><|start|>assistant{call}"
    body = wrote(text) | {"tool_parser": "harmony", "reasoning_parser": "harmony"}
    stream = client.chat.completions.create(**ASK, stream=True, extra_body=body)
    content, reasoning, (made,), reasons = streamed(stream)
    assert (content, reasoning, reasons) == ("", "Rome?", ["tool_calls"])
    assert (made["name"], made["arguments"]) == ("get_weather", '{"place": "Rome"}')


@pytest.mark.parametrize("parser", ["hermes", "llama3", "mistral"])
def test_a_call_that_is_forced(client, parser):
    for seed in range(3):
        ask = dict(**ASK, seed=seed, tool_choice="required", parallel_tool_calls=False)
        whole = client.chat.completions.create(**ask, extra_body={"tool_parser": parser}).choices[0]
        content, _, calls, reasons = streamed(
            client.chat.completions.create(**ask, stream=True, extra_body={"tool_parser": parser})
        )
        (call,) = whole.message.tool_calls
        assert whole.message.content is None and content == ""
        assert [(c["name"], c["arguments"]) for c in calls] == [(call.function.name, call.function.arguments)]
        assert reasons == [whole.finish_reason] == ["tool_calls"]
        arguments = json.loads(call.function.arguments)
        assert arguments == {} if call.function.name == "stop" else arguments["place"] in ("Oslo", "Rome")


def test_a_named_tool(client):
    named = {"type": "function", "function": {"name": "stop"}}
    (choice,) = client.chat.completions.create(**ASK, tool_choice=named).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["stop"]


def test_none_means_that_there_are_no_tools(client):
    ask = dict(**ASK, tool_choice="none", extra_body=wrote(TEXT) | {"reasoning_parser": "none"})
    answer = client.chat.completions.create(**ask)
    assert answer.choices[0].message.content == TEXT and answer.choices[0].message.tool_calls is None
    told = client.chat.completions.create(**ASK, extra_body=wrote("x")).usage.prompt_tokens
    assert answer.usage.prompt_tokens < told, "the template is given tools that may not be called"


def test_a_call_cut_short_ends_by_length(client):
    ask = ASK | {"max_tokens": 60}
    text = TEXT.partition("</think>\n\n")[2].replace("Rome", "Rome" * 100)
    content, _, calls, reasons = streamed(client.chat.completions.create(**ask, stream=True, extra_body=wrote(text)))
    assert reasons == ["length"] and calls[0]["arguments"].startswith('{"place": "Rome')


def test_a_conversation_with_calls_goes_on(client):
    call = {"id": "abc123xyz", "type": "function", "function": {"name": "stop", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Stop."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abc123xyz", "content": "done"},
    ]
    answer = client.chat.completions.create(**ASK | {"messages": messages}, extra_body=wrote("Good."))
    assert answer.choices[0].message.content == "Good." and answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "not among the tools get_weather, stop"),
        ({"tools": [STOP, STOP]}, "two have the name stop"),
        ({"tools": [], "tool_choice": "required"}, "no tools to choose from"),
        ({"extra_body": {"tool_parser": "hermess"}}, "there are auto, harmony, hermes"),
        ({"tools": [], "extra_body": {"tool_parser": "hermess"}}, "there are auto, harmony, hermes"),
        ({"extra_body": {"reasoning_parser": "thinks"}}, "there are auto, harmony, none, think"),
        ({"tool_choice": "required", "extra_body": {"tool_parser": "none"}}, "cannot force a tool call"),
        ({"tool_choice": "required", "extra_body": {"regex": "x"}}, "already constrains the output"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "not a valid name"),
        ({"tool_choice": "required", "tools": [ARRAY]}, "arguments must be an object"),
    ],
)
def test_mistakes_are_reported(client, changes, says):
    with pytest.raises(openai.BadRequestError, match=says) as refused:
        client.chat.completions.create(**ASK | changes)
    assert refused.value.param in ("tools", "tool_choice", "tool_parser", "reasoning_parser")
