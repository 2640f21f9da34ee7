"""The contract suite of grammar compilers. Subclass GrammarContract in a test module and override `make`.

Its vocabulary is small: every byte, some longer pieces of text that cross what a grammar tells apart, special tokens
and ids without a token. W words of 32 tokens.
"""

from __future__ import annotations

import functools
import json
import random
import re
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dovetail.core.arithmetic import ceil_div
from dovetail.core.errors import RequestError
from dovetail.core.interfaces import Grammar, GrammarCompiler, Matcher, Vocabulary

PIECES = ('{"', '":', '": ', '",', '"}', "}]", "[]", "null", "true", "12", "ab", "abc", "ye", "yes", " no", "é", "\n\n")
EOS, OTHER_EOS, SPARE = 0, 1, 5
"""Two special tokens that end a sequence; ids past the tokenizer's own."""


@functools.cache
def vocabulary() -> tuple[Vocabulary, dict[int, bytes]]:
    """And the text of each token that has one."""
    letters = _byte_letters()
    tokens = ["<end>", "<also-end>", "<special>", *letters.values()]
    merges: dict[tuple[str, str], None] = {}
    for piece in PIECES:
        word = [letters[byte] for byte in piece.encode()]
        merges.update({("".join(word[:i]), word[i]): None for i in range(1, len(word))})
    tokens += [left + right for left, right in merges]
    ids = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(tokens[:3])
    folder = Path(_folder().name)
    tokenizer.save(str(folder / "tokenizer.json"))
    back = {letter: byte for byte, letter in letters.items()}
    text = {i: bytes(back[letter] for letter in token) for token, i in ids.items() if i > 2}
    return Vocabulary(len(tokens) + SPARE, (EOS, OTHER_EOS), folder / "tokenizer.json"), text


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="dovetail-grammar-")


def _byte_letters() -> dict[int, str]:
    """GPT-2's way to write bytes as printable letters: those that are, then others from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}


@dataclass(frozen=True)
class Case:
    """A grammar, texts that fit it, and texts that do not."""

    grammar: Grammar
    fit: tuple[str, ...]
    unfit: tuple[str, ...]
    check: Callable[[str], object]
    """Of any text: true if it fits."""

    def __str__(self) -> str:
        return self.grammar.kind


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"enum": ["x", None]}, "maxItems": 2}},
    "required": ["a"],
    "additionalProperties": False,
}


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _fits_schema(text: str) -> bool:
    if not _is_object(text):
        return False
    value = json.loads(text)
    b = value.get("b", [])
    known = value.keys() <= {"a", "b"} and isinstance(value.get("a"), int) and not isinstance(value["a"], bool)
    return known and isinstance(b, list) and len(b) <= 2 and all(x in ("x", None) for x in b)


CASES = (
    Case(
        Grammar(kind="json_schema", value=SCHEMA),
        ('{"a": 12}', '{"a":-1,"b":["x",null]}'),
        ('{"a": "12"}', "{}", '{"a": 1, "c": 2}', '{"a":1,"b":["x","x","x"]}', "[1]", '{"a": 1'),
        _fits_schema,
    ),
    Case(
        Grammar(kind="json_object"),
        ("{}", '{"é": [1, {"x": null}]}', '{"a":"\\n","b":true}'),
        ("[]", "1", '{"a"}', "{'a': 1}", '{"a": 1}}'),
        _is_object,
    ),
    Case(
        Grammar(kind="regex", value=r"(ab|é)+[0-9]{2}"),
        ("ab12", "éab99", "ababab00"),
        ("12", "ab1", "ab123", "Ab12", " ab12"),
        re.compile(r"(ab|é)+[0-9]{2}").fullmatch,
    ),
    Case(
        Grammar(kind="choice", value=("yes", 'yes, "é"\n', "no")),
        ("yes", 'yes, "é"\n', "no"),
        ("ye", "y", "YES", "yes,", "nono", " no"),
        ("yes", 'yes, "é"\n', "no").__contains__,
    ),
    Case(
        Grammar(kind="lark", value='start: "(" start ")" | /[a-c]+/'),
        ("abc", "((b))"),
        ("((b)", "()", "d", "(a))"),
        re.compile(r"\({2}[a-c]+\){2}|\([a-c]+\)|[a-c]+|\({3,}[a-c]+\){3,}").fullmatch,
    ),
    Case(
        Grammar(kind="ebnf", value='root ::= item ("," item)*\nitem ::= [0-9]+ | "null"'),
        ("1", "12,null,0"),
        (",", "1,", "1,,2", "nul"),
        re.compile(r"([0-9]+|null)(,([0-9]+|null))*").fullmatch,
    ),
)
WRONG = (
    Grammar(kind="json_schema", value='{"type": "object"'),
    Grammar(kind="json_schema", value={"type": "nothing"}),
    Grammar(kind="json_schema", value={"$ref": "#/nowhere"}),
    Grammar(kind="regex", value="(ab"),
    Grammar(kind="lark", value="start: nowhere"),
    Grammar(kind="ebnf", value='root ::= ("a"'),
)


class GrammarContract:
    """Every sentence of dovetail.core.interfaces.GrammarCompiler and Matcher. `make` must be overridden."""

    kinds: tuple[str, ...] = ("json_schema", "json_object", "regex", "choice", "lark", "ebnf")
    """Those it serves; a grammar of another kind must be refused."""

    def make(self, vocabulary: Vocabulary) -> GrammarCompiler:
        """A fresh compiler."""
        raise NotImplementedError("return your compiler: MyCompiler(MyConfig(), vocabulary)")

    # Drivers.

    def compiled(self) -> Iterator[tuple[Case, Matcher]]:
        compiler = self.make(vocabulary()[0])
        for case in CASES:
            if case.grammar.kind in self.kinds:
                yield case, compiler.compile(case.grammar)

    def allowed(self, matcher: Matcher, poison: int = 0) -> set[int]:
        """Tokens that the mask allows, end-of-sequence aside."""
        size = vocabulary()[0].size
        mask_W = np.full(ceil_div(size, 32), poison, np.uint32)
        matcher.mask(mask_W)
        flags = np.unpackbits(mask_W.astype("<u4").view(np.uint8), bitorder="little")[:size]
        return set(np.flatnonzero(flags).tolist()) - {EOS, OTHER_EOS}

    def write(self, matcher: Matcher, text: str, seed: int = 0) -> bool:
        """Advance by tokens that the mask allows and that spell the text, chosen at random. False = there came none.

        (A compiler may insist on one way to spell what it leaves no choice about.)
        """
        rng, text_of, rest = random.Random(seed), vocabulary()[1], text.encode()
        while rest:
            tokens = [t for t in sorted(self.allowed(matcher)) if rest.startswith(text_of.get(t, b"?!"))]
            if not tokens:
                return False
            token = rng.choice(tokens)
            matcher.advance(token)
            rest = rest[len(text_of[token]) :]
        return True

    # What is allowed.

    def test_what_fits_can_be_written(self) -> None:
        """And it may end there."""
        for case, matcher in self.compiled():
            for text in case.fit:
                assert case.check(text)
                for seed in range(4):
                    mine = matcher.fork()
                    assert self.write(mine, text, seed), f"{case.grammar}: {text!r} is not allowed"
                    assert mine.accepting, f"{case.grammar}: the output may not end after {text!r}"

    def test_what_does_not_fit_cannot(self) -> None:
        for case, matcher in self.compiled():
            for text in case.unfit:
                assert not case.check(text)
                for seed in range(4):
                    mine = matcher.fork()
                    assert not (self.write(mine, text, seed) and mine.accepting), f"{case.grammar}: {text!r} is allowed"

    def test_whatever_is_written_fits(self) -> None:
        """Tokens drawn from the masks, up to where the output may end."""
        rng = random.Random(2)
        text_of = vocabulary()[1]
        for case, matcher in self.compiled():
            ended = 0
            for _ in range(12):
                mine, out = matcher.fork(), b""
                for _ in range(120):
                    if mine.finished or (mine.accepting and rng.random() < 0.3):
                        break
                    tokens = sorted(self.allowed(mine))
                    assert tokens or mine.accepting, f"{case.grammar}: nothing may follow {out!r}, nor may it end"
                    if not tokens:
                        break
                    token = rng.choice(tokens)
                    mine.advance(token)
                    out += text_of[token]
                if mine.accepting:
                    ended += 1
                    assert case.check(out.decode()), f"{case.grammar}: {out!r} does not fit"
            assert ended or case.grammar.kind == "json_object", f"{case.grammar}: no output came to an end"

    def test_special_tokens_and_spare_ids_are_never_allowed(self) -> None:
        text_of = vocabulary()[1]
        for case, matcher in self.compiled():
            wrong = self.allowed(matcher, poison=0xFFFFFFFF) - text_of.keys()
            assert not wrong, f"{case.grammar}: tokens {wrong} have no text"

    def test_an_output_that_can_only_end_is_finished(self) -> None:
        """Or its mask is empty; and it may end."""
        for text, kind in (("no", "choice"), ("ab12", "regex"), ("{}", "json_object"), ('{"a": 1}', "json_schema")):
            for case, matcher in self.compiled():
                if case.grammar.kind == kind:
                    assert not matcher.finished
                    assert self.write(matcher, text) and matcher.accepting
                    assert matcher.finished or not self.allowed(matcher), f"{case.grammar}: more may follow {text!r}"

    # How matchers behave.

    def test_mask_overwrites_and_changes_nothing(self) -> None:
        for case, matcher in self.compiled():
            other, rng = matcher.fork(), random.Random(4)
            for _ in range(20):
                first = self.allowed(matcher)
                again = self.allowed(matcher, poison=0xFFFFFFFF)
                assert again == first, f"{case.grammar}: the second mask differs from the first"
                if matcher.finished or not first:
                    break
                token = rng.choice(sorted(first))
                matcher.advance(token)
                other.advance(token)
                assert (other.accepting, other.finished) == (matcher.accepting, matcher.finished)
            assert other.finished or self.allowed(other) == self.allowed(matcher), "masks change what comes after them"

    def test_a_token_that_is_not_allowed_is_refused(self) -> None:
        for case, matcher in self.compiled():
            tokens = sorted(vocabulary()[1].keys() - self.allowed(matcher))
            with pytest.raises(RequestError):
                matcher.fork().advance(tokens[0])
            with pytest.raises(RequestError):
                matcher.fork().advance(tokens[-1])
            assert self.write(matcher, case.fit[0]), "a fork went wrong, not it"

    def test_forks_are_independent(self) -> None:
        for case, matcher in self.compiled():
            rng, stem = random.Random(5), matcher.fork()
            for _ in range(8):
                if stem.finished or not (tokens := sorted(self.allowed(stem))):
                    break
                for token in tokens[:5]:
                    stem.fork().advance(token)
                assert sorted(self.allowed(stem)) == tokens, f"{case.grammar}: what a fork wrote its origin sees"
                fork, token = stem.fork(), rng.choice(tokens)
                stem.advance(token)
                fork.advance(token)
                assert fork.accepting == stem.accepting
                assert stem.finished or self.allowed(fork) == self.allowed(stem), f"{case.grammar}: a fork differs"
            assert self.write(matcher, case.fit[-1]) and matcher.accepting

    def test_threads_may_compile_fork_and_mask_at_once(self) -> None:
        """One compiler, one matcher to fork from, a matcher for each thread."""
        compiler = self.make(vocabulary()[0])
        jobs: list[tuple[Case, Matcher | None, str]] = []
        for case in CASES:
            if case.grammar.kind in self.kinds:
                shared = compiler.compile(case.grammar)
                jobs += [(case, matcher, text) for text in case.fit for matcher in (shared, None, shared)]

        def one(job: tuple[Case, Matcher | None, str]) -> bool:
            case, shared, text = job
            matcher = compiler.compile(case.grammar) if shared is None else shared.fork()
            return self.write(matcher, text) and matcher.accepting

        with ThreadPoolExecutor(4) as pool:
            for job, done in zip(jobs, pool.map(one, jobs), strict=True):
                assert done, f"{job[0].grammar}: {job[2]!r} is not allowed"

    # What is refused.

    def test_a_wrong_grammar_is_refused_with_its_reason(self) -> None:
        compiler = self.make(vocabulary()[0])
        for grammar in WRONG:
            if grammar.kind in self.kinds:
                with pytest.raises(RequestError, match="grammar") as caught:
                    compiler.compile(grammar)
                assert 400 <= caught.value.status < 500
        for case in CASES:
            if case.grammar.kind not in self.kinds:
                with pytest.raises(RequestError, match="grammar"):
                    compiler.compile(case.grammar)

    def test_a_grammar_out_of_all_proportion_ends_in_an_error_or_a_matcher(self) -> None:
        """Neither a crash nor a long wait: nesting, repetition, many branches."""
        compiler = self.make(vocabulary()[0])
        deep: Any = {"type": "string"}
        for _ in range(300):
            deep = {"type": "array", "items": deep}
        for grammar in (
            Grammar(kind="json_schema", value=deep),
            Grammar(kind="json_schema", value={"$ref": "#"}),
            Grammar(kind="regex", value="(" * 5000 + "a" + ")" * 5000),
            Grammar(kind="regex", value="((a{100}){100}){100}"),
            Grammar(kind="lark", value="start: " + "(" * 5000 + '"a"' + ")" * 5000),
            Grammar(kind="choice", value=tuple(f"word {i}" for i in range(2000))),
        ):
            if grammar.kind in self.kinds:
                try:
                    self.allowed(compiler.compile(grammar))
                except RequestError:
                    continue
