"""Contract suite for the built-in grammar compilers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from dovetail.core.errors import ConfigError, RequestError
from dovetail.core.interfaces import Grammar, GrammarCompiler, Vocabulary
from dovetail.core.testing.grammar import GrammarContract, vocabulary
from dovetail.plugins.grammar import guidance
from dovetail.plugins.grammar.config import LLGuidanceConfig, NoneConfig
from dovetail.plugins.grammar.guidance import LLGuidance
from dovetail.plugins.grammar.none import NoGrammars


class TestLLGuidance(GrammarContract):
    def make(self, vocabulary: Vocabulary) -> GrammarCompiler:
        return LLGuidance(LLGuidanceConfig(), vocabulary)


class TestNone(GrammarContract):
    kinds = ()

    def make(self, vocabulary: Vocabulary) -> GrammarCompiler:
        return NoGrammars(NoneConfig(), vocabulary)


def llguidance(**options: object) -> LLGuidance:
    return LLGuidance(LLGuidanceConfig(**options), vocabulary()[0])


ONE_OF = Grammar(
    kind="json_schema", value={"oneOf": [{"type": "object", "properties": {"a": True}}, {"type": "object"}]}
)


@pytest.mark.parametrize(
    ("options", "grammar", "reason"),
    [
        ({"max_characters": 10}, Grammar(kind="regex", value="a" * 11), "11 characters.*max_characters=10"),
        ({"max_characters": 10}, Grammar(kind="choice", value=("abcdef", "ghijkl")), "12 characters"),
        ({}, ONE_OF, "oneOf"),
    ],
)
def test_limits(options: dict[str, object], grammar: Grammar, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        llguidance(**options).compile(grammar)
    llguidance(coerce_one_of=True).compile(grammar)


@pytest.mark.parametrize(
    "endless", [Grammar(kind="json_schema", value={"$ref": "#"}), Grammar(kind="lark", value='start: start "a"')]
)
def test_a_grammar_without_an_end_is_refused_in_words(endless: Grammar) -> None:
    with pytest.raises(RequestError, match=r"no text matches it; does a \$ref or a rule lead only to itself\?$"):
        TestLLGuidance().allowed(llguidance().compile(endless))


def test_a_choice_may_have_any_number_of_strings() -> None:
    matcher = llguidance().compile(Grammar(kind="choice", value=tuple(f"word {i}" for i in range(10_000))))
    assert TestLLGuidance().write(matcher, "word 1234") and matcher.accepting


def test_white_space_in_json_is_bounded() -> None:
    suite = TestLLGuidance()
    for most in (0, 3):
        matcher = llguidance(json_whitespace=most).compile(Grammar(kind="json_object"))
        assert suite.write(matcher.fork(), "{" + " " * most + '"a"' + " " * most)
        assert not suite.write(matcher, "{" + " " * (most + 1))


def test_a_model_without_a_tokenizer_refuses() -> None:
    compiler = LLGuidance(LLGuidanceConfig(), Vocabulary(10, (0,), None))
    with pytest.raises(RequestError, match="no tokenizer"):
        compiler.compile(Grammar(kind="json_object"))


def test_a_tokenizer_that_llguidance_cannot_read() -> None:
    words = Vocabulary(2, (1,), Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")).to_str())
    with pytest.raises(ConfigError, match="tokenizer.json.*decoder.*grammar=none"):
        LLGuidance(LLGuidanceConfig(preload=True), words)
    with pytest.raises(RequestError, match="llguidance cannot read this model's tokenizer.json"):
        LLGuidance(LLGuidanceConfig(preload=False), words).compile(Grammar(kind="json_object"))


def test_a_tokenizer_with_more_tokens_than_the_model() -> None:
    """The additional tokens are special and have no logits."""
    whole, _ = vocabulary()
    tokenizer = Tokenizer.from_str(whole.tokenizer)
    tokenizer.add_special_tokens([f"<added-{i}>" for i in range(64)])
    assert tokenizer.get_vocab_size() > whole.size + 32

    class Suite(TestLLGuidance):
        def make(self, vocabulary: Vocabulary) -> GrammarCompiler:
            return super().make(replace(vocabulary, tokenizer=tokenizer.to_str()))

    suite = Suite()
    suite.test_matching_texts_are_allowed()
    suite.test_random_outputs_match()
    suite.test_special_tokens_and_spare_ids_are_never_allowed()


def test_the_tokenizer_is_read_once_and_when_it_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Vocabulary] = []
    load = guidance._load
    monkeypatch.setattr(guidance, "_load", lambda vocabulary: (loaded.append(vocabulary), load(vocabulary))[1])
    compiler = llguidance(preload=False)
    assert not loaded
    for _ in range(2):
        compiler.compile(Grammar(kind="json_object"))
    assert len(loaded) == 1
    llguidance()
    assert len(loaded) == 2
