"""Contract suites for parsers. Subclass ToolParserContract or ReasoningParserContract; override `make` and `render`."""

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
    Tool,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from dovetail.core.testing.suite import lines_run

HELD = 64
"""Maximum number of characters of plain text that a stream may hold back."""
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
    """Feed the pieces and return all events, with adjacent events of one kind joined."""
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
    """Return (name, text of the arguments) in order. Assert that the order of events follows the contract."""
    calls: list[tuple[str, str]] = []
    open_call = False
    for event in events:
        assert getattr(event, "text", "-"), f"the text of an event must not be empty: {event}"
        if isinstance(event, ToolCallBegin):
            assert not open_call, f"ToolCallEnd must precede the next {event}"
            assert event.index == len(calls), f"indices count calls from 0: expected {len(calls)}, got {event.index}"
            calls.append((event.name, ""))
            open_call = True
        elif isinstance(event, ToolCallArguments | ToolCallEnd):
            assert open_call and event.index == len(calls) - 1, f"{event} must come between begin and end of its call"
            if isinstance(event, ToolCallEnd):
                open_call = False
            else:
                calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
        else:
            assert isinstance(event, Content) and not open_call, f"a call must not contain {event}"
    assert not open_call, "every call must end with ToolCallEnd"
    return calls


def words(text: str) -> list[str]:
    return re.findall(r"word\d\dword", text)


@st.composite
def cuts(draw: st.DrawFn, text: str) -> list[str]:
    """Split the text into single characters or at random places."""
    if draw(st.booleans()):
        return list(text)
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@st.composite
def damaged(draw: st.DrawFn, text: str) -> str:
    """Truncate the text, remove a part, or replace a part."""
    begin, end = sorted((draw(st.integers(0, len(text))), draw(st.integers(0, len(text)))))
    return draw(st.sampled_from([text[:end], text[:begin] + text[end:], text[:end] + draw(_pieces) + text[end:]]))


class Checks:
    """Common part of both suites."""

    marks: ClassVar[tuple[str, ...]] = ()
    """Parts of the format's markup, used to generate texts that resemble it."""
    template: ClassVar[str] = ""
    """Chat template, or part of one, that the parser fits."""
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

    def make(self) -> Any:
        """Return a fresh parser."""
        raise NotImplementedError("return your parser: MyParser(MyConfig())")

    def interleave(self, stream: Callable[[], ParserStream], text: str) -> None:
        """Assert that two streams, the second 7 characters behind the first, both give the events of one alone."""
        one, other, out = stream(), stream(), (list[ParserEvent](), list[ParserEvent]())
        for i in range(len(text) + 7):
            out[0].extend(one.feed(text[i : i + 1]))
            out[1].extend(other.feed(text[i - 7 : i - 6]) if i >= 7 else [])
        found = [joined([*out[0], *one.finish()]), joined([*out[1], *other.finish()])]
        assert found == [run(stream(), list(text))] * 2, "streams of one parser must not share state"

    def test_it_fits_only_the_templates_of_its_models(self) -> None:
        for other in ("", "{% for message in messages %}{{ message.content }}{% endfor %}"):
            assert not self.make().fits(other), f"fits() must be False for another model's template: {other!r}"
        assert not self.template or self.make().fits(self.template), "fits() must be True for `template`"


class ToolParserContract(Checks):
    """Tests of the rules of dovetail.core.interfaces.ToolParser."""

    finds_calls: ClassVar[bool] = True
    """Whether the parser finds calls. False: it treats all text as content."""

    def render(self, calls: Sequence[Call]) -> str:
        """Return these calls as the model writes them, with json.dumps(call.arguments) for the arguments."""
        raise NotImplementedError("return the text that a model writes for these calls")

    # Drivers

    def stream(self, tools: Sequence[Tool] = TOOLS, *, forced: bool = False) -> ParserStream:
        return self.make().stream(tools, forced=forced)

    def texts(self) -> st.SearchStrategy[str]:
        """Strategy for calls, damaged calls and random markup."""
        noise = st.lists(_pieces | st.sampled_from(["stop", *self.marks]), max_size=8).map("".join)
        if not self.finds_calls:
            return noise
        whole = _calls.map(self.render)
        return st.one_of(noise, whole, whole.flatmap(damaged), st.builds(str.__add__, whole, noise))

    def _only_if_it_finds_calls(self) -> None:
        if not self.finds_calls:
            pytest.skip("finds_calls = False")

    # Text

    def test_text_without_a_call_is_unchanged(self) -> None:
        def check(data: st.DataObject) -> None:
            text = data.draw(self.texts())
            events = run(self.stream(), data.draw(cuts(text)))
            assert calls_of(events) or content_of(events) == text, "text without a call must be content, unchanged"

        self.examples(check)
        for text in ("", PROSE, "  \n", "\n a { b } [c] <d>"):
            found = content_of(run(self.stream(), [text]))
            assert found == text, f"text without a call must be content: expected {text!r}, got {found!r}"

    def test_calls_of_tools_that_are_not_offered_are_content(self) -> None:
        def check(data: st.DataObject) -> None:
            text = data.draw(self.texts())
            for tools in ((), (Tool("other"),)):
                events = run(self.stream(tools), data.draw(cuts(text)))
                kept = not calls_of(events) and content_of(events) == text
                assert kept, f"a call of a tool that is not offered must be content, unchanged; got {events}"

        self.examples(check)

    def test_cuts_make_no_difference(self) -> None:
        def check(data: st.DataObject) -> None:
            text = data.draw(self.texts())
            forced = data.draw(st.booleans())
            whole = run(self.stream(forced=forced), [text])
            found = run(self.stream(forced=forced), data.draw(cuts(text)))
            assert found == whole, "events must not depend on how the text is split into pieces"

        self.examples(check, 60)

    def test_nothing_is_lost(self) -> None:
        """Each word of the text is in some event, even if a call is damaged."""

        def check(data: st.DataObject) -> None:
            text = data.draw(self.texts())
            events = run(self.stream(), [text])
            calls_of(events)
            found = words("".join(getattr(event, "text", " ") for event in events))
            assert found == words(text), f"every word of {text!r} must be in an event"

        self.examples(check, 60)

    def test_plain_text_is_not_held_back(self) -> None:
        stream = self.stream()
        shown = content_of([event for char in PROSE for event in stream.feed(char)])
        held = len(PROSE) - len(shown)
        assert held <= HELD, f"{held} characters of plain text are held back, at most {HELD} may be"

    def test_streams_share_nothing(self) -> None:
        parser = self.make()
        text = self.render([Call("stop", {"a": 1}), Call("get_weather", {})]) if self.finds_calls else PROSE
        self.interleave(lambda: parser.stream(TOOLS), text)

    # Calls

    def test_calls_are_found(self) -> None:
        self._only_if_it_finds_calls()

        def check(data: st.DataObject) -> None:
            calls = data.draw(_calls)
            events = run(self.stream(), [self.render(calls)])
            found = [Call(name, json.loads(arguments)) for name, arguments in calls_of(events)]
            assert found == calls, "calls must be found with their names and arguments"
            assert not content_of(events), f"markup of a call must not be content: {content_of(events)!r}"

        self.examples(check)

    def test_a_text_that_ends_within_arguments_is_a_truncated_call(self) -> None:
        """The client receives the arguments as far as they were generated."""
        self._only_if_it_finds_calls()
        text = self.render([Call("stop", {"first": "word00word", "second": "word01word"})])
        events = run(self.stream(), [text[: text.index("word01word") + 4]])
        ((name, arguments),) = calls_of(events)
        truncated = name == "stop" and arguments.startswith("{") and arguments.endswith("word")
        assert truncated, f"expected a call of 'stop' with truncated arguments, got {name!r} with {arguments!r}"

    def test_arguments_are_not_held_back(self) -> None:
        self._only_if_it_finds_calls()
        text = self.render([Call("stop", {"text": PROSE})])
        half = text.index(PROSE) + len(PROSE) // 2
        stream = self.stream()
        events = [event for char in text[:half] for event in stream.feed(char)]
        shown = sum(len(event.text) for event in events if isinstance(event, ToolCallArguments))
        held = len(PROSE) // 2 - shown
        assert held <= HELD, f"{held} characters of arguments are held back, at most {HELD} may be"

    def test_cost_is_linear_in_the_text(self) -> None:
        """Count lines of Python, a machine-independent measure."""
        costs = []
        for length in (1, 4):
            text = PROSE[: 150 * length]
            if self.finds_calls:
                text = self.render([Call("stop", {"text": text})]) + "".join(self.marks) * 4 * length
            costs.append(lines_run(lambda text=text: run(self.stream(), list(text))))  # type: ignore[misc]
        assert costs[1] <= 5 * costs[0], f"a text takes {costs[0]} lines, one four times as long {costs[1]}: not linear"

    # Forced calls

    @pytest.mark.parametrize("parallel", [False, True])
    def test_texts_of_the_grammar_are_calls(self, parallel: bool) -> None:
        """Random texts that the grammar allows are parsed as calls."""
        for tools in (TOOLS, (WEATHER,)):
            try:
                grammar = self.make().grammar(tools, parallel=parallel)
            except RequestError:
                pytest.skip("grammar() raises RequestError: the format cannot be forced")
            allowed = {tool.name for tool in tools}
            for seed in range(6):
                text = random_text(grammar, seed)
                for pieces in ([text], list(text)):
                    events = run(self.stream(tools, forced=True), pieces)
                    calls = calls_of(events)
                    only = calls and not content_of(events)
                    assert only, f"the grammar allows {text!r}, which is not parsed as calls alone: {events}"
                    single = parallel or len(calls) == 1
                    assert single, f"without `parallel` the grammar must allow one call, but allows {text!r}"
                    for name, arguments in calls:
                        assert name in allowed, f"the grammar allows a call of {name!r}, which is not offered"
                        fits = name == "stop" or json.loads(arguments)["place"] in ("Oslo", "a{b}\"c'")
                        assert fits, f"the grammar allows arguments that violate the tool's schema: {arguments}"

    def test_tools_whose_arguments_are_no_object_cannot_be_forced(self) -> None:
        """The tool's description comes from a client, so the error is a RequestError."""
        with pytest.raises(RequestError):
            self.make().grammar([Tool("stop", parameters={"type": "array"})])


def random_text(grammar: Grammar, seed: int) -> str:
    """Generate a text that the grammar allows, byte by byte, with few of the blanks that JSON allows between tokens."""
    import llguidance

    forms: dict[str, Any] = {
        "lark": llguidance.LLMatcher.grammar_from_lark,
        "json_schema": llguidance.LLMatcher.grammar_from_json_schema,
        "regex": llguidance.LLMatcher.grammar_from_regex,
    }
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), forms[grammar.kind](grammar.value))
    assert not matcher.is_error(), f"llguidance rejects the grammar: {matcher.get_error()} in\n{grammar.value}"
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
    assert matcher.is_accepting() or matcher.is_stopped(), f"the grammar does not end after {bytes(out)!r}"
    return out.decode()


class ReasoningParserContract(Checks):
    """Tests of the rules of dovetail.core.interfaces.ReasoningParser."""

    finds_reasoning: ClassVar[bool] = True
    """Whether the parser finds reasoning. False: it treats all text as content."""
    alternates: ClassVar[bool] = False
    """Whether the format allows more reasoning after the beginning of the answer, as one with channels does."""

    def render(self, reasoning: str, answer: str) -> tuple[str, str]:
        """Return the end of a prompt and the output that a model writes after it."""
        raise NotImplementedError("return a prompt and the text that a model writes")

    def texts(self) -> st.SearchStrategy[tuple[str, str]]:
        noise = st.lists(_pieces | st.sampled_from(["a", *self.marks]), max_size=8).map("".join)
        prompts = st.sampled_from(["", "Hi", *self.marks])
        if not self.finds_reasoning:
            return st.tuples(prompts, noise)
        return st.one_of(st.tuples(prompts, noise), st.builds(self.render, noise, noise))

    def test_cuts_make_no_difference(self) -> None:
        def check(data: st.DataObject) -> None:
            prompt, text = data.draw(self.texts())
            whole = run(self.make().stream(prompt), [text])
            found = run(self.make().stream(prompt), data.draw(cuts(text)))
            assert found == whole, "events must not depend on how the text is split into pieces"

        self.examples(check, 40)

    def test_reasoning_comes_first_and_nothing_is_lost(self) -> None:
        def check(data: st.DataObject) -> None:
            prompt, text = data.draw(self.texts())
            events = run(self.make().stream(prompt), data.draw(cuts(text)))
            kinds = [type(event) for event in events]
            ordered = kinds in ([], [Content], [Reasoning], [Reasoning, Content])
            assert ordered or self.alternates, f"reasoning must come before content, got {events}"
            texts = [event.text for event in events]  # type: ignore[union-attr]
            assert all(texts), f"the text of an event must not be empty: {events}"
            assert words("".join(texts)) == words(text), f"every word of {text!r} must be in an event"

        self.examples(check, 40)

    def test_text_without_marks_is_unchanged(self) -> None:
        for text in ("", PROSE, "  \n", "\n a { b } [c] <d>"):
            for pieces in ([text], list(text)):
                found = run(self.make().stream("Hi"), pieces)
                assert found == ([Content(text)] if text else []), "text without markup must be content, unchanged"

    def test_the_beginning_of_a_mark_is_not_lost(self) -> None:
        """An output may end within a mark."""
        for prompt in ("", *self.marks):
            for text in ("word00word " + mark[:n] for mark in self.marks for n in range(1, len(mark))):
                events = run(self.make().stream(prompt), list(text))
                found = "".join(event.text for event in events)  # type: ignore[union-attr]
                assert found == text, f"an incomplete mark at the end is text: expected {text!r}, got {found!r}"

    def test_reasoning_is_found(self) -> None:
        if not self.finds_reasoning:
            pytest.skip("finds_reasoning = False")

        def check(data: st.DataObject) -> None:
            reasoning, answer = (" ".join(data.draw(st.lists(_words, min_size=1, max_size=4))) for _ in range(2))
            assume(reasoning and answer)
            prompt, text = self.render(reasoning, answer)
            found = run(self.make().stream(prompt), data.draw(cuts(text)))
            assert found == [Reasoning(reasoning), Content(answer)], f"events of {text!r}"

        self.examples(check)

    def test_text_is_not_held_back(self) -> None:
        texts = [("", PROSE)]
        if self.finds_reasoning:
            prompt, text = self.render(PROSE.strip(), "yes")
            texts.append((prompt, text[: text.index(PROSE.strip()) + 400]))
        for prompt, text in texts:
            stream = self.make().stream(prompt)
            out = "".join(event.text for char in text for event in stream.feed(char))
            held = len(text) - len(out)
            assert held <= HELD, f"{held} characters are held back, at most {HELD} may be"

    def test_streams_share_nothing(self) -> None:
        parser = self.make()
        prompt, text = self.render("so", "yes") if self.finds_reasoning else ("", PROSE)
        self.interleave(lambda: parser.stream(prompt), text)
