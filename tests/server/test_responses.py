"""/v1/responses through the official client: tools, reasoning, and the events of a stream."""

from __future__ import annotations

import json

import openai
import pytest

from .conftest import wrote

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"place": {"enum": ["Oslo", "Rome"]}},
        "required": ["place"],
        "additionalProperties": False,
    },
    "strict": True,
}
STOP = {
    "type": "function",
    "name": "stop",
    "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
}
ASK = dict(model="tiny", input="Weather?", tools=[WEATHER, STOP], max_output_tokens=200, store=False)
CALL = '{"name": "get_weather", "arguments": {"place": "Rome"}}'
TEXT = f"<think>\nRome?\n</think>\n\nLet me see.\n<tool_call>\n{CALL}\n</tool_call>"


@pytest.fixture
def client(conversing):
    return conversing.client()


def plain(items) -> list[dict]:
    """Return items without their ids, which differ between answers."""
    return [{k: v for k, v in item.model_dump().items() if k not in ("id", "call_id")} for item in items]


def test_items_of_an_answer_and_the_events_that_build_them(client):
    whole = client.responses.create(**ASK, extra_body=wrote(TEXT))
    reasoning, message, call = whole.output
    assert (whole.status, whole.store, whole.tool_choice) == ("completed", False, "auto")
    assert [tool.name for tool in whole.tools] == ["get_weather", "stop"] and whole.tools[0].strict
    assert reasoning.content[0].text == "Rome?" and message.content[0].text == whole.output_text == "Let me see.\n"
    assert (call.name, json.loads(call.arguments), call.status) == ("get_weather", {"place": "Rome"}, "completed")
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens

    events = list(client.responses.create(**ASK, stream=True, extra_body=wrote(TEXT)))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    text = ["output_item.added", "content_part.added", "*", "content_part.done", "output_item.done"]
    assert [name for i, name in enumerate(names) if name != names[i - 1]] == [
        *("created", "in_progress"),
        *(text[:2] + ["reasoning_text.delta", "reasoning_text.done"] + text[3:]),
        *(text[:2] + ["output_text.delta", "output_text.done"] + text[3:]),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    # The client knows the class of every event, and every event refers to the open item.
    opened = [event for event in events if event.type == "response.output_item.added"]
    assert [event.output_index for event in opened] == [0, 1, 2]
    for event in events:
        if hasattr(event, "item_id"):
            assert event.item_id == opened[event.output_index].item.id
    for kind, index in (("reasoning_text", 0), ("output_text", 1), ("function_call_arguments", 2)):
        joined = "".join(event.delta for event in events if event.type == f"response.{kind}.delta")
        (done,) = (event for event in events if event.type == f"response.{kind}.done")
        assert joined == (done.arguments if index == 2 else done.text) and done.output_index == index
    finished = [event.item for event in events if event.type == "response.output_item.done"]
    assert finished == events[-1].response.output and plain(finished) == plain(whole.output)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "stop"}])
def test_a_call_that_is_forced(client, choice):
    ask = ASK | {"tool_choice": choice, "parallel_tool_calls": False, "temperature": 0}
    whole = client.responses.create(**ask)
    (call,) = whole.output
    assert (
        call.type == "function_call"
        and call.name in ("get_weather", "stop")
        and isinstance(json.loads(call.arguments), dict)
    )
    if choice != "required":
        assert call.name == "stop" and whole.tool_choice.name == "stop"
    final = list(client.responses.create(**ask, stream=True))[-1].response
    assert plain(final.output) == plain(whole.output)


def test_an_answer_may_be_sent_back(client):
    first = client.responses.create(**ASK, extra_body=wrote(TEXT))
    call = first.output[-1]
    items = [{"role": "user", "content": "Weather?"}, *(item.model_dump() for item in first.output)]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
    again = client.responses.create(
        **ASK | {"input": items}, include=["reasoning.encrypted_content"], extra_body=wrote("Rain.")
    )
    assert again.output_text == "Rain." and again.usage.input_tokens > first.usage.input_tokens


def test_cut_short(client):
    answer = client.responses.create(
        **ASK | {"max_output_tokens": 20}, extra_body=wrote(TEXT.replace("Rome", "Rome" * 50))
    )
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[-1].status == "incomplete"


def test_form_reasoning_and_instructions(client):
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    answer = client.responses.create(
        model="tiny",
        input="x",
        instructions="Be short.",
        reasoning={"effort": "low"},
        text={"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}},
        extra_body={"reasoning_parser": "none"},
    )
    assert json.loads(answer.output_text) == {"a": 1}
    assert answer.instructions == "Be short." and answer.reasoning.effort == "low" and answer.text.format.name == "a"


def test_a_stream_that_fails_ends_with_an_error(client):
    ask = ASK | {"max_output_tokens": 1500}
    with pytest.raises(openai.APIError, match="not complete after"):
        for event in client.responses.create(**ask, stream=True, extra_body={"ignore_eos": True, "timeout": 0.5}):
            last = event
    assert last.type.endswith("delta")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"previous_response_id": "resp_1"}, "responses are not stored"),
        ({"store": True}, "store"),
        ({"tool_choice": {"type": "function", "name": "fly"}}, "not among the tools get_weather, stop"),
        ({"tools": [], "tool_choice": "required"}, "no tools to choose from"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "of type 'item_reference'"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "has the call_id 'c'"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "stop"}]}, "needs arguments"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input_image"),
        ({"tool_choice": "required", "extra_body": {"regex": "x"}}, "already constrains the output"),
        ({"background": True}, "background"),
    ],
)
def test_mistakes_are_reported(client, changes, says):
    with pytest.raises(openai.BadRequestError, match=says):
        client.responses.create(**ASK | changes)
