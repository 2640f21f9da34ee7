"""Calls between tags, the format of NousResearch's Hermes 2 Pro, adopted by Qwen."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.core.interfaces import Grammar, ParserStream, Tool, ToolParser
from dovetail.core.parsing import CallStream, Steps, call_rules

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    # These tags are special tokens in some tokenizers derived from those of Hermes and Qwen.
    special = (OPEN, CLOSE)

    def fits(self, chat_template: str) -> bool:
        # Qwen3-Coder writes XML between the same tags.
        return OPEN in chat_template and "<function=" not in chat_template

    def stream(self, tools: Sequence[Tool], *, forced: bool = False) -> ParserStream:
        return HermesStream(tools)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool = True) -> Grammar:
        more = r' ("\n" tagged)*' if parallel else ""
        rules = rf'tagged: "{OPEN}\n" call "\n{CLOSE}"' + "\n"
        return Grammar(kind="lark", value=f"start: tagged{more}\n{rules}{call_rules(tools)}")


class HermesStream(CallStream):
    def parse(self) -> Steps[None]:
        found = False
        while (yield from self.until(OPEN, drop=found)):
            found = yield from self.attempt(self.call, self.opening)
            if found:
                yield from self.closing(CLOSE)
