"""Calls as messages to `functions.<name>`: OpenAI's Harmony format, of gpt-oss."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.core.harmony import CALL, CHANNEL, END, OPEN, RETURN, SPECIAL, read_header
from dovetail.core.interfaces import ParserStream, Tool, ToolParser
from dovetail.core.parsing import CallStream, Malformed, Steps

NAMESPACE = "functions."


class HarmonyToolParser(ToolParser):
    """A call cannot be forced: its marks are special tokens, which a grammar over text cannot produce."""

    special = SPECIAL

    def fits(self, chat_template: str) -> bool:
        return CHANNEL in chat_template

    def stream(self, tools: Sequence[Tool], *, forced: bool = False) -> ParserStream:
        return HarmonyCallStream(tools)


class HarmonyCallStream(CallStream):
    def parse(self) -> Steps[None]:
        found = False
        while (yield from self.until(OPEN, drop=found)):
            found = yield from self.attempt(self._message, self.opening)

    def _message(self) -> Steps[None]:
        header = yield from read_header(self)
        if not header.recipient.startswith(NAMESPACE):
            raise Malformed
        name = self.offered(header.recipient.removeprefix(NAMESPACE))
        if (yield from self.blanks()) != "{":
            raise Malformed
        self.begin(name)
        if (yield from self.arguments()):
            self.end()
            # The format has <|call|> here; models also end a call as any other message.
            yield from self.closing(CALL, END, RETURN)
