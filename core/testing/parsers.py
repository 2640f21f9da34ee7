"""The contract suites of parsers. Subclass ToolParserContract or ReasoningParserContract; override what they name."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from dovetail.core.errors import RequestError
from dovetail.core.interfaces import (
    Content,
    Grammar,
    ParserEvent,
    ParserStream,
    Reasoning,
    ReasoningParser,
    Tool,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
    ToolParser,
)
from dovetail.core.testing.suite import lines_run

HELD = 64
"""Characters of plain text that a stream may hold back."""
PROSE = "It rained all day, and the road to the village was long, muddy and without any shade or shelter. " * 8


class Call(NamedTuple):
    name: str
    arguments: dict[str, object]


WEATHER = Tool(
    "get_weather",
    "Weather of a place",
    {
        "type": "object",
        "properties": {"place": {"enum": ["Oslo", "a{b}\"c'"]}, "days": {"enum": [1, 2]}},
        "required": ["place"],
        "additionalProperties": False,
    },
)
STOP = Tool("stop", parameters={"type": "object", "properties": {}, "additionalProperties": False})
TOOLS = (WEATHER, STOP)

_words = st.integers(0, 99).map(lambda n: f"word{n:02d}word")
_values = st.recursive(
    _words | st.integers(-5, 5) | st.sampled_from([True, None, 0.5, "", 'a "b" \\', "}]{[", "é€😀", "\n\t"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_words, inner, max_size=3),
    max_leaves=6,
)
_calls = st.lists(
    st.builds(Call, st.sampled_from([tool.name for tool in TOOLS]), st.dictionaries(_words, _values, max_size=3)),
    min_size=1,
    max_size=3,
)
_pieces = (
    st.sampled_from([" ", "\n", "{", "}", "[", "]", '"', ",", ":", "\\", "x", '{"name": "stop"', "1", ";"]) | _words
)


def run(stream: ParserStream, pieces: Sequence[str]) -> list[ParserEvent]:
    """Everything that comes out, neighbours of a kind joined."""
    events = [event for piece in pieces for event in stream.feed(piece)]
    return joined([*events, *stream.finish()])


def joined(events: Sequence[ParserEvent]) -> list[ParserEvent]:
    out: list[ParserEvent] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, Content | Reasoning) and type(last) is type(event):
            out[-1] = type(event)(last.text + event.text)
        elif isinstance(event, ToolCallArguments) and isinstance(last, ToolCallArguments) and last.index == event.index:
            out[-1] = ToolCallArguments(event.index, last.text + event.text)
        else:
            out.append(event)
    return out


def content_of(events: Sequence[ParserEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content))


def calls_of(events: Sequence[ParserEvent]) -> list[tuple[str, str]]:
    """(name, text of the arguments) in order. Fails where events do not come in the order of the contract."""
    calls: list[tuple[str, str]] = []
    open_call = False
    for event in events:
        assert getattr(event, "text", "-"), f"an empty piece: {event}"
        if isinstance(event, ToolCallBegin):
            assert not open_call, "a call begins within a call"
            assert event.index == len(calls), f"call {len(calls)} has index {event.index}"
            calls.append((event.name, ""))
            open_call = True
        elif isinstance(event, ToolCallArguments | ToolCallEnd):
            assert open_call and event.index == len(calls) - 1, f"{event} outside its call"
            if isinstance(event, ToolCallEnd):
                open_call = False
            else:
                calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
        else:
            assert isinstance(event, Content) and not open_call, f"{event} inside a call"
    assert not open_call, "a call that does not end"
    return calls


def words(text: str) -> list[str]:
    return re.findall(r"word\d\dword", text)


@st.composite
def cuts(draw: st.DrawFn, text: str) -> list[str]:
    """The text in pieces: single characters, or cut anywhere."""
    if draw(st.booleans()):
        return list(text)
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@st.composite
def damaged(draw: st.DrawFn, text: str) -> str:
    """Cut short, with something missing, or with something in between."""
    begin, end = sorted((draw(st.integers(0, len(text))), draw(st.integers(0, len(text)))))
    return draw(st.sampled_from([text[:end], text[:begin] + text[end:], text[:end] + draw(_pieces) + text[end:]]))


class Checks:
    """What both suites share."""

    check_settings: ClassVar[settings] = settings(
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
    )

    def examples(self, check: Callable[[st.DataObject], None], count: int = 25) -> None:
        settings(self.check_settings, max_examples=count)(given(st.data())(check))()


class ToolParserContract(Checks):
    """Every sentence of dovetail.core.interfaces.ToolParser."""

    finds_calls: ClassVar[bool] = True
    """False for a parser that takes everything for content."""
    marks: ClassVar[tuple[str, ...]] = ()
    """Pieces of markup, for texts that come near to a call."""
    template: ClassVar[str] = ""
    """A chat template, or the part of one, that the parser fits."""

    def make(self) -> ToolParser:
        raise NotImplementedError("return your parser: MyParser(MyConfig())")

    def render(self, calls: Sequence[Call]) -> str:
        """These calls, as the model writes them; json.dumps(call.arguments) for the arguments."""
        raise NotImplementedError("return the text that a model writes for these calls")

    # Drivers.

    def stream(self, tools: Sequence[Tool] = TOOLS, *, forced: bool = False) -> ParserStream:
        return self.make().stream(tools, forced=forced)

    def texts(self) -> st.SearchStrategy[str]:
        """Calls, damaged calls, and heaps of markup."""
        heaps = st.lists(_pieces | st.sampled_from(["stop", *self.marks]), max_size=8).map("".join)
        if not self.finds_calls:
            return heaps
        whole = _calls.map(self.render)
        return st.one_of(heaps, whole, whole.flatmap(damaged), st.builds(str.__add__, whole, heaps))

    def _only_if_it_finds_calls(self) -> None:
        if not self.finds_calls:
            pytest.skip("it takes everything for content")

    # Text.

    def test_text_without_a_call_comes_out_word_for_word(self) -> None:
        def check(data: st.DataObject) -> None:
            text = data.draw(self.texts())
            events = run(self.stream(), data.draw(cuts(text)))
            assert calls_of(events) or content_of(events) == text

        self.examples(check)
        for text in ("", PROSE, "  \n", "\n a { b } [c] <d>"):
            assert content_of(run(self.stream(), [text])) == text

    def test_calls_of_tools_that_are_not_offered_are_content(self) -> None:
        def check(data: st.DataObject) -> None:
            text = data.draw(self.texts())
            for tools in ((), (Tool("other"),)):
                events = run(self.stream(tools), data.draw(cuts(text)))
                assert not calls_of(events) and content_of(events) == text

        self.examples(check)

    def test_cuts_make_no_difference(self) -> None:
        def check(data: st.DataObject) -> None:
            text = data.draw(self.texts())
            forced = data.draw(st.booleans())
            whole = run(self.stream(forced=forced), [text])
            assert run(self.stream(forced=forced), data.draw(cuts(text))) == whole

        self.examples(check, 60)

    def test_nothing_is_lost(self) -> None:
        """Whatever the damage: each word that was in the text is in some event."""

        def check(data: st.DataObject) -> None:
            text = data.draw(self.texts())
            events = run(self.stream(), [text])
            calls_of(events)
            assert words("".join(getattr(event, "text", " ") for event in events)) == words(text)

        self.examples(check, 60)

    def test_plain_text_is_not_held_back(self) -> None:
        stream = self.stream()
        shown = content_of([event for char in PROSE for event in stream.feed(char)])
        assert len(shown) >= len(PROSE) - HELD, f"{len(PROSE) - len(shown)} of {len(PROSE)} characters are held back"

    def test_streams_share_nothing(self) -> None:
        parser = self.make()
        text = self.render([Call("stop", {"a": 1}), Call("get_weather", {})]) if self.finds_calls else PROSE
        expected = run(parser.stream(TOOLS), list(text))
        one, other = parser.stream(TOOLS), parser.stream(TOOLS)
        out: tuple[list[ParserEvent], list[ParserEvent]] = ([], [])
        for i in range(len(text) + 7):
            out[0].extend(one.feed(text[i : i + 1]))
            out[1].extend(other.feed(text[i - 7 : i - 6]) if i >= 7 else [])
        assert joined([*out[0], *one.finish()]) == joined([*out[1], *other.finish()]) == expected

    # Calls.

    def test_calls_are_found(self) -> None:
        self._only_if_it_finds_calls()

        def check(data: st.DataObject) -> None:
            calls = data.draw(_calls)
            events = run(self.stream(), [self.render(calls)])
            found = [Call(name, json.loads(arguments)) for name, arguments in calls_of(events)]
            assert found == calls
            assert not content_of(events), "what belongs to a call came out as content"

        self.examples(check)

    def test_what_breaks_off_within_the_arguments_is_a_call_cut_short(self) -> None:
        """A client sees as much as came."""
        self._only_if_it_finds_calls()
        text = self.render([Call("stop", {"first": "word00word", "second": "word01word"})])
        events = run(self.stream(), [text[: text.index("word01word") + 4]])
        ((name, arguments),) = calls_of(events)
        assert name == "stop" and arguments.startswith("{") and arguments.endswith("word")

    def test_arguments_are_not_held_back(self) -> None:
        self._only_if_it_finds_calls()
        text = self.render([Call("stop", {"text": PROSE})])
        half = text.index(PROSE) + len(PROSE) // 2
        stream = self.stream()
        events = [event for char in text[:half] for event in stream.feed(char)]
        shown = sum(len(event.text) for event in events if isinstance(event, ToolCallArguments))
        assert shown >= len(PROSE) // 2 - HELD, f"{shown} characters of {len(PROSE) // 2} are out"

    def test_cost_grows_with_the_text_and_not_faster(self) -> None:
        """Counts lines of Python, which do not depend on the machine."""
        costs = []
        for length in (1, 4):
            text = PROSE[: 150 * length]
            if self.finds_calls:
                text = self.render([Call("stop", {"text": text})]) + "".join(self.marks) * 4 * length
            costs.append(lines_run(lambda text=text: run(self.stream(), list(text))))  # type: ignore[misc]
        assert costs[1] <= 5 * costs[0], f"{costs[0]} lines for a text and {costs[1]} for one four times as long"

    def test_it_fits_the_templates_of_its_models_alone(self) -> None:
        assert not self.make().fits("")
        assert not self.make().fits("{% for message in messages %}{{ message.content }}{% endfor %}")
        assert not self.template or self.make().fits(self.template)

    # Being forced.

    @pytest.mark.parametrize("parallel", [False, True])
    def test_what_the_grammar_allows_are_calls(self, parallel: bool) -> None:
        """Random texts under the grammar; none where the format cannot be forced."""
        for tools in (TOOLS, (WEATHER,)):
            try:
                grammar = self.make().grammar(tools, parallel=parallel)
            except RequestError:
                pytest.skip("this format cannot be forced")
            allowed = {tool.name for tool in tools}
            for seed in range(6):
                text = random_text(grammar, seed)
                for pieces in ([text], list(text)):
                    events = run(self.stream(tools, forced=True), pieces)
                    calls = calls_of(events)
                    assert calls and not content_of(events), f"{text!r} is allowed, and is more or less than calls"
                    assert parallel or len(calls) == 1, f"{text!r} is allowed, and is {len(calls)} calls"
                    for name, arguments in calls:
                        assert name in allowed
                        assert name == "stop" or json.loads(arguments)["place"] in ("Oslo", "a{b}\"c'")

    def test_tools_whose_arguments_are_no_object_cannot_be_forced(self) -> None:
        """RequestError, because the description came from a client."""
        with pytest.raises(RequestError):
            self.make().grammar([Tool("stop", parameters={"type": "array"})])


def random_text(grammar: Grammar, seed: int) -> str:
    """One text that the grammar allows, byte by byte; blanks that JSON allows between tokens are taken rarely."""
    import llguidance

    forms: dict[str, Any] = {
        "lark": llguidance.LLMatcher.grammar_from_lark,
        "json_schema": llguidance.LLMatcher.grammar_from_json_schema,
        "regex": llguidance.LLMatcher.grammar_from_regex,
    }
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), forms[grammar.kind](grammar.value))
    assert not matcher.is_error(), f"{matcher.get_error()} in\n{grammar.value}"
    rng, out = random.Random(seed), bytearray()
    while not matcher.is_stopped() and len(out) < 4000:
        bias = matcher.compute_logit_bias()
        options = [token for token in range(256) if bias[token]]
        if not options or (matcher.is_accepting() and rng.random() < 0.5):
            break
        ink = [token for token in options if token not in b" \t\r\n"]
        byte = rng.choice(ink if ink and rng.random() < 0.9 else options)
        assert matcher.consume_token(byte), matcher.get_error()
        out.append(byte)
    assert matcher.is_accepting() or matcher.is_stopped(), f"no end in {bytes(out)!r}"
    return out.decode()


class ReasoningParserContract(Checks):
    """Every sentence of dovetail.core.interfaces.ReasoningParser."""

    finds_reasoning: ClassVar[bool] = True
    """False for a parser that takes everything for content."""
    marks: ClassVar[tuple[str, ...]] = ()
    """Pieces of markup, for texts that come near to it."""
    template: ClassVar[str] = ""
    """A chat template, or the part of one, that the parser fits."""

    def make(self) -> ReasoningParser:
        raise NotImplementedError("return your parser: MyParser(MyConfig())")

    def render(self, reasoning: str, answer: str) -> tuple[str, str]:
        """The end of a prompt, and the output that a model writes after it."""
        raise NotImplementedError("return a prompt and the text that a model writes")

    def texts(self) -> st.SearchStrategy[tuple[str, str]]:
        heaps = st.lists(_pieces | st.sampled_from(["a", *self.marks]), max_size=8).map("".join)
        prompts = st.sampled_from(["", "Hi", *self.marks])
        if not self.finds_reasoning:
            return st.tuples(prompts, heaps)
        return st.one_of(st.tuples(prompts, heaps), st.builds(self.render, heaps, heaps))

    def test_cuts_make_no_difference(self) -> None:
        def check(data: st.DataObject) -> None:
            prompt, text = data.draw(self.texts())
            whole = run(self.make().stream(prompt), [text])
            assert run(self.make().stream(prompt), data.draw(cuts(text))) == whole

        self.examples(check, 40)

    def test_reasoning_comes_first_and_nothing_is_lost(self) -> None:
        def check(data: st.DataObject) -> None:
            prompt, text = data.draw(self.texts())
            events = run(self.make().stream(prompt), data.draw(cuts(text)))
            kinds = [type(event) for event in events]
            assert kinds in ([], [Content], [Reasoning], [Reasoning, Content]), kinds
            assert all(event.text for event in events), "an empty piece"  # type: ignore[union-attr]
            out = "".join(event.text for event in events)  # type: ignore[union-attr]
            assert words(out) == words(text)

        self.examples(check, 40)

    def test_text_without_marks_comes_out_word_for_word(self) -> None:
        for text in ("", PROSE, "  \n", "\n a { b } [c] <d>"):
            for pieces in ([text], list(text)):
                assert run(self.make().stream("Hi"), pieces) == ([Content(text)] if text else [])

    def test_the_beginning_of_a_mark_is_not_lost(self) -> None:
        """An output may end there."""
        for prompt in ("", *self.marks):
            for text in ("word00word " + mark[:n] for mark in self.marks for n in range(1, len(mark))):
                events = run(self.make().stream(prompt), list(text))
                assert "".join(event.text for event in events) == text  # type: ignore[union-attr]

    def test_reasoning_is_found(self) -> None:
        if not self.finds_reasoning:
            pytest.skip("it takes everything for content")

        def check(data: st.DataObject) -> None:
            reasoning, answer = (" ".join(data.draw(st.lists(_words, min_size=1, max_size=4))) for _ in range(2))
            assume(reasoning and answer)
            prompt, text = self.render(reasoning, answer)
            assert run(self.make().stream(prompt), data.draw(cuts(text))) == [Reasoning(reasoning), Content(answer)]

        self.examples(check)

    def test_text_is_not_held_back(self) -> None:
        texts = [("", PROSE)]
        if self.finds_reasoning:
            prompt, text = self.render(PROSE.strip(), "yes")
            texts.append((prompt, text[: text.index(PROSE.strip()) + 400]))
        for prompt, text in texts:
            stream = self.make().stream(prompt)
            out = "".join(event.text for char in text for event in stream.feed(char))  # type: ignore[union-attr]
            assert len(out) >= len(text) - HELD, f"{len(text) - len(out)} of {len(text)} characters are held back"

    def test_streams_share_nothing(self) -> None:
        parser = self.make()
        prompt, text = self.render("so", "yes") if self.finds_reasoning else ("", PROSE)
        expected = run(parser.stream(prompt), list(text))
        one, other = parser.stream(prompt), parser.stream(prompt)
        out: tuple[list[ParserEvent], list[ParserEvent]] = ([], [])
        for char in text:
            out[0].extend(one.feed(char))
            out[1].extend(other.feed(char))
        assert joined([*out[0], *one.finish()]) == joined([*out[1], *other.finish()]) == expected

    def test_it_fits_the_templates_of_its_models_alone(self) -> None:
        assert not self.make().fits("")
        assert not self.make().fits("{% for message in messages %}{{ message.content }}{% endfor %}")
        assert not self.template or self.make().fits(self.template)
