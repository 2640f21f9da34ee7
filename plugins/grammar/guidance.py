"""Grammars through llguidance. Its matchers do not raise but enter an error state, which is checked here."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from dovetail.core.arithmetic import ceil_div
from dovetail.core.errors import ConfigError, RequestError
from dovetail.core.interfaces import Grammar, GrammarCompiler, Matcher, Vocabulary
from dovetail.core.tokenizer import is_failure
from dovetail.plugins.grammar.config import LLGuidanceConfig

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions
    from numpy.typing import NDArray

_LONGEST_REASON = 400
"""Longest error text in characters. It may quote the grammar."""

_MOST_UNUSED = 1 << 16
"""Most token ids of tokenizer.json above the model's vocabulary."""

_EXPLAINED = {"NoExtensionBias": "no text matches it; does a $ref or a rule lead only to itself?"}
"""Reasons of llguidance that do not explain themselves."""


class LLGuidance(GrammarCompiler):
    config: LLGuidanceConfig

    def __init__(self, config: LLGuidanceConfig, vocabulary: Vocabulary) -> None:
        super().__init__(config, vocabulary)
        self.timeout, self.memory = config.timeout, config.memory
        self._limits = LLParserLimits(
            step_max_items=config.step_items, max_lexer_states=config.max_lexer_states, verbose_errors=False
        )
        self._loading = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        if config.preload and vocabulary.tokenizer is not None:
            try:
                self._tokens()
            except RequestError as error:
                raise ConfigError(f"{error}. Without grammars: grammar=none") from error

    def compile(self, grammar: Grammar) -> Matcher:
        size = len(grammar.value) if isinstance(grammar.value, str) else sum(map(len, grammar.value))
        if size > self.config.max_characters:
            raise RequestError(
                f"grammar: {grammar.kind} of {size} characters; grammar.max_characters={self.config.max_characters}"
            )
        tokenizer = self._tokens()
        inner = LLMatcher(tokenizer, self._text(grammar), log_level=0, limits=self._limits)
        matcher = _LLMatcher(grammar.kind, inner, ceil_div(tokenizer.vocab_size, 32))
        matcher.check()
        return matcher

    def _tokens(self) -> LLTokenizer:
        """Return the tokenizer. The first call builds it and holds the GIL throughout."""
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = _load(self.vocabulary)
            return self._tokenizer

    def _text(self, grammar: Grammar) -> str:
        """Convert a grammar to llguidance's format."""
        value = grammar.value
        try:
            if grammar.kind == "choice":
                # A terminal is one item of the parser, whose items are limited; a rule would be one for each string.
                return str(LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, value))))
            assert isinstance(value, str)
            if grammar.kind == "regex":
                return str(LLMatcher.grammar_from_regex(value))
            if grammar.kind == "lark":
                return str(LLMatcher.grammar_from_lark(value))
            if grammar.kind == "ebnf":
                return str(LLMatcher.grammar_from_lark(gbnf_to_lark(value)))
            schema = value if grammar.kind == "json_schema" else '{"type": "object"}'
            return str(LLMatcher.grammar_from_json_schema(schema, overrides=self._json_options()))
        except Exception as error:  # The converters raise exceptions of any type.
            raise _refusal(grammar.kind, str(error)) from error

    def _json_options(self) -> JsonCompileOptions:
        most = self.config.json_whitespace
        return {
            "whitespace_flexible": most > 0,
            "whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{most}}}" if most else None,
            "coerce_one_of": self.config.coerce_one_of,
            "lenient": False,
        }


class _LLMatcher(Matcher):
    def __init__(self, kind: str, matcher: LLMatcher, words: int) -> None:
        """`words`: size of llguidance's mask, which may exceed the model's."""
        self._kind, self._matcher, self._words = kind, matcher, words

    def check(self) -> None:
        if self._matcher.is_error():
            raise _refusal(self._kind, self._matcher.get_error())

    def mask(self, out: NDArray[np.uint32]) -> None:
        own = out if len(out) == self._words else np.empty(self._words, np.uint32)
        self._matcher.unsafe_compute_mask_ptr(own.ctypes.data, own.nbytes)
        self.check()
        out[:] = own[: len(out)]

    def advance(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            raise _refusal(self._kind, self._matcher.get_error())

    def rollback(self, tokens: int) -> None:
        if tokens and not self._matcher.rollback(tokens):
            raise _refusal(self._kind, self._matcher.get_error())

    def forced(self) -> Sequence[int]:
        found: Sequence[int] = self._matcher.compute_ff_tokens()
        return found

    @property
    def accepting(self) -> bool:
        return bool(self._matcher.is_accepting())

    @property
    def finished(self) -> bool:
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def fork(self) -> Matcher:
        return _LLMatcher(self._kind, self._matcher.deep_copy(), self._words)


def _load(vocabulary: Vocabulary) -> LLTokenizer:
    if vocabulary.tokenizer is None:
        raise RequestError("grammar: this model has no tokenizer.json, and grammars need the text of tokens")
    data = json.loads(vocabulary.tokenizer)
    known = data["model"]["vocab"]
    ids = known.values() if isinstance(known, dict) else range(len(known))
    # llguidance needs at least the tokenizer's size, even where tokens have no logits.
    size = max([vocabulary.size - 1, *ids, *(token["id"] for token in data.get("added_tokens", ()))]) + 1
    if size > vocabulary.size + _MOST_UNUSED:
        # llguidance takes memory for each id below the highest.
        raise RequestError(
            f"grammar: tokenizer.json has the token id {size - 1}, and the model has {vocabulary.size} tokens: at most "
            f"{_MOST_UNUSED} ids may be above them"
        )
    # Padding and truncation would alter the text of single tokens.
    text = json.dumps(data | {"padding": None, "truncation": None}, ensure_ascii=False)
    try:
        return LLTokenizer(text, n_vocab=size, eos_token=list(vocabulary.eos_ids) or None)
    except BaseException as error:  # llguidance raises exceptions of any type, and panics.
        if not is_failure(error):
            raise
        raise RequestError(f"grammar: llguidance cannot read this model's tokenizer.json: {error}") from error


def _refusal(kind: str, reason: str) -> RequestError:
    reason = " ".join(reason.replace("<non-verbose/>", "").split())
    reason = _EXPLAINED.get(reason, reason)
    short = reason if len(reason) <= _LONGEST_REASON else reason[:_LONGEST_REASON] + " ..."
    return RequestError(f"grammar: {kind}: {short}")
