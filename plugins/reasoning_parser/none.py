"""No reasoning: the text stays unchanged."""

from __future__ import annotations

from dovetail.core.interfaces import ParserStream, ReasoningParser
from dovetail.core.parsing import Through


class NoReasoningParser(ReasoningParser):
    def fits(self, chat_template: str) -> bool:
        return False

    def stream(self, prompt: str) -> ParserStream:
        return Through()
