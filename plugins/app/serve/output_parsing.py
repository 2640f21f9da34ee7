"""Parsing of outputs for tool calls and reasoning, with the parsers chosen by the request or the model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from dovetail.core.chat_template import ChatTemplate
from dovetail.core.checkpoint import open_checkpoint
from dovetail.core.errors import ConfigError, RequestError
from dovetail.core.interfaces import Grammar, ParserEvent, ParserStream, ReasoningParser, Tool, ToolParser
from dovetail.core.parsing import OutputStream, Through, fitting
from dovetail.plugins.app.serve.config import ServeConfig
from dovetail.plugins.app.serve.errors import FieldError
from dovetail.plugins.app.serve.schemas import Conversing, Function

if TYPE_CHECKING:
    from dovetail.core.compose import Composition

AUTO, OFF = "auto", "none"
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
P = TypeVar("P", ToolParser, ReasoningParser)


class Parsers:
    """All installed parsers, built once."""

    def __init__(self, config: ServeConfig, composition: Composition) -> None:
        self._config = config
        self._tools: dict[str, ToolParser] = _build(composition, "tool_parser", config.tool_parser)
        self._reasoning: dict[str, ReasoningParser] = _build(composition, "reasoning_parser", config.reasoning_parser)

    def for_request(self, body: Conversing, offered: OfferedTools, template: str, prompt: str) -> OutputParsing:
        """Choose the parsers of a request, whose prompt was rendered by `template`. Raises FieldError if none fits."""
        tool_parser = reasoning_parser = None
        if offered.tools:
            asked = body.tool_parser or self._config.tool_parser
            tool_parser = _pick("tool_parser", self._tools, asked, template)
            if tool_parser is None:
                there_are = ", ".join(self._tools)
                raise FieldError(
                    "tools: no tool parser fits this model's chat template; choose the format of its tool calls with "
                    f"serve.tool_parser or with tool_parser in the request: {there_are}",
                    "tools",
                )
        elif body.tool_parser is not None:
            _pick("tool_parser", self._tools, body.tool_parser, template)
        # A forced call starts at the first token, so there is no reasoning.
        if not offered.forced:
            asked = body.reasoning_parser or self._config.reasoning_parser
            reasoning_parser = _pick("reasoning_parser", self._reasoning, asked, template)
        elif body.reasoning_parser is not None:
            _pick("reasoning_parser", self._reasoning, body.reasoning_parser, template)
        return OutputParsing(offered, tool_parser, reasoning_parser, body.parallel_tool_calls is not False, prompt)


def check_chosen(config: ServeConfig, composition: Composition) -> None:
    """Raise ConfigError for a parser that does not exist, or whose format the model's chat template lacks although it
    has that of another parser. Reads the model's folder alone."""
    for kind, chosen in (("tool_parser", config.tool_parser), ("reasoning_parser", config.reasoning_parser)):
        parsers = _build(composition, kind, chosen)
        if chosen in (AUTO, OFF) or (found := _chat_template(config, composition)) is None:
            continue
        where, template = found[0], found[1].chosen(kind == "tool_parser")
        other = fitting(parsers, template)
        if other is not None and not parsers[chosen].fits(template):
            raise ConfigError(
                f"serve.{kind}={chosen}: {where} has a chat template of the format {other}. Would work: "
                f"serve.{kind}={other} or {AUTO}, or another template with serve.chat_template=FILE"
            )


def _chat_template(config: ServeConfig, composition: Composition) -> tuple[str, ChatTemplate] | None:
    """Return (its file or folder, the template)."""
    if config.chat_template is not None:
        file = Path(config.chat_template).expanduser()
        template = ChatTemplate.load(None, file) if file.is_file() else None
        return None if template is None else (config.chat_template, template)
    path = getattr(composition.part("model").facts(), "checkpoint", None)
    template = None if path is None else ChatTemplate.load(open_checkpoint(path))
    return None if template is None else (path, template)


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
class OfferedTools:
    """Tools that one request may call."""

    tools: tuple[Tool, ...] = ()
    forced: bool = False
    """Whether the output must call one of them."""


def offered_tools(functions: Sequence[Function], forced: bool | str) -> OfferedTools:
    """Check the tools of a request. `forced`: whether one must be called, or the name of the one to call."""
    if not functions and forced:
        raise FieldError("tool_choice: there are no tools to choose from", "tool_choice")
    tools: dict[str, Tool] = {}
    for function in functions:
        if not _NAME.fullmatch(function.name):
            raise FieldError(f"tools: {function.name!r} is not a valid name: use letters, digits and _ . -", "tools")
        if function.name in tools:
            raise FieldError(f"tools: two have the name {function.name}", "tools")
        tools[function.name] = Tool(function.name, function.description or "", function.parameters or {})
    if isinstance(forced, bool):
        return OfferedTools(tuple(tools.values()), forced)
    if forced not in tools:
        raise FieldError(f"tool_choice: {forced!r} is not among the tools {', '.join(tools)}", "tool_choice")
    return OfferedTools((tools[forced],), True)


_RESERVED = {
    *("self", "tools", "messages", "chat_template", "conversations"),
    *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"),
}


def template_variables(body: Conversing, functions: Sequence[Function], effort: str | None) -> dict[str, Any]:
    """Return the variables of the chat template besides the messages."""
    variables = dict(body.chat_template_kwargs or {})
    if wrong := sorted(_RESERVED & variables.keys()):
        raise FieldError(f"chat_template_kwargs: {wrong[0]} cannot be set here", "chat_template_kwargs")
    if effort is not None:
        variables["reasoning_effort"] = effort
    described = [function.model_dump(exclude_none=True, exclude={"type"}) for function in functions]
    tools = [{"type": "function", "function": function} for function in described]
    return variables | {"tools": tools or None}


@dataclass(frozen=True, slots=True)
class OutputParsing:
    """Parsers of one request, and the grammar of a forced tool call."""

    offered: OfferedTools
    tool_parser: ToolParser | None
    reasoning_parser: ReasoningParser | None
    parallel: bool
    prompt: str

    @property
    def special(self) -> tuple[str, ...]:
        """Special tokens whose text must stay in the output."""
        return tuple(mark for parser in (self.tool_parser, self.reasoning_parser) if parser for mark in parser.special)

    def grammar(self) -> Grammar | None:
        """Return the grammar that forces a tool call; None if none is forced."""
        tools = self.offered.tools
        if not self.offered.forced:
            return None
        assert self.tool_parser is not None
        try:
            return self.tool_parser.grammar(tools, parallel=self.parallel and len(tools) > 1)
        except ValidationError as error:
            raise FieldError(f"tools: {error.errors()[0]['msg']}", "tools") from None
        except RequestError as error:
            raise FieldError(str(error), "tools", status=error.status) from None

    def output(self) -> ParsedOutput:
        """Return a parser for one output."""
        streams: list[ParserStream] = []
        if self.reasoning_parser is not None:
            streams.append(self.reasoning_parser.stream(self.prompt))
        if self.tool_parser is not None:
            streams.append(self.tool_parser.stream(self.offered.tools, forced=self.offered.forced))
        return ParsedOutput(OutputStream(*streams) if len(streams) == 2 else streams[0] if streams else Through())


class ParsedOutput:
    """Incremental parser of one output."""

    def __init__(self, stream: ParserStream) -> None:
        self._stream = stream

    def take(self, text: str, reason: str | None) -> list[ParserEvent]:
        """Parse a piece and return its events. `reason`: finish reason if this piece is the last."""
        events = self._stream.feed(text)
        if reason is not None:
            events += self._stream.finish()
        return events
