"""Suite of the component, with the text that a model writes for calls."""

import json

from dovetail.core.testing.parsers import ToolParserContract

from dovetail_mine.config import MineConfig
from dovetail_mine.tool_parser import Mine


class MineContract(ToolParserContract):
    marks = ("@", "@stop", "@stop{")
    template = "Call a tool as @name{arguments}."

    def make(self):
        return Mine(MineConfig())

    def render(self, calls):
        return "\n".join(f"@{call.name}{json.dumps(call.arguments)}" for call in calls)
