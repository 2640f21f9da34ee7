"""Options of the built-in grammar compilers."""

from __future__ import annotations

from pydantic import Field

from dovetail.core.compose import Config


class NoneConfig(Config):
    """Requests with a grammar are refused."""


class LLGuidanceConfig(Config):
    """JSON schemas, regular expressions, choices and context-free grammars through llguidance: an Earley parser over
    derivatives of regular expressions, with tokens in a trie."""

    max_characters: int = Field(1 << 18, ge=1)
    """Longest grammar, in characters."""
    preload: bool = True
    """Read the tokenizer at start-up, which takes about a second for 128 000 tokens. false: read it at the first
    grammar, which stalls running requests."""
    timeout: float = Field(30.0, gt=0)
    """Seconds after which a compilation fails and the request is rejected."""
    memory: int = Field(256 << 20, ge=1 << 20)
    """Most bytes that the compilation of one grammar may allocate, on Linux."""
    json_whitespace: int = Field(32, ge=0)
    """Most white space characters between two tokens of a JSON text; 0 = none."""
    coerce_one_of: bool = False
    """Treat `oneOf` in a JSON schema as `anyOf`, so outputs may match several branches. false: reject such a schema
    unless its branches exclude each other."""
    max_lexer_states: int = Field(50_000, ge=1)
    """Most states of one grammar's lexer, 1 to 2 kB each."""
    step_items: int = Field(50_000, ge=1)
    """Most Earley items in one step of a parser; it processes about 20 per microsecond."""
