"""/v1/responses, for text. Nothing is stored: each request carries its whole conversation."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from dovetail.core.engine.output import Delta
from dovetail.plugins.app.serve import output
from dovetail.plugins.app.serve.errors import FieldError
from dovetail.plugins.app.serve.schemas import Message, ResponsesRequest
from dovetail.plugins.app.serve.service import Job, Service, text_of
from dovetail.plugins.app.serve.transport import STREAMS, EventStream, event, json_response, while_connected


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/responses", responses=STREAMS)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        return await _Response(service, body, request).answer()

    return routes


class _Response:
    def __init__(self, service: Service, body: ResponsesRequest, request: Request) -> None:
        self.service, self.body, self.request = service, body, request
        self.id, self.message_id = output.new_id("resp"), output.new_id("msg")
        self.model = service.model(body.model)
        self.created = int(time.time())

    def _messages(self) -> list[Message]:
        body = self.body
        if body.previous_response_id is not None:
            raise FieldError("previous_response_id: nothing is stored here; send the conversation", "input")
        messages = []
        if body.instructions:
            messages.append(Message(role="system", content=body.instructions))
        if isinstance(body.input, str):
            messages.append(Message(role="user", content=body.input))
            return messages
        for item in body.input:
            if item.type != "message" or item.role is None:
                raise FieldError(f"input: an item of type {item.type!r}: this server reads messages alone", "input")
            messages.append(Message(role=item.role, content=text_of(item.content)))
        return messages

    async def answer(self) -> Response:
        body, service = self.body, self.service
        text = await service.render(self._messages(), add_generation_prompt=True)
        ids = await service.encode(text, special=False, param="input")
        params = service.params(body, max_tokens=body.max_output_tokens)
        jobs = service.submit(self.request, body, "responses", [ids], params)
        if body.stream:
            events = self._events(jobs)
            try:
                first = await while_connected(self.request, anext(events))
            except BaseException:
                output.close(jobs)
                raise
            return EventStream(first, events, lambda: output.close(jobs))
        try:
            (whole,) = await while_connected(self.request, output.collect(jobs, 1))
            return json_response(self._response(jobs, whole))
        finally:
            output.close(jobs)

    def _message(self, text: str, status: str) -> dict[str, Any]:
        content = [_part(text)] if status != "in_progress" else []
        return {"id": self.message_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _response(self, jobs: list[Job], whole: Delta | None) -> dict[str, Any]:
        """whole: the complete output; None while it runs."""
        body = self.body
        status = "in_progress"
        if whole is not None:
            status = "incomplete" if whole.finish_reason == "length" else "completed"
        used = output.usage(jobs)
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": [self._message(whole.text, status)] if whole is not None else [],
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None
            if whole is None
            else {
                "input_tokens": used["prompt_tokens"],
                "input_tokens_details": used["prompt_tokens_details"],
                "output_tokens": used["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": used["total_tokens"],
            },
        }

    async def _events(self, jobs: list[Job]) -> AsyncIterator[bytes]:
        count = 0

        def named(name: str, **fields: Any) -> bytes:
            nonlocal count
            count += 1
            return event({"type": name, "sequence_number": count - 1, **fields}, name)

        here = {"item_id": self.message_id, "output_index": 0, "content_index": 0}
        opening = [
            named("response.created", response=self._response(jobs, None)),
            named("response.in_progress", response=self._response(jobs, None)),
            named("response.output_item.added", output_index=0, item=self._message("", "in_progress")),
            named("response.content_part.added", **here, part=_part("")),
        ]
        parts: list[Delta] = []
        async for items in output.news(jobs, 1):
            piece = b"".join(opening)
            opening = []
            for _, delta in items:
                parts.append(delta)
                if delta.text:
                    piece += named("response.output_text.delta", **here, delta=delta.text, logprobs=[])
            yield piece
        whole = output.join(parts)
        response = self._response(jobs, whole)
        yield b"".join(
            [
                named("response.output_text.done", **here, text=whole.text, logprobs=[]),
                named("response.content_part.done", **here, part=_part(whole.text)),
                named("response.output_item.done", output_index=0, item=self._message(whole.text, response["status"])),
                named(f"response.{response['status']}", response=response),
            ]
        )


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
