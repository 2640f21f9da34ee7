"""Reasoning between two tags."""

from dovetail.core.interfaces import Reasoning, ReasoningParser
from dovetail.core.parsing import TextStream

from dovetail_mine.config import MineConfig


class Mine(ReasoningParser):
    config: MineConfig

    def fits(self, chat_template):
        return f"[/{self.config.tag}]" in chat_template

    def stream(self, prompt):
        return MineStream(self.config.tag)


class MineStream(TextStream):
    def __init__(self, tag):
        super().__init__()
        self.tag = tag

    def parse(self):
        if (yield from self.attempt(self.opening_tag)):
            yield from self.blanks()
            yield from self.until(f"[/{self.tag}]", Reasoning, trim=True)
            yield from self.blanks()

    def opening_tag(self):
        yield from self.blanks()
        yield from self.expect(f"[{self.tag}]")
