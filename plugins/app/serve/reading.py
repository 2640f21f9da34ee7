"""How the outputs of a chat are read: tool calls and reasoning, by the parsers that request or model ask for."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import (
    Content,
    Grammar,
    ParserEvent,
    ParserStream,
    Reasoning,
    ReasoningParser,
    Tool,
    ToolCallArguments,
    ToolCallBegin,
    ToolParser,
)
from dovetail.core.parsing import OutputStream, fitting
from dovetail.plugins.app.serve.config import ServeConfig
from dovetail.plugins.app.serve.errors import FieldError
from dovetail.plugins.app.serve.schemas import ChatRequest, NamedTool

if TYPE_CHECKING:
    from dovetail.core.compose import Composition

AUTO = "auto"
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
P = TypeVar("P", ToolParser, ReasoningParser)


class Parsers:
    """Every parser that is installed, built once."""

    def __init__(self, config: ServeConfig, composition: Composition) -> None:
        self._config = config
        self._tools: dict[str, ToolParser] = _build(composition, "tool_parser", config.tool_parser)
        self._reasoning: dict[str, ReasoningParser] = _build(composition, "reasoning_parser", config.reasoning_parser)

    def reading(self, body: ChatRequest, template: str, prompt: str) -> Reading:
        """`prompt`: rendered by `template`. Raises FieldError for what cannot be read or forced."""
        tools = offered(body)
        forced = body.tool_choice not in (None, "none", "auto")
        tool_parser = reasoning_parser = None
        if tools:
            asked = body.tool_parser or self._config.tool_parser
            tool_parser = _pick("tool_parser", self._tools, asked, template)
            if tool_parser is None:
                there_are = ", ".join(self._tools)
                raise FieldError(
                    "tools: no tool parser fits this model's chat template; name the format that the model writes as "
                    f"serve.tool_parser or in the request as tool_parser: {there_are}",
                    "tools",
                )
        # What is held to a call from its first token on has no reasoning.
        if not forced:
            asked = body.reasoning_parser or self._config.reasoning_parser
            reasoning_parser = _pick("reasoning_parser", self._reasoning, asked, template)
        elif body.reasoning_parser is not None:
            _pick("reasoning_parser", self._reasoning, body.reasoning_parser, template)
        return Reading(tools, tool_parser, reasoning_parser, forced, body.parallel_tool_calls is not False, prompt)


def _build(composition: Composition, kind: str, chosen: str) -> dict[str, Any]:
    parts = composition.many(kind)
    if chosen not in (AUTO, *parts):
        raise ConfigError(f"serve.{kind}={chosen}: no such {kind}. Options: {AUTO}, {', '.join(parts)}.")
    return {name: part.build() for name, part in parts.items()}


def _pick(kind: str, parsers: Mapping[str, P], asked: str, template: str) -> P | None:
    name = fitting(parsers, template) if asked == AUTO else asked
    if name is not None and name not in parsers:
        raise FieldError(f"{kind}: {name!r} is not installed; there are {AUTO}, {', '.join(parsers)}", kind)
    return None if name is None else parsers[name]


def offered(body: ChatRequest) -> tuple[Tool, ...]:
    """The tools that this request may call."""
    if not body.tools or body.tool_choice == "none":
        if isinstance(body.tool_choice, NamedTool) or body.tool_choice == "required":
            raise FieldError("tool_choice: there are no tools to choose from", "tool_choice")
        return ()
    tools: dict[str, Tool] = {}
    for function in (tool.function for tool in body.tools):
        if not _NAME.fullmatch(function.name):
            raise FieldError(f"tools: {function.name!r} is no name of a tool: letters, digits and _ . - alone", "tools")
        if function.name in tools:
            raise FieldError(f"tools: two are called {function.name}", "tools")
        tools[function.name] = Tool(function.name, function.description or "", function.parameters or {})
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        if name not in tools:
            raise FieldError(f"tool_choice: {name!r} is none of the tools {', '.join(tools)}", "tool_choice")
        return (tools[name],)
    return tuple(tools.values())


class Reading:
    """Of one request."""

    def __init__(
        self,
        tools: Sequence[Tool],
        tool_parser: ToolParser | None,
        reasoning_parser: ReasoningParser | None,
        forced: bool,
        parallel: bool,
        prompt: str,
    ) -> None:
        self._tools, self._tool_parser, self._reasoning_parser = tools, tool_parser, reasoning_parser
        self._forced, self._parallel, self._prompt = forced, parallel, prompt
        self.special = tuple(mark for parser in (tool_parser, reasoning_parser) if parser for mark in parser.special)
        """Special tokens whose text must stay in the output."""

    def grammar(self) -> Grammar | None:
        """What the output is held to, where the request must call a tool."""
        if not self._forced:
            return None
        assert self._tool_parser is not None
        parallel = self._parallel and len(self._tools) > 1
        try:
            return self._tool_parser.grammar(self._tools, parallel=parallel)
        except ValidationError as error:
            raise FieldError(f"tools: {error.errors()[0]['msg']}", "tools") from None

    def choice(self) -> Choice:
        """For one output."""
        streams: list[ParserStream] = []
        if self._reasoning_parser is not None:
            streams.append(self._reasoning_parser.stream(self._prompt))
        if self._tool_parser is not None:
            streams.append(self._tool_parser.stream(self._tools, forced=self._forced))
        return Choice(OutputStream(*streams) if len(streams) == 2 else streams[0] if streams else None)


class Choice:
    """One output as a message, and as the deltas that make it up."""

    def __init__(self, stream: ParserStream | None) -> None:
        self._stream = stream
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def take(self, text: str, reason: str | None) -> list[dict[str, Any]]:
        """What this piece adds; `reason`: why the output ended with it."""
        if self._stream is None:
            events: list[ParserEvent] = [Content(text)] if text else []
        else:
            events = self._stream.feed(text)
            if reason is not None:
                events += self._stream.finish()
        return [delta for event in events if (delta := self._delta(event))]

    def _delta(self, event: ParserEvent) -> dict[str, Any]:
        match event:
            case Content():
                self._content.append(event.text)
                return {"content": event.text}
            case Reasoning():
                self._reasoning.append(event.text)
                return {"reasoning_content": event.text}
            case ToolCallBegin():
                # Nine letters and digits: some models' templates accept no other form.
                head = {"id": uuid.uuid4().hex[:9], "type": "function"}
                self._calls.append({**head, "function": {"name": event.name, "arguments": ""}})
                return {
                    "tool_calls": [{"index": event.index, **head, "function": {"name": event.name, "arguments": ""}}]
                }
            case ToolCallArguments():
                self._calls[event.index]["function"]["arguments"] += event.text
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
            message["tool_calls"] = self._calls
        return message
