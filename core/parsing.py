"""Building blocks of tool and reasoning parsers: parsers of streamed text, as generators that wait for more of it."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TypeVar

from dovetail.core.errors import RequestError
from dovetail.core.interfaces.parsers import (
    Content,
    ParserEvent,
    ParserStream,
    ReasoningParser,
    Tool,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
    ToolParser,
)
from dovetail.core.json_scanner import JsonScanner

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Part of a parser: yields to wait for more text, returns a T."""


class Malformed(Exception):
    """The text does not match the expected format. Never leaves a stream."""


class TextStream(ParserStream):
    """Base class. Write `parse` top to bottom, as if the whole text were available:

            def parse(self):
                while (yield from self.until("<call>")):
                    yield from self.attempt(self.my_call, self.opening)

    `self.text[self.at:]` is the text not consumed yet.
    """

    def __init__(self) -> None:
        self.text, self.at, self.ended = "", 0, False
        self.opening = 0
        """Characters that the last `until` consumed without emitting them: the mark and white space before it."""
        self._events: list[ParserEvent] = []
        self._kept: int | None = None
        """Keep text from this index on, because it may still turn out to be content."""
        self._steps = self.parse()

    @abstractmethod
    def parse(self) -> Steps[None]:
        """Parse up to the end of the text. Text that is left when it returns is content."""

    def feed(self, text: str) -> list[ParserEvent]:
        kept = self.at if self._kept is None else self._kept
        self.text = self.text[kept:] + text
        self.at -= kept
        if self._kept is not None:
            self._kept = 0
        return self._run()

    def finish(self) -> list[ParserEvent]:
        self.ended = True
        return self._run()

    def _run(self) -> list[ParserEvent]:
        if next(self._steps, True):  # parse, which yields None, has returned
            self.emit(Content(self.text[self.at :]))
            self.at = len(self.text)
        events, self._events = self._events, []
        return events

    def emit(self, event: ParserEvent) -> None:
        """Emit an event, dropping empty text."""
        if getattr(event, "text", True):
            self._events.append(event)

    # Reading. A character is "" at the end of the text.

    def peek(self) -> Steps[str]:
        while self.at == len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.at]

    def blanks(self) -> Steps[str]:
        """Skip white space and return the next character without consuming it."""
        while (char := (yield from self.peek())) and char.isspace():
            self.at += 1
        return char

    def accept(self, mark: str) -> Steps[bool]:
        """Consume the mark if it comes next, and return whether it did."""
        while len(self.text) - self.at < len(mark) and mark.startswith(self.text[self.at :]):
            if self.ended:
                return False
            yield
        if not self.text.startswith(mark, self.at):
            return False
        self.at += len(mark)
        return True

    def expect(self, mark: str) -> Steps[None]:
        """Consume the mark, or raise Malformed."""
        if not (yield from self.accept(mark)):
            raise Malformed

    def until(
        self, mark: str, emit: Callable[[str], ParserEvent] = Content, *, trim: bool = False, drop: bool = False
    ) -> Steps[bool]:
        """Emit text up to the mark and consume the mark. Returns False if the text ends first. trim: omit white space
        before the mark. drop: omit the text if it is only white space up to the end."""
        seen = False
        while True:
            found = self.text.find(mark, self.at)
            cut = len(self.text) - self._overlap(mark) if found < 0 else found
            piece = self.text[self.at : cut]
            if trim or (not seen and piece.isspace()):
                piece = piece.rstrip()
            self.emit(emit(piece))
            seen = seen or bool(piece)
            if found >= 0:
                self.opening = found + len(mark) - (self.at + len(piece))
                self.at = found + len(mark)
                return True
            self.at += len(piece)
            if self.ended:
                rest = self.text[self.at :]
                self.emit(emit("" if drop and not seen and rest.isspace() else rest))
                self.at = len(self.text)
                return False
            yield

    def _overlap(self, mark: str) -> int:
        """Length of the longest suffix of the text that is a prefix of the mark."""
        longest = min(len(mark) - 1, len(self.text) - self.at)
        return next((n for n in range(longest, 0, -1) if self.text.endswith(mark[:n])), 0)

    def closing(self, *marks: str) -> Steps[None]:
        """Consume white space and one of the marks, or at the end of the text a part of them; otherwise consume
        nothing."""
        yield from self.attempt(lambda: self._closing(marks))

    def _closing(self, marks: tuple[str, ...]) -> Steps[None]:
        yield from self.blanks()
        for mark in marks:
            if (yield from self.accept(mark)):
                return
        if not (self.ended and any(mark.startswith(self.text[self.at :]) for mark in marks)):
            raise Malformed
        self.at = len(self.text)

    def attempt(
        self, part: Callable[[], Steps[None]], opening: int = 0, emit: Callable[[str], ParserEvent] = Content
    ) -> Steps[bool]:
        """Run a part that may raise Malformed. In that case return to the start of the part and emit the preceding
        `opening` characters, as content by default."""
        self.keep(opening)
        try:
            yield from part()
        except Malformed:
            self.rewind()
            self.at += opening
            self.emit(emit(self.text[self.at - opening : self.at]))
            return False
        finally:
            self._kept = None
        return True

    def keep(self, back: int = 0) -> None:
        """Allow `rewind` to this position, or to `back` characters before it."""
        self._kept = self.at - back

    def rewind(self) -> None:
        assert self._kept is not None
        self.at = self._kept

    # JSON.

    def json_value(self, sink: Callable[[str], None]) -> Steps[None]:
        """Consume one JSON value and pass its text to `sink` in pieces as they arrive. Control characters in strings,
        which models write although JSON forbids them, are escaped."""
        scanner, taken = JsonScanner(), list[str]()
        while True:
            if self.at == len(self.text):
                sink("".join(taken))
                taken.clear()
            char = yield from self.peek()
            fits = scanner.feed(char)
            if fits:
                self.at += 1
                taken.append(json.dumps(char)[1:-1] if char < " " and scanner.in_string else char)
            if scanner.done or not fits:
                sink("".join(taken))
                if not scanner.done:
                    raise Malformed
                return

    def json_string(self) -> Steps[str]:
        if (yield from self.peek()) != '"':
            raise Malformed
        parts: list[str] = []
        yield from self.json_value(parts.append)
        return str(json.loads("".join(parts)))


class CallStream(TextStream):
    """Calls as JSON: `{"name": "f", "arguments": {...}}`, or "parameters"; "id" and "type" are ignored. Run `call`
    through `attempt` in `parse`."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__()
        self._names = {tool.name for tool in tools}
        self._index = -1

    def begin(self, name: str) -> None:
        """Emit the begin of a call. From here on the attempt cannot fail."""
        self._kept = None
        self._index += 1
        self.emit(ToolCallBegin(self._index, name))

    def offered(self, name: str) -> str:
        if name not in self._names:
            raise Malformed
        return name

    def arguments(self) -> Steps[bool]:
        """Emit the arguments of the open call. If they break off, end the call and return False."""
        try:
            yield from self.json_value(self._more)
        except Malformed:
            self.end()
            return False
        return True

    def _more(self, text: str) -> None:
        self.emit(ToolCallArguments(self._index, text))

    def end(self) -> None:
        self.emit(ToolCallEnd(self._index))

    def call(self) -> Steps[None]:
        """Parse one call object. Raises Malformed if it is not one or if it names a tool that is not offered."""
        name: str | None = None
        early: list[str] | None = None
        """Arguments that precede the name."""
        begun = False
        yield from self._pass("{")
        try:
            while True:
                yield from self.blanks()
                key = yield from self.json_string()
                yield from self._pass(":")
                char = yield from self.blanks()
                if key == "name":
                    if name is not None:
                        raise Malformed
                    name = self.offered((yield from self.json_string()))
                    if early is not None:
                        self.begin(name)
                        begun = True
                        self._more("".join(early))
                        self.keep()
                elif key in ("arguments", "parameters"):
                    if begun or early is not None or char != "{":
                        raise Malformed
                    if name is None:
                        early = []
                        yield from self.json_value(early.append)
                    else:
                        self.begin(name)
                        begun = True
                        if not (yield from self.arguments()):
                            return
                        self.keep()
                elif key in ("id", "type") and char == '"':
                    yield from self.json_string()
                else:
                    raise Malformed
                if (yield from self.blanks()) == "}":
                    self.at += 1
                    break
                yield from self._pass(",")
            if name is None:
                raise Malformed
        except Malformed:
            if not begun:
                raise
            # Text after the arguments is content, unless only the closing brace is missing at the end of the text.
            self.rewind()
            if self.ended and not self.text[self.at :].strip():
                self.at = len(self.text)
        if not begun:
            assert name is not None
            self.begin(name)
            self._more("{}")
        self._kept = None
        self.end()

    def _pass(self, char: str) -> Steps[None]:
        yield from self.blanks()
        yield from self.expect(char)


def call_rules(tools: Sequence[Tool], arguments: str = "arguments") -> str:
    """Rules of a Lark grammar (llguidance's dialect) in which `call` is one object that CallStream parses."""
    heads = [json.dumps(f'{{"name": {json.dumps(tool.name)}, "{arguments}": ') for tool in tools]
    calls = [f'{head} arguments_{i} "}}"' for i, head in enumerate(heads)]
    return f"call: {' | '.join(calls)}\n{argument_rules(tools)}"


def argument_rules(tools: Sequence[Tool]) -> str:
    """Rules `arguments_0`, `arguments_1` and so on: the argument objects of each tool."""
    rules = []
    for i, tool in enumerate(tools):
        if tool.parameters.get("type", "object") != "object":
            kind = tool.parameters["type"]
            raise RequestError(f"tool {tool.name}: its parameters are of type {kind!r}; arguments must be an object")
        rules.append(f"arguments_{i}: %json {json.dumps({'type': 'object', **tool.parameters})}\n")
    return "".join(rules)


class Through(ParserStream):
    """Passes the text on unchanged."""

    def feed(self, text: str) -> list[ParserEvent]:
        return [Content(text)] if text else []

    def finish(self) -> list[ParserEvent]:
        return []


class OutputStream(ParserStream):
    """Chains the reasoning parser and the tool parser of one output."""

    def __init__(self, reasoning: ParserStream, tools: ParserStream) -> None:
        self._reasoning, self._tools = reasoning, tools

    def feed(self, text: str) -> list[ParserEvent]:
        return self._pass_on(self._reasoning.feed(text))

    def finish(self) -> list[ParserEvent]:
        return [*self._pass_on(self._reasoning.finish()), *self._tools.finish()]

    def _pass_on(self, events: Sequence[ParserEvent]) -> list[ParserEvent]:
        out: list[ParserEvent] = []
        for event in events:
            out += self._tools.feed(event.text) if isinstance(event, Content) else [event]
        return out


P = TypeVar("P", ToolParser, ReasoningParser)


def fitting(parsers: Mapping[str, P], chat_template: str) -> str | None:
    """Name of the first parser that fits the template; None if no parser does."""
    return next((name for name, parser in parsers.items() if parser.fits(chat_template)), None)
