"""Reasoning between tags, at the beginning of the output."""

from __future__ import annotations

from dovetail.core.interfaces import ParserStream, Reasoning, ReasoningParser
from dovetail.core.parsing import Steps, TextStream
from dovetail.plugins.reasoning_parser.config import ThinkConfig


class ThinkParser(ReasoningParser):
    config: ThinkConfig

    def __init__(self, config: ThinkConfig) -> None:
        super().__init__(config)
        self.special = (config.open, config.close)

    def fits(self, chat_template: str) -> bool:
        return self.config.close in chat_template

    def stream(self, prompt: str) -> ParserStream:
        opened = self.config.always or prompt.rstrip().endswith(self.config.open)
        return ThinkStream(self.config.open, self.config.close, opened)


class ThinkStream(TextStream):
    def __init__(self, open: str, close: str, opened: bool) -> None:
        super().__init__()
        self._open, self._close, self._opened = open, close, opened

    def parse(self) -> Steps[None]:
        # A later opening tag belongs to the answer, which may be about such tags.
        marked = yield from self.attempt(self._mark)
        if marked or self._opened:
            yield from self.blanks()
            if (yield from self.until(self._close, Reasoning, trim=True)):
                yield from self.blanks()

    def _mark(self) -> Steps[None]:
        yield from self.blanks()
        yield from self.expect(self._open)
