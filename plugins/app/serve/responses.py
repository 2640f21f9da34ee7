"""/v1/responses, stateless: every request carries the whole conversation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from dovetail.core.frontend.outputs import Delta
from dovetail.plugins.app.serve import exchange, output
from dovetail.plugins.app.serve.errors import FieldError, body_of
from dovetail.plugins.app.serve.output_parsing import offered_tools, template_variables
from dovetail.plugins.app.serve.response_items import OutputItems, messages_of
from dovetail.plugins.app.serve.schemas import Message, NamedFunctionTool, ResponsesRequest
from dovetail.plugins.app.serve.service import Job, Service
from dovetail.plugins.app.serve.transport import STREAMS, event


def install(app: FastAPI, service: Service) -> None:
    @app.post("/v1/responses", responses=STREAMS)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        return await _Response(service, body, request).answer()


class _Response(output.Generation[ResponsesRequest]):
    def __init__(self, service: Service, body: ResponsesRequest, request: Request) -> None:
        super().__init__(service, body, request, "resp")
        choice = body.tool_choice
        self.tools = [] if choice == "none" else list(body.tools or ())
        self.offered = offered_tools(
            self.tools, choice.name if isinstance(choice, NamedFunctionTool) else choice == "required"
        )

    def _messages(self) -> list[Message]:
        body = self.body
        if body.previous_response_id is not None:
            raise FieldError(
                "previous_response_id: responses are not stored; send the whole conversation", "previous_response_id"
            )
        messages = [Message(role="system", content=body.instructions)] if body.instructions else []
        if isinstance(body.input, str):
            return [*messages, Message(role="user", content=body.input)]
        return messages + messages_of(body.input)

    async def answer(self) -> Response:
        body, service = self.body, self.service
        effort = body.reasoning.effort if body.reasoning is not None else None
        async with self.limit:
            variables = template_variables(body, self.tools, effort)
            text = await service.text.render(self._messages(), variables, param="input")
            self.parsing = service.parsers.for_request(body, self.offered, service.text.template(self.tools), text)
            ids = await service.text.encode(text, special=False, param="input")
        params = service.params(body, max_tokens=body.max_output_tokens, grammar=self.parsing.grammar())
        jobs = service.submit(self.request, body, "responses", [ids], params, self.limit, keep=self.parsing.special)
        return await self.reply(jobs)

    def whole(self, jobs: list[Job], outputs: list[Delta]) -> dict[str, Any]:
        (whole,) = outputs
        items, status = OutputItems(), _status(whole)
        for parsed in self.parsing.output().take(whole.text, whole.finish_reason):
            for _ in items.take(parsed):
                pass
        for _ in items.finish(status):
            pass
        return self._response(jobs, status, items)

    def _response(self, jobs: list[Job], status: str, items: OutputItems | None = None) -> dict[str, Any]:
        """Build the response object. `items`: the complete output; None while it is generated."""
        body = self.body
        stated = body.model_dump(
            by_alias=True, exclude_unset=True, include={"tools", "tool_choice", "text", "reasoning"}
        )
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": [] if items is None else items.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None} | (stated.get("reasoning") or {}),
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}} | (stated.get("text") or {}),
            "tool_choice": stated.get("tool_choice") or "auto",
            "tools": [{"parameters": None, "strict": None, **tool} for tool in stated.get("tools") or ()],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None if items is None else self._usage(jobs, items.reasoning),
        }

    def _usage(self, jobs: list[Job], reasoning: str) -> dict[str, Any]:
        used = output.usage(jobs)
        # Parsers work on text, so the reasoning has to be tokenized again.
        tokens = len(self.service.text.tokenizer.encode(reasoning, special=False)) if reasoning else 0
        return {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": used["prompt_tokens_details"],
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": min(tokens, used["completion_tokens"])},
            "total_tokens": used["total_tokens"],
        }

    async def chunks(self, jobs: list[Job]) -> AsyncIterator[bytes]:
        count = 0

        def numbered(kind: str, fields: dict[str, Any]) -> bytes:
            nonlocal count
            count += 1
            return event({"type": kind, "sequence_number": count - 1, **fields}, kind)

        running = {"response": self._response(jobs, "in_progress")}
        opening = numbered("response.created", running) + numbered("response.in_progress", running)
        items, read, status = OutputItems(), self.parsing.output(), "completed"
        try:
            async for batch in output.choice_deltas(jobs, 1):
                piece, opening = opening, b""
                for _, delta in batch:
                    for parsed in read.take(delta.text, delta.finish_reason):
                        for name, fields in items.take(parsed):
                            piece += numbered(f"response.{name}", fields)
                    status = _status(delta)
                if piece:
                    yield piece
        except Exception as error:
            if opening:
                raise  # Nothing was sent yet, so the error gets its own status.
            exchange.of(self.request.scope).status, body, _ = body_of(error)
            wrong = body["error"]
            # Clients of all endpoints detect a failed stream by the field `error`, so the event has it too.
            yield numbered("error", {name: wrong[name] for name in ("code", "message", "param")} | {"error": wrong})
            return
        piece = b"".join(numbered(f"response.{name}", fields) for name, fields in items.finish(status))
        yield piece + numbered(f"response.{status}", {"response": self._response(jobs, status, items)})


def _status(delta: Delta) -> str:
    return "incomplete" if delta.finish_reason == "length" else "completed"
