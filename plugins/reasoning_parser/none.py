"""No reasoning: the text stays unchanged."""

from __future__ import annotations

from dovetail.core.interfaces import Content, ParserEvent, ParserStream, ReasoningParser


class NoReasoningParser(ReasoningParser):
    def fits(self, chat_template: str) -> bool:
        return False

    def stream(self, prompt: str) -> ParserStream:
        return Through()


class Through(ParserStream):
    def feed(self, text: str) -> list[ParserEvent]:
        return [Content(text)] if text else []

    def finish(self) -> list[ParserEvent]:
        return []
