"""No tool calls: the text stays unchanged."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.core.interfaces import ParserStream, Tool, ToolParser
from dovetail.core.parsing import Through


class NoToolParser(ToolParser):
    def fits(self, chat_template: str) -> bool:
        return False

    def stream(self, tools: Sequence[Tool], *, forced: bool = False) -> ParserStream:
        return Through()
