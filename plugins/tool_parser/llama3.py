"""Calls as bare JSON: the format of Meta's Llama 3.1 and later for user-defined tools."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.core.interfaces import Grammar, ParserStream, Tool, ToolParser
from dovetail.core.parsing import CallStream, Steps, call_rules

TAG = "<|python_tag|>"


class Llama3Parser(ToolParser):
    special = (TAG,)

    def fits(self, chat_template: str) -> bool:
        return "<|start_header_id|>" in chat_template and '"parameters": ' in chat_template

    def stream(self, tools: Sequence[Tool], *, forced: bool = False) -> ParserStream:
        return Llama3Stream(tools)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool = True) -> Grammar:
        """Allow one call only: the model was not trained to write several."""
        return Grammar(kind="lark", value=f"start: call\n{call_rules(tools, 'parameters')}")


class Llama3Stream(CallStream):
    def parse(self) -> Steps[None]:
        # Without the tag, a call is recognized only at the start of the output; later JSON is part of an answer.
        found = yield from self._calls(opening=0)
        while (yield from self.until(TAG, drop=found)):
            found = yield from self._calls(self.opening)

    def _calls(self, opening: int) -> Steps[bool]:
        if not (yield from self.attempt(self.call, opening)):
            return False
        while (yield from self.attempt(self._next_call)):
            pass
        return True

    def _next_call(self) -> Steps[None]:
        if (yield from self.blanks()) in (";", ","):
            self.at += 1
        yield from self.call()
