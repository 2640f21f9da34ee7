"""Stop strings and incremental text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dovetail.core.frontend.outputs import StopStringMatcher
from dovetail.core.interfaces import SamplingParams


class Letters:
    """A tokenizer whose token i is the string PIECES[i]."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def stream(self, keep=()) -> Letters:
        return self

    def push(self, token: int) -> str:
        return self.pieces[token]

    def finish(self) -> str:
        return ""


def matcher(pieces: list[str], **params: object) -> StopStringMatcher:
    return StopStringMatcher(SamplingParams(**params), Letters(pieces))  # type: ignore[arg-type]


@given(
    st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3, unique=True),
    st.booleans(),
    st.integers(1, 4),
)
def test_stop_strings_end_the_text_where_they_begin(
    pieces: list[str], stop: list[str], include: bool, group: int
) -> None:
    """For any split of the text into tokens, and of tokens into steps."""
    subject = matcher(pieces, stop=tuple(stop), include_stop=include)
    text, used, whole = "", 0, ""
    while used < len(pieces) and not any(s in whole for s in stop):
        whole += pieces[used]
        used += 1
    hits = [(whole.find(s), s) for s in stop if s in whole]
    stopped = False
    tokens = list(range(len(pieces)))
    for i in range(0, len(tokens), group):
        new, stopped = subject.push(tokens[i : i + group])
        text += new
        if stopped:
            break
    if hits:
        at, s = min(hits)
        assert stopped and text == whole[: at + (len(s) if include else 0)]
        assert subject.tokens == used
    else:
        assert not stopped and text + subject.flush() == whole


def test_text_that_cannot_become_a_stop_string_is_shown_at_once() -> None:
    subject = matcher(["hel", "lo ", "EN", "X", "END"], stop="END")
    assert [subject.push([i])[0] for i in range(5)] == ["hel", "lo ", "", "ENX", ""]
