"""Options of the built-in grammar compilers."""

from __future__ import annotations

from pydantic import Field

from dovetail.core.compose import Config


class NoneConfig(Config):
    """Requests with a grammar are refused."""


class LLGuidanceConfig(Config):
    """JSON schemas, regular expressions, choices and context-free grammars by llguidance: derivatives of regular
    expressions under an Earley parser, tokens in a trie."""

    max_characters: int = Field(1 << 18, ge=1)
    """Longest grammar, characters."""
    preload: bool = True
    """Read the tokenizer at start-up, about a second for 128 000 tokens; false: at the first grammar, while running
    requests wait."""
    timeout: float = Field(30.0, gt=0)
    """Seconds that a compilation may take; then the request is refused."""
    json_whitespace: int = Field(32, ge=0)
    """Most white space characters between two parts of a JSON text; 0 = none."""
    coerce_one_of: bool = False
    """Read `oneOf` in a JSON schema as `anyOf`: outputs may then match several branches. false: such a schema is
    refused unless its branches exclude each other."""
    max_lexer_states: int = Field(50_000, ge=1)
    """States of one grammar's lexer, 1 to 2 kB each."""
    step_items: int = Field(50_000, ge=1)
    """Earley items in one step of a parser, about 20 in a microsecond."""
