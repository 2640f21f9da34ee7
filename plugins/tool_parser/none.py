"""No tool calls: the text stays unchanged."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.core.interfaces import Content, ParserEvent, ParserStream, Tool, ToolParser


class NoToolParser(ToolParser):
    def fits(self, chat_template: str) -> bool:
        return False

    def stream(self, tools: Sequence[Tool], *, forced: bool = False) -> ParserStream:
        return Through()


class Through(ParserStream):
    def feed(self, text: str) -> list[ParserEvent]:
        return [Content(text)] if text else []

    def finish(self) -> list[ParserEvent]:
        return []
