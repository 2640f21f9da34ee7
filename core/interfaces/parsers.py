"""Parser contracts: find tool calls and reasoning in generated text while it streams. Chosen per request; no torch.

The text of an output passes through the reasoning parser, then the tool parser: a call inside the reasoning is part of
the reasoning. Both contracts return the events below.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dovetail.core.errors import RequestError
from dovetail.core.interfaces.grammar import Grammar


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning text. It precedes the answer, unless the format lets both alternate."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """Start of a call of an offered tool."""

    index: int
    """Number of the call in text order, from 0."""
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """Next piece of the open call's arguments, as the model wrote them."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """End of the call: complete, or cut short by the end of the output or by text that cannot belong to it."""

    index: int


ParserEvent = Content | Reasoning | ToolCallBegin | ToolCallArguments | ToolCallEnd


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call, as the request describes it."""

    name: str
    description: str = ""
    parameters: Mapping[str, object] = field(default_factory=dict)
    """JSON schema of the arguments; empty = any object."""


class ParserStream(ABC):
    """Parser state of one output. Streams of one parser share no mutable state.

    Parsing never loses text and never raises: anything but a well-formed call is returned as content, word for word.
    Only markup is dropped: special marks, the frame of a call, and adjacent white space. The combined result does not
    depend on how the text is split into pieces.
    """

    @abstractmethod
    def feed(self, text: str) -> list[ParserEvent]:
        """Return the events that are certain after this piece of text. Only a possible start of a mark is held back."""

    @abstractmethod
    def finish(self) -> list[ParserEvent]:
        """End the output: return everything held back. Called once; no `feed` follows."""


class ToolParser(ABC):
    """One tool-call format. Built once as `Class(config)`, immutable, and used concurrently by many requests."""

    special: tuple[str, ...] = ()
    """Special tokens of the format. The front end keeps their text in the output; other special tokens are dropped."""

    def __init__(self, config: object) -> None:
        self.config = config

    @abstractmethod
    def fits(self, chat_template: str) -> bool:
        """Whether a model with this chat template writes this format. Selects the parser if none is configured."""

    @abstractmethod
    def stream(self, tools: Sequence[Tool], *, forced: bool = False) -> ParserStream:
        """Return the stream of an output: Content, ToolCallBegin, ToolCallArguments, ToolCallEnd. Calls do not overlap.
        A call of any other tool is content. `forced`: the output is constrained by `grammar`."""

    def grammar(self, tools: Sequence[Tool], *, parallel: bool = True) -> Grammar:
        """Return the grammar of outputs that are calls of these tools: one, or with `parallel` one or more. A request
        with a required tool call samples under it. Raises RequestError for a format that cannot be forced."""
        raise RequestError(
            f"{type(self).__name__} cannot force a tool call: set tool_choice to auto, or choose another tool parser"
        )


class ReasoningParser(ABC):
    """One way of marking reasoning. Built once as `Class(config)` and used concurrently by many requests."""

    special: tuple[str, ...] = ()
    """Special tokens of the format, as in ToolParser."""

    def __init__(self, config: object) -> None:
        self.config = config

    @abstractmethod
    def fits(self, chat_template: str) -> bool:
        """Whether a model with this chat template marks reasoning this way. Selects the parser by default."""

    @abstractmethod
    def stream(self, prompt: str) -> ParserStream:
        """Return the stream of one output: Reasoning, then Content; in formats with channels (gpt-oss, 2025) both may
        alternate. The rendered `prompt` may open the reasoning."""
