"""Items of /v1/responses: conversion of input items to chat messages, and of the output to items and events."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from dovetail.core.interfaces import Content, ParserEvent, Reasoning, ToolCallArguments, ToolCallBegin, ToolCallEnd
from dovetail.plugins.app.serve.errors import FieldError
from dovetail.plugins.app.serve.schemas import FunctionCall, Message, ResponseItem, ToolCall
from dovetail.plugins.app.serve.text import text_of

Event = tuple[str, dict[str, Any]]
"""(name without the prefix `response.`, fields)"""


def messages_of(items: Sequence[ResponseItem]) -> list[Message]:
    """Convert items to messages. Consecutive reasoning, message and calls, in this order, form one assistant turn."""
    messages: list[Message] = []
    names: dict[str, str] = {}
    """call_id -> tool name, for the calls seen so far."""
    for item in items:
        kind = _kind(item)
        if kind == "function_call_output":
            if item.call_id not in names:
                raise FieldError(
                    f"input: no function_call before this output has the call_id {item.call_id!r}", "input"
                )
            content = text_of(item.output, "input")
            messages.append(Message(role="tool", tool_call_id=item.call_id, name=names[item.call_id], content=content))
        elif kind == "message" and item.role != "assistant":
            if item.content is None:
                raise FieldError(f"input: a message of the role {item.role} needs content", "input")
            messages.append(Message(role=item.role, content=text_of(item.content, "input")))
        else:
            if not messages or not _goes_on(messages[-1], kind):
                messages.append(Message(role="assistant"))
            turn = messages[-1]
            if kind == "reasoning":
                turn.reasoning_content = text_of(item.content, "input")
            elif kind == "message":
                turn.content = text_of(item.content, "input")
            else:
                call = ToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments))
                turn.tool_calls = [*(turn.tool_calls or ()), call]
                names[call.id] = call.function.name
    return messages


def _goes_on(turn: Message, kind: str) -> bool:
    if turn.role != "assistant" or (turn.tool_calls and kind != "function_call"):
        return False
    return kind == "function_call" or (turn.content is None and (kind == "message" or turn.reasoning_content is None))


_NEEDS = {
    "message": ("role",),
    "reasoning": (),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}


def _kind(item: ResponseItem) -> str:
    if item.type not in _NEEDS:
        there_are = ", ".join(_NEEDS)
        raise FieldError(f"input: an item of type {item.type!r}; this server supports {there_are}", "input")
    if missing := [name for name in _NEEDS[item.type] if getattr(item, name) is None]:
        raise FieldError(f"input: an item of type {item.type} needs {missing[0]}", "input")
    return item.type


class OutputItems:
    """Items of one output, and the events of a stream that build them. At most one item is open at a time."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._pieces: list[str] = []
        """Pieces of the text or arguments of the open item."""
        self._open = False

    def take(self, event: ParserEvent) -> Iterator[Event]:
        match event:
            case Reasoning():
                yield from self._text("reasoning", event.text)
            case Content():
                yield from self._text("message", event.text)
            case ToolCallBegin():
                yield from self._begin(
                    "function_call", "fc", call_id=f"call_{uuid.uuid4().hex}", name=event.name, arguments=""
                )
            case ToolCallArguments():
                self._pieces.append(event.text)
                yield "function_call_arguments.delta", {**self._place(), "delta": event.text}
            case ToolCallEnd():
                yield from self._end("completed")

    def finish(self, status: str) -> Iterator[Event]:
        """Close the open item with `status`, "completed" or "incomplete". An empty output gets one empty message."""
        if not self.items:
            yield from self._text("message", "")
        yield from self._end(status)

    def _text(self, kind: str, text: str) -> Iterator[Event]:
        if not self._open or self.items[-1]["type"] != kind:
            if kind == "message":
                yield from self._begin(kind, "msg", role="assistant", content=[])
            else:
                yield from self._begin(kind, "rs", summary=[], content=[], encrypted_content=None)
            yield "content_part.added", {**self._place(), "content_index": 0, "part": self._part("")}
        if text:
            self._pieces.append(text)
            fields = {**self._place(), "content_index": 0, "delta": text}
            yield (f"{_TEXT[kind]}.delta", fields | {"logprobs": []} if kind == "message" else fields)

    def _begin(self, kind: str, prefix: str, **fields: Any) -> Iterator[Event]:
        yield from self._end("completed")
        self.items.append({"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **fields})
        self._open, self._pieces = True, []
        yield "output_item.added", {"output_index": len(self.items) - 1, "item": dict(self.items[-1])}

    def _end(self, status: str) -> Iterator[Event]:
        if not self._open:
            return
        self._open = False
        item, whole = self.items[-1], "".join(self._pieces)
        kind = item["type"]
        item["status"] = status
        if kind == "function_call":
            item["arguments"] = whole
            yield "function_call_arguments.done", {**self._place(), "name": item["name"], "arguments": whole}
        else:
            part = self._part(whole)
            item["content"] = [part]
            fields = {**self._place(), "content_index": 0, "text": whole}
            yield f"{_TEXT[kind]}.done", fields | {"logprobs": []} if kind == "message" else fields
            yield "content_part.done", {**self._place(), "content_index": 0, "part": part}
        yield "output_item.done", {"output_index": len(self.items) - 1, "item": dict(item)}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _part(self, text: str) -> dict[str, Any]:
        if self.items[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    @property
    def reasoning(self) -> str:
        return "".join(part["text"] for item in self.items if item["type"] == "reasoning" for part in item["content"])


_TEXT = {"message": "output_text", "reasoning": "reasoning_text"}
