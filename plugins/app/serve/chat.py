"""/v1/chat/completions."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from dovetail.core.frontend.outputs import Delta
from dovetail.core.interfaces import Content, ParserEvent, Reasoning, ToolCallArguments, ToolCallBegin
from dovetail.plugins.app.serve import output
from dovetail.plugins.app.serve.errors import FieldError
from dovetail.plugins.app.serve.output_parsing import OutputParsing, offered_tools, template_variables
from dovetail.plugins.app.serve.schemas import ChatRequest, NamedTool
from dovetail.plugins.app.serve.service import Job, Service
from dovetail.plugins.app.serve.transport import STREAMS


def install(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", responses=STREAMS)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await _Chat(service, body, request).answer()


class _Chat(output.Generation[ChatRequest]):
    def __init__(self, service: Service, body: ChatRequest, request: Request) -> None:
        super().__init__(service, body, request, "chatcmpl")
        self.n = body.n or 1
        if body.top_logprobs and not body.logprobs:
            raise FieldError("top_logprobs needs logprobs=true", "top_logprobs")
        choice = body.tool_choice
        # none: the prompt does not list the tools either.
        self.functions = [] if choice == "none" else [tool.function for tool in body.tools or ()]
        forced = choice.function.name if isinstance(choice, NamedTool) else choice == "required"
        self.offered = offered_tools(self.functions, forced)

    async def answer(self) -> Response:
        body, service = self.body, self.service
        variables = template_variables(body, self.functions, body.reasoning_effort)
        variables["add_generation_prompt"] = body.add_generation_prompt
        variables["continue_final_message"] = body.continue_final_message
        async with self.limit:
            text = await service.text.render(body.messages, variables)
            self.parsing = service.parsers.for_request(body, self.offered, service.text.template(self.functions), text)
            # The template already writes the special tokens.
            ids = await service.text.encode(text, special=False, param="messages")
            predicted = await self._predicted()
        params = service.params(
            body,
            n=self.n,
            max_tokens=body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            grammar=self.parsing.grammar(),
            prediction=predicted,
        )
        jobs = service.submit(self.request, body, "chat", [ids], params, self.limit, keep=self.parsing.special)
        return await self.reply(jobs, self.n)

    async def _predicted(self) -> tuple[int, ...] | None:
        """Return the tokens of the predicted output; None = the request has none."""
        if self.body.prediction is None:
            return None
        content = self.body.prediction.content
        if not isinstance(content, str):
            if wrong := [part.type for part in content if part.type != "text" or part.text is None]:
                raise FieldError(
                    f"prediction: a part of type {wrong[0]!r} has no text; only text is supported", "prediction"
                )
            content = "".join(part.text or "" for part in content)
        if not content:
            return None
        return tuple(await self.service.text.encode(content, special=False, param="prediction"))

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        return output.chat_logprobs(self.service.text.tokenizer, delta) if self.body.logprobs else None

    def whole(self, jobs: list[Job], outputs: list[Delta]) -> dict[str, Any]:
        choices = []
        for index, delta in enumerate(outputs):
            choice = _Choice(self.parsing)
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

    async def chunks(self, jobs: list[Job]) -> AsyncIterator[bytes]:
        chunks = output.Chunks({**self.head, "object": "chat.completion.chunk"}, jobs, self.body.stream_options)

        def chunk(index: int, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None) -> bytes:
            return chunks.event({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason})

        begun: dict[int, _Choice] = {}
        async for items in output.choice_deltas(jobs, self.n):
            piece = b""
            for index, delta in items:
                if index not in begun:
                    begun[index] = _Choice(self.parsing)
                    piece += chunk(index, {"role": "assistant", "content": ""})
                choice, logprobs = begun[index], self._logprobs(delta)
                for part in choice.take(delta.text, delta.finish_reason) or [{}]:
                    if part or logprobs is not None:
                        piece += chunk(index, part, logprobs)
                    logprobs = None
                if delta.finish_reason is not None:
                    piece += chunk(index, {}, None, choice.reason(delta.finish_reason))
            if piece:
                yield piece
        yield chunks.end()


class _Choice:
    """One choice: builds the complete message, and the deltas of a stream."""

    def __init__(self, parsing: OutputParsing) -> None:
        self._output = parsing.output()
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[dict[str, Any], list[str]]] = []
        """(tool call without its arguments, pieces of the arguments)"""

    def take(self, text: str, reason: str | None) -> list[dict[str, Any]]:
        """Add a piece of output and return its deltas. `reason`: finish reason if this piece is the last."""
        return [delta for event in self._output.take(text, reason) if (delta := self._delta(event))]

    def _delta(self, event: ParserEvent) -> dict[str, Any]:
        match event:
            case Content():
                self._content.append(event.text)
                return {"content": event.text}
            case Reasoning():
                self._reasoning.append(event.text)
                return {"reasoning_content": event.text}
            case ToolCallBegin():
                # Nine alphanumeric characters: the templates of some models accept no other form.
                call = {"id": uuid.uuid4().hex[:9], "type": "function", "function": {"name": event.name}}
                self._calls.append((call, []))
                return {"tool_calls": [{"index": event.index, **_with_arguments(call, "")}]}
            case ToolCallArguments():
                self._calls[event.index][1].append(event.text)
                return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
        return {}

    def reason(self, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self._calls else reason

    def message(self) -> dict[str, Any]:
        content = "".join(self._content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if self._calls and not content else content,
            "refusal": None,
        }
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = [_with_arguments(call, "".join(arguments)) for call, arguments in self._calls]
        return message


def _with_arguments(call: dict[str, Any], arguments: str) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "arguments": arguments}}
