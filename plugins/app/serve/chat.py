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
from dovetail.plugins.app.serve.reading import Choice, offered
from dovetail.plugins.app.serve.schemas import ChatRequest
from dovetail.plugins.app.serve.service import Job, Service
from dovetail.plugins.app.serve.transport import (
    DONE,
    STREAMS,
    Chunks,
    EventStream,
    event,
    json_response,
    while_connected,
)


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", responses=STREAMS)
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
        offered(body)

    async def answer(self) -> Response:
        self._check()
        body, service = self.body, self.service
        variables = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            variables["reasoning_effort"] = body.reasoning_effort
        # tool_choice=none: the model is not told of them either.
        tools = [] if body.tool_choice == "none" else [t.model_dump(exclude_none=True) for t in body.tools or ()]
        text = await service.render(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            tools=tools or None,
            **_free(variables),
        )
        self.reading = service.parsers.reading(body, service.template, text)
        # The template has written the special tokens itself.
        ids = await service.encode(text, special=False, param="messages")
        params = service.params(
            body,
            n=self.n,
            max_tokens=body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            grammar=self.reading.grammar(),
        )
        jobs = service.submit(self.request, body, "chat", [ids], params, keep=self.reading.special)
        if body.stream:
            chunks = self._chunks(jobs)
            try:
                first = await while_connected(self.request, anext(chunks))
            except BaseException:
                output.close(jobs)
                raise
            return EventStream(first, chunks, lambda: output.close(jobs))
        try:
            choices = await while_connected(self.request, output.collect(jobs, self.n))
            return json_response(self._whole(jobs, choices))
        finally:
            output.close(jobs)

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        return output.chat_logprobs(self.service.tokenizer, delta) if self.body.logprobs else None

    def _whole(self, jobs: list[Job], outputs: list[Delta]) -> dict[str, Any]:
        choices = []
        for index, delta in enumerate(outputs):
            choice = self.reading.choice()
            choice.take(delta.text, delta.finish_reason)
            choices.append(
                {
                    "index": index,
                    "message": choice.message(),
                    "logprobs": self._logprobs(delta),
                    "finish_reason": choice.reason(delta.finish_reason),
                }
            )
        return {**self.head, "object": "chat.completion", "choices": choices, "usage": output.usage(jobs)}

    async def _chunks(self, jobs: list[Job]) -> AsyncIterator[bytes]:
        options = self.body.stream_options
        every = options is not None and options.continuous_usage_stats
        head = {**self.head, "object": "chat.completion.chunk"}
        chunks = Chunks(head)

        def chunk(index: int, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None) -> bytes:
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
            return chunks.event(choice, output.usage(jobs) if every else None)

        begun: dict[int, Choice] = {}
        async for items in output.news(jobs, self.n):
            piece = b""
            for index, delta in items:
                if index not in begun:
                    begun[index] = self.reading.choice()
                    piece += chunk(index, {"role": "assistant", "content": ""})
                choice, logprobs = begun[index], self._logprobs(delta)
                for news in choice.take(delta.text, delta.finish_reason) or [{}]:
                    if news or logprobs is not None:
                        piece += chunk(index, news, logprobs)
                    logprobs = None
                if delta.finish_reason is not None:
                    piece += chunk(index, {}, None, choice.reason(delta.finish_reason))
            if piece:
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
