"""Structured output off."""

from __future__ import annotations

from dovetail.core.errors import RequestError
from dovetail.core.interfaces import Grammar, GrammarCompiler, Matcher


class NoGrammars(GrammarCompiler):
    checked = False

    def compile(self, grammar: Grammar) -> Matcher:
        raise RequestError(f"grammar.kind={grammar.kind}: this engine runs with grammar=none, which serves no grammars")
