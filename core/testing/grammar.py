"""Contract suite for grammar compilers. Subclass GrammarContract in a test module and override `make`.

The vocabulary is small: every byte, some longer tokens that cross the terminals of a grammar, special tokens and ids
without a token. Shapes: W words of 32 tokens.
"""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dovetail.core.arithmetic import ceil_div
from dovetail.core.errors import RequestError
from dovetail.core.interfaces import Grammar, GrammarCompiler, Matcher, Vocabulary

PIECES = ('{"', '":', '": ', '",', '"}', "}]", "[]", "null", "true", "12", "ab", "abc", "ye", "yes", " no", "é", "\n\n")
EOS, OTHER_EOS, SPARE = 0, 1, 5
"""Two end-of-sequence tokens; number of ids past the tokenizer's vocabulary."""


@functools.cache
def vocabulary() -> tuple[Vocabulary, dict[int, bytes]]:
    """Return the vocabulary and the text of each token that has one."""
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
    back = {letter: byte for byte, letter in letters.items()}
    text = {i: bytes(back[letter] for letter in token) for token, i in ids.items() if i > 2}
    return Vocabulary(len(tokens) + SPARE, (EOS, OTHER_EOS), tokenizer.to_str()), text


def _byte_letters() -> dict[int, str]:
    """Return GPT-2's mapping of bytes to printable characters; other bytes map to code points from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}


@dataclass(frozen=True)
class Case:
    """A grammar with texts that match it and texts that do not."""

    grammar: Grammar
    fit: tuple[str, ...]
    unfit: tuple[str, ...]
    check: Callable[[str], object]
    """Whether a text matches."""

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
    """Tests of dovetail.core.interfaces.GrammarCompiler and Matcher. `make` must be overridden."""

    kinds: tuple[str, ...] = ("json_schema", "json_object", "regex", "choice", "lark", "ebnf")
    """Supported kinds. A grammar of another kind must be refused."""

    def make(self, vocabulary: Vocabulary) -> GrammarCompiler:
        """Return a fresh compiler."""
        raise NotImplementedError("return your compiler: MyCompiler(MyConfig(), vocabulary)")

    # Drivers

    def compiled(self) -> Iterator[tuple[Case, Matcher]]:
        compiler = self.make(vocabulary()[0])
        for case in CASES:
            if case.grammar.kind in self.kinds:
                yield case, compiler.compile(case.grammar)

    def allowed(self, matcher: Matcher, poison: int = 0) -> set[int]:
        """Return the tokens that the mask allows, without end-of-sequence tokens."""
        size = vocabulary()[0].size
        mask_W = np.full(ceil_div(size, 32), poison, np.uint32)
        matcher.mask(mask_W)
        flags = np.unpackbits(mask_W.astype("<u4").view(np.uint8), bitorder="little")[:size]
        return set(np.flatnonzero(flags).tolist()) - {EOS, OTHER_EOS}

    def write(self, matcher: Matcher, text: str, seed: int = 0) -> bool:
        """Advance by randomly chosen allowed tokens that spell the text. False = no allowed token continues it.

        A compiler may allow only one tokenization of text that it forces.
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

    # Masks

    def test_matching_texts_are_allowed(self) -> None:
        """The masks allow a matching text, after which the matcher is accepting."""
        for case, matcher in self.compiled():
            for text in case.fit:
                assert case.check(text)
                for seed in range(4):
                    mine = matcher.fork()
                    assert self.write(mine, text, seed), f"{case.grammar}: the masks must allow {text!r}"
                    assert mine.accepting, f"{case.grammar}: `accepting` must be True after {text!r}"

    def test_other_texts_are_not_allowed(self) -> None:
        for case, matcher in self.compiled():
            for text in case.unfit:
                assert not case.check(text)
                for seed in range(4):
                    mine = matcher.fork()
                    allowed = self.write(mine, text, seed) and mine.accepting
                    assert not allowed, f"{case.grammar}: the masks allow {text!r}, which does not match"

    def test_random_outputs_match(self) -> None:
        """Tokens drawn from the masks until the output may end give a matching text."""
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
                    alive = tokens or mine.accepting
                    assert alive, f"{case.grammar}: after {out!r} the mask is empty, but the matcher is not accepting"
                    if not tokens:
                        break
                    token = rng.choice(tokens)
                    mine.advance(token)
                    out += text_of[token]
                if mine.accepting:
                    ended += 1
                    assert case.check(out.decode()), f"{case.grammar}: the masks allow {out!r}, which does not match"
            assert ended or case.grammar.kind == "json_object", f"{case.grammar}: no output reached an accepting state"

    def test_special_tokens_and_spare_ids_are_never_allowed(self) -> None:
        text_of = vocabulary()[1]
        for case, matcher in self.compiled():
            wrong = self.allowed(matcher, poison=0xFFFFFFFF) - text_of.keys()
            assert not wrong, f"{case.grammar}: special tokens and spare ids must not be allowed: {wrong}"

    def test_an_output_that_can_only_end_is_finished(self) -> None:
        """The matcher is accepting, and either finished or its mask is empty."""
        for text, kind in (("no", "choice"), ("ab12", "regex"), ("{}", "json_object"), ('{"a": 1}', "json_schema")):
            for case, matcher in self.compiled():
                if case.grammar.kind == kind:
                    assert not matcher.finished, f"{case.grammar}: `finished` must be False before the output"
                    allowed = self.write(matcher, text) and matcher.accepting
                    assert allowed, f"{case.grammar}: {text!r} must be allowed and accepted"
                    ended = matcher.finished or not self.allowed(matcher)
                    assert ended, f"{case.grammar}: nothing may follow {text!r}, but the mask allows tokens"

    # Matchers

    def test_mask_overwrites_and_changes_nothing(self) -> None:
        for case, matcher in self.compiled():
            other, rng = matcher.fork(), random.Random(4)
            for _ in range(20):
                first = self.allowed(matcher)
                again = self.allowed(matcher, poison=0xFFFFFFFF)
                assert again == first, f"{case.grammar}: two masks in one state must be equal, whatever `out` held"
                if matcher.finished or not first:
                    break
                token = rng.choice(sorted(first))
                matcher.advance(token)
                other.advance(token)
                same = (other.accepting, other.finished) == (matcher.accepting, matcher.finished)
                assert same, f"{case.grammar}: mask changed the state of the matcher"
            same = other.finished or self.allowed(other) == self.allowed(matcher)
            assert same, f"{case.grammar}: mask changed the state of the matcher"

    def test_a_token_that_is_not_allowed_is_refused(self) -> None:
        for case, matcher in self.compiled():
            tokens = sorted(vocabulary()[1].keys() - self.allowed(matcher))
            with pytest.raises(RequestError):
                matcher.fork().advance(tokens[0])
            with pytest.raises(RequestError):
                matcher.fork().advance(tokens[-1])
            assert self.write(matcher, case.fit[0]), f"{case.grammar}: an error in a fork must not affect its origin"

    def test_tokens_are_taken_back(self) -> None:
        """After a rollback, masks and flags are those before the tokens, also where the output was finished."""
        for case, matcher in self.compiled():
            rng, states = random.Random(9), [(matcher.accepting, matcher.finished, self.allowed(matcher))]
            while len(states) < 12 and states[-1][2] and not matcher.finished:
                matcher.advance(rng.choice(sorted(states[-1][2])))
                allowed = set() if matcher.finished else self.allowed(matcher)
                states.append((matcher.accepting, matcher.finished, allowed))
            back = 0
            while len(states) > 1 + back:
                del states[len(states) - back :]
                matcher.rollback(back)
                allowed = set() if matcher.finished else self.allowed(matcher)
                same = (matcher.accepting, matcher.finished, allowed) == states[-1]
                assert same, f"{case.grammar}: after a rollback of {back} tokens the matcher is in another state"
                back += 1

    def test_expected_tokens_are_allowed(self) -> None:
        """`forced` names tokens that may follow each other, and changes nothing."""
        for case, matcher in self.compiled():
            allowed, expected = self.allowed(matcher), matcher.forced()
            assert self.allowed(matcher) == allowed, f"{case.grammar}: forced changed the state of the matcher"
            for token in expected:
                allows = token in self.allowed(matcher)
                assert allows, f"{case.grammar}: forced names {list(expected)}, but the mask forbids {token}"
                matcher.advance(token)

    def test_forks_are_independent(self) -> None:
        for case, matcher in self.compiled():
            rng, stem = random.Random(5), matcher.fork()
            for _ in range(8):
                if stem.finished or not (tokens := sorted(self.allowed(stem))):
                    break
                for token in tokens[:5]:
                    stem.fork().advance(token)
                assert sorted(self.allowed(stem)) == tokens, f"{case.grammar}: advancing a fork changed its origin"
                fork, token = stem.fork(), rng.choice(tokens)
                stem.advance(token)
                fork.advance(token)
                same = fork.accepting == stem.accepting and (stem.finished or self.allowed(fork) == self.allowed(stem))
                assert same, f"{case.grammar}: after equal tokens a fork and its origin must be in equal states"
            allowed = self.write(matcher, case.fit[-1]) and matcher.accepting
            assert allowed, f"{case.grammar}: forks must not affect their origin"

    def test_threads_may_compile_fork_and_mask_concurrently(self) -> None:
        """Threads share a compiler and a matcher to fork; each advances its own matcher."""
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
                assert done, f"{job[0].grammar}: {job[2]!r} must be allowed, but is not with concurrent threads"

    # Errors

    def test_a_wrong_grammar_is_refused_with_its_reason(self) -> None:
        compiler = self.make(vocabulary()[0])
        for grammar in WRONG:
            if grammar.kind in self.kinds:
                with pytest.raises(RequestError, match="grammar") as caught:
                    compiler.compile(grammar)
                assert 400 <= caught.value.status < 500, f"the status must be a client error, got {caught.value.status}"
        for case in CASES:
            if case.grammar.kind not in self.kinds:
                with pytest.raises(RequestError, match="grammar"):
                    compiler.compile(case.grammar)

    def test_an_excessive_grammar_gives_an_error_or_a_matcher(self) -> None:
        """Deep nesting, repetition or many branches must not crash or block the process."""
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
