"""The parser seams: tool calls and reasoning in generated text, found while it streams. Chosen per request; no torch.

The text of one output goes through a reasoning parser first and a tool parser next: what looks like a call inside the
reasoning is reasoning. Both seams answer with the events below.
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
    """Text that led to the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """A call of an offered tool begins."""

    index: int
    """0, 1, ... in the order of the text."""
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """The next piece of the arguments of the call that is open, as the model wrote them."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The call is over: complete, or cut short by the end of the output or by text that cannot belong to it."""

    index: int


ParserEvent = Content | Reasoning | ToolCallBegin | ToolCallArguments | ToolCallEnd


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call, as the request describes it."""

    name: str
    description: str = ""
    parameters: Mapping[str, object] = field(default_factory=dict)
    """JSON schema of the arguments; empty: any object."""


class ParserStream(ABC):
    """One output on its way. Streams of one parser share nothing that changes.

    Text is never lost and never raises: what is no well-formed call comes out as content, word for word. Only markup is
    left out: marks, what frames a call, and blanks beside them. Where the pieces of the text are
    cut makes no difference to what comes out in sum.
    """

    @abstractmethod
    def feed(self, text: str) -> list[ParserEvent]:
        """What is certain after this piece. Text that may become a mark is held back; other text is not."""

    @abstractmethod
    def finish(self) -> list[ParserEvent]:
        """The output has ended: everything still held. Called once; nothing is fed after it."""


class ToolParser(ABC):
    """One format of tool calls. Built as `Class(config)` once, used by many requests at a time: it does not change."""

    special: tuple[str, ...] = ()
    """Special tokens of the format. The front-end keeps their text in the output, which it drops otherwise."""

    def __init__(self, config: object) -> None:
        self.config = config

    @abstractmethod
    def fits(self, chat_template: str) -> bool:
        """Whether a model with this chat template writes this format; used where no parser is named."""

    @abstractmethod
    def stream(self, tools: Sequence[Tool], *, forced: bool = False) -> ParserStream:
        """For one output. A call of anything but these tools is content. forced: the output is held to `grammar`.

        Events: Content, ToolCallBegin, ToolCallArguments, ToolCallEnd; calls one after another."""

    def grammar(self, tools: Sequence[Tool], *, parallel: bool = True) -> Grammar:
        """Outputs that are calls of these tools and nothing else: one, or with parallel one or more.

        A request that must call a tool samples under it. Raises RequestError for a format that cannot be forced."""
        raise RequestError(
            f"{type(self).__name__} cannot force a tool call: set tool_choice to auto, or choose another tool parser"
        )


class ReasoningParser(ABC):
    """One way of marking reasoning. Built as `Class(config)` once, used by many requests at a time."""

    special: tuple[str, ...] = ()
    """As in ToolParser."""

    def __init__(self, config: object) -> None:
        self.config = config

    @abstractmethod
    def fits(self, chat_template: str) -> bool:
        """Whether a model with this chat template reasons this way; used where no parser is named."""

    @abstractmethod
    def stream(self, prompt: str) -> ParserStream:
        """For one output. `prompt` is the rendered prompt: some templates open the reasoning themselves.

        Events: Reasoning, then Content."""
