"""Reasoning in the channel `analysis`: OpenAI's Harmony format, of gpt-oss."""

from __future__ import annotations

from dovetail.core.harmony import CALL, CHANNEL, END, MESSAGE, OPEN, RETURN, SPECIAL, read_header
from dovetail.core.interfaces import Content, ParserEvent, ParserStream, Reasoning, ReasoningParser
from dovetail.core.parsing import Malformed, Steps, TextStream

ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"


class HarmonyReasoningParser(ReasoningParser):
    """The text of `final`, and of `commentary` to the user, is content. Messages to tools are content word for word,
    which the tool parser reads."""

    special = SPECIAL

    def fits(self, chat_template: str) -> bool:
        return CHANNEL in chat_template

    def stream(self, prompt: str) -> ParserStream:
        return HarmonyReasoningStream(opened=prompt.endswith(ANALYSIS))


class HarmonyReasoningStream(TextStream):
    def __init__(self, opened: bool) -> None:
        super().__init__()
        self._reasons = opened
        """Whether the message is reasoning."""
        self._calls = False
        """Whether the message is for a tool."""

    def parse(self) -> Steps[None]:
        while (yield from self.until(OPEN, self._piece)):
            yield from self.attempt(self._mark, self.opening, self._piece)

    def _piece(self, text: str) -> ParserEvent:
        return Reasoning(text) if self._reasons else Content(text)

    def _mark(self) -> Steps[None]:
        """Parse the end of a message or the header of the next one. Raises Malformed for text that stays as it is."""
        for mark in (END, RETURN, CALL):
            if (yield from self.accept(mark.removeprefix(OPEN))):
                self._reasons = False
                if self._calls:
                    self._calls = False
                    raise Malformed
                return
        header = yield from read_header(self)
        self._calls = bool(header.recipient)
        self._reasons = header.channel == "analysis" and not self._calls
        if self._calls:
            # Word for word, as one piece: a recipient in the role precedes a channel that reads as a header of its own.
            assert self._kept is not None
            self.emit(Content(self.text[self._kept : self.at]))
