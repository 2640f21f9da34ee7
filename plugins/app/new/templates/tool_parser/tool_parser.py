"""Calls of the form `@name{...}`."""

from dovetail.core.interfaces import Grammar, ToolParser
from dovetail.core.parsing import CallStream, Malformed, argument_rules


class Mine(ToolParser):
    def fits(self, chat_template):
        return self.config.mark + "name{" in chat_template

    def stream(self, tools, *, forced=False):
        return MineStream(tools, self.config.mark)

    def grammar(self, tools, *, parallel=True):
        calls = " | ".join(f'"{self.config.mark}{tool.name}" arguments_{i}' for i, tool in enumerate(tools))
        more = r' ("\n" call)*' if parallel else ""
        return Grammar(kind="lark", value=f"start: call{more}\ncall: {calls}\n{argument_rules(tools)}")


class MineStream(CallStream):
    def __init__(self, tools, mark):
        super().__init__(tools)
        self.mark = mark

    def parse(self):
        found = False
        while (yield from self.until(self.mark, drop=found)):
            found = yield from self.attempt(self.marked_call, self.opening)

    def marked_call(self):
        name = ""
        while (char := (yield from self.peek())).isalnum() or char == "_":
            name, self.at = name + char, self.at + 1
        if self.offered(name) and char != "{":
            raise Malformed
        self.begin(name)
        if (yield from self.arguments()):
            self.end()
