"""Conversion of /v1/responses items to messages."""

from __future__ import annotations

from dovetail.plugins.app.serve.response_items import messages_of
from dovetail.plugins.app.serve.schemas import ResponseItem


def item(**fields) -> ResponseItem:
    return ResponseItem.model_validate(fields)


def call(id: str) -> ResponseItem:
    return item(type="function_call", call_id=id, name=f"tool_{id}", arguments="{}")


def answer(id: str) -> ResponseItem:
    return item(type="function_call_output", call_id=id, output=[{"type": "input_text", "text": "done"}])


def think(text: str) -> ResponseItem:
    return item(type="reasoning", id="rs_1", summary=[], content=[{"type": "reasoning_text", "text": text}])


def write(text: str) -> ResponseItem:
    return item(type="message", role="assistant", content=[{"type": "output_text", "text": text, "annotations": []}])


def test_an_assistant_s_turn_is_one_message():
    found = messages_of(
        [
            *(item(role="user", content="hi"), think("hm"), write("wait"), call("a"), call("b")),
            *(answer("b"), answer("a"), think("so"), write("one"), write("two"), call("c"), think("late")),
        ]
    )
    short = [
        (m.role, m.reasoning_content, m.content, [c.id for c in m.tool_calls or ()], m.tool_call_id, m.name)
        for m in found
    ]
    assert short == [
        ("user", None, "hi", [], None, None),
        ("assistant", "hm", "wait", ["a", "b"], None, None),
        ("tool", None, "done", [], "b", "tool_b"),
        ("tool", None, "done", [], "a", "tool_a"),
        ("assistant", "so", "one", [], None, None),
        ("assistant", None, "two", ["c"], None, None),
        ("assistant", "late", None, [], None, None),
    ]
