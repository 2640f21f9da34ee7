"""How outputs are read: tool calls and reasoning, by the parsers that request or model ask for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import (
    Content,
    Grammar,
    ParserEvent,
    ParserStream,
    ReasoningParser,
    Tool,
    ToolParser,
)
from dovetail.core.parsing import OutputStream, fitting
from dovetail.plugins.app.serve.config import ServeConfig
from dovetail.plugins.app.serve.errors import FieldError
from dovetail.plugins.app.serve.schemas import Conversing, Function

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

    def reading(self, body: Conversing, offer: Offer, template: str, prompt: str) -> Reading:
        """`prompt`: rendered by `template`. Raises FieldError for what cannot be read or forced."""
        tools, forced = offer.tools, offer.forced
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


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools that one request may call."""

    tools: tuple[Tool, ...] = ()
    forced: bool = False
    """It must call one."""


def offer(functions: Sequence[Function], forced: bool | str) -> Offer:
    """`forced`: one of them must be called; its name, where only one will do."""
    if not functions and forced:
        raise FieldError("tool_choice: there are no tools to choose from", "tool_choice")
    tools: dict[str, Tool] = {}
    for function in functions:
        if not _NAME.fullmatch(function.name):
            raise FieldError(f"tools: {function.name!r} is no name of a tool: letters, digits and _ . - alone", "tools")
        if function.name in tools:
            raise FieldError(f"tools: two are called {function.name}", "tools")
        tools[function.name] = Tool(function.name, function.description or "", function.parameters or {})
    if isinstance(forced, bool):
        return Offer(tuple(tools.values()), forced)
    if forced not in tools:
        raise FieldError(f"tool_choice: {forced!r} is none of the tools {', '.join(tools)}", "tool_choice")
    return Offer((tools[forced],), True)


_OWN = {
    *("self", "tools", "messages", "chat_template", "conversations"),
    *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"),
}


def template_variables(body: Conversing, functions: Sequence[Function], effort: str | None) -> dict[str, Any]:
    """What the chat template is given beside the messages."""
    variables = dict(body.chat_template_kwargs or {})
    if wrong := sorted(_OWN & variables.keys()):
        raise FieldError(f"chat_template_kwargs: {wrong[0]} cannot be set here", "chat_template_kwargs")
    if effort is not None:
        variables["reasoning_effort"] = effort
    described = [function.model_dump(exclude_none=True, exclude={"type"}) for function in functions]
    tools = [{"type": "function", "function": function} for function in described]
    return variables | {"tools": tools or None}


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

    def output(self) -> Output:
        """For one output."""
        streams: list[ParserStream] = []
        if self._reasoning_parser is not None:
            streams.append(self._reasoning_parser.stream(self._prompt))
        if self._tool_parser is not None:
            streams.append(self._tool_parser.stream(self._tools, forced=self._forced))
        return Output(OutputStream(*streams) if len(streams) == 2 else streams[0] if streams else None)


class Output:
    """One output on its way."""

    def __init__(self, stream: ParserStream | None) -> None:
        self._stream = stream

    def take(self, text: str, reason: str | None) -> list[ParserEvent]:
        """What this piece brings; `reason`: why the output ended with it."""
        if self._stream is None:
            return [Content(text)] if text else []
        events = self._stream.feed(text)
        if reason is not None:
            events += self._stream.finish()
        return events
