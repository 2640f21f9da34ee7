"""/v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from dovetail.core.engine.output import Delta
from dovetail.plugins.app.serve import output
from dovetail.plugins.app.serve.errors import FieldError
from dovetail.plugins.app.serve.schemas import ChatRequest
from dovetail.plugins.app.serve.service import Job, Service
from dovetail.plugins.app.serve.transport import DONE, EventStream, after, event, json_response, while_connected


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await _Chat(service, body, request).answer()

    return routes


class _Chat:
    def __init__(self, service: Service, body: ChatRequest, request: Request) -> None:
        self.service, self.body, self.request = service, body, request
        self.n = body.n or 1
        self.head = {
            "id": output.new_id("chatcmpl"),
            "created": int(time.time()),
            "model": service.model(body.model),
        }

    def _check(self) -> None:
        body = self.body
        if body.top_logprobs and not body.logprobs:
            raise FieldError("top_logprobs goes with logprobs=true alone", "top_logprobs")
        if body.stream_options is not None and not body.stream:
            raise FieldError("stream_options goes with stream=true alone", "stream_options")
        if body.tool_choice not in (None, "none", "auto") and not body.tools:
            raise FieldError("tool_choice: there are no tools to choose from", "tool_choice")
        if body.tools and body.tool_choice != "none":
            raise FieldError("tools: this version finds no tool calls in the model's text", "tools")

    async def answer(self) -> Response:
        self._check()
        body, service = self.body, self.service
        variables = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            variables["reasoning_effort"] = body.reasoning_effort
        text = await service.render(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            **_free(variables),
        )
        # The template has written the special tokens itself.
        ids = await service.encode(text, special=False, param="messages")
        params = service.params(
            body,
            n=self.n,
            max_tokens=body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
        jobs = service.submit(self.request, body, "chat", [ids], params)
        if body.stream:
            chunks = self._chunks(jobs)
            try:
                first = await while_connected(self.request, anext(chunks))
            except BaseException:
                output.close(jobs)
                raise
            return EventStream(after(first, chunks), lambda: output.close(jobs))
        try:
            choices = await while_connected(self.request, output.collect(jobs, self.n))
            return json_response(self._whole(jobs, choices))
        finally:
            output.close(jobs)

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        return output.chat_logprobs(self.service.tokenizer, delta) if self.body.logprobs else None

    def _whole(self, jobs: list[Job], outputs: list[Delta]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": delta.text, "refusal": None},
                "logprobs": self._logprobs(delta),
                "finish_reason": delta.finish_reason,
            }
            for index, delta in enumerate(outputs)
        ]
        return {**self.head, "object": "chat.completion", "choices": choices, "usage": output.usage(jobs)}

    async def _chunks(self, jobs: list[Job]) -> AsyncIterator[bytes]:
        options = self.body.stream_options
        every = options is not None and options.continuous_usage_stats
        head = {**self.head, "object": "chat.completion.chunk"}

        def chunk(index: int, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None) -> bytes:
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
            whole = {**head, "choices": [choice]}
            if every:
                whole["usage"] = output.usage(jobs)
            return event(whole)

        begun: set[int] = set()
        async for items in output.news(jobs, self.n):
            piece = b""
            for index, delta in items:
                if index not in begun:
                    begun.add(index)
                    piece += chunk(index, {"role": "assistant", "content": ""})
                content = {"content": delta.text} if delta.text or delta.finish_reason is None else {}
                piece += chunk(index, content, self._logprobs(delta), delta.finish_reason)
            yield piece
        tail = b""
        if options is not None and options.include_usage:
            tail = event({**head, "choices": [], "usage": output.usage(jobs)})
        yield tail + DONE


_TAKEN = {"tools", "add_generation_prompt", "continue_final_message", "messages", "chat_template", "conversations"}


def _free(variables: dict[str, Any]) -> dict[str, Any]:
    if wrong := sorted(_TAKEN & variables.keys()):
        raise FieldError(f"chat_template_kwargs: {wrong[0]} has a field of its own", "chat_template_kwargs")
    return variables
