"""Suite of the component, with the text that a model writes."""

from dovetail.core.testing.parsers import ReasoningParserContract

from dovetail_mine.config import MineConfig
from dovetail_mine.reasoning_parser import Mine


class MineContract(ReasoningParserContract):
    marks = ("[thoughts]", "[/thoughts]")
    template = "{{ content.split('[/thoughts]')[-1] }}"

    def make(self):
        return Mine(MineConfig())

    def render(self, reasoning, answer):
        return "Hi", f"[thoughts]\n{reasoning}\n[/thoughts]\n{answer}"
