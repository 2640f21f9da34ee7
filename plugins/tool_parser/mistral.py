"""Calls after a control token: a JSON list (tokenizers v1 to v7), or name and arguments (v11 and later)."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.core.interfaces import Grammar, ParserStream, Tool, ToolParser
from dovetail.core.parsing import CallStream, Malformed, Steps, call_rules

CALLS, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralParser(ToolParser):
    special = (CALLS, ARGUMENTS, CALL_ID)

    def fits(self, chat_template: str) -> bool:
        return CALLS in chat_template

    def stream(self, tools: Sequence[Tool], *, forced: bool = False) -> ParserStream:
        return MistralStream(tools, forced)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool = True) -> Grammar:
        """Describe only the list: the control token is not text, so a grammar over text cannot produce it."""
        more = ' (", " call)*' if parallel else ""
        return Grammar(kind="lark", value=f'start: "[" call{more} "]"\n{call_rules(tools)}')


class MistralStream(CallStream):
    def __init__(self, tools: Sequence[Tool], forced: bool) -> None:
        super().__init__(tools)
        self._forced = forced

    def parse(self) -> Steps[None]:
        found = False
        if self._forced:
            found = yield from self.attempt(self._calls)
        while (yield from self.until(CALLS, drop=found)):
            found = yield from self.attempt(self._calls, self.opening)

    def _calls(self) -> Steps[None]:
        if (yield from self.blanks()) != "[":
            yield from self._named()
            return
        self.at += 1
        yield from self.call()
        while (yield from self.attempt(self._next_call)):
            pass
        yield from self.closing("]")

    def _next_call(self) -> Steps[None]:
        if (yield from self.blanks()) != ",":
            raise Malformed
        self.at += 1
        yield from self.call()

    def _named(self) -> Steps[None]:
        name = self.offered((yield from self._word()))
        if (yield from self.accept(CALL_ID)):
            yield from self._word()
        yield from self.accept(ARGUMENTS)
        if (yield from self.blanks()) != "{":
            raise Malformed
        self.begin(name)
        if (yield from self.arguments()):
            self.end()

    def _word(self) -> Steps[str]:
        word = ""
        while (char := (yield from self.peek())) and (char.isalnum() or char in "_-."):
            word += char
            self.at += 1
        return word
