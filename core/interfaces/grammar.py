"""Grammar contract: which tokens may come next, for requests whose output must have a given form.

A request carries a Grammar. A compiler turns it into a matcher outside the step loop. Each sequence has its own
matcher, which follows the output token by token and returns the allowed next tokens as a bitmask. The mask reaches the
device between a step's forward and its sampling (dovetail.core.interfaces.LateInputs).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_CHARACTERS = 1 << 20
"""Maximum length of a grammar. A compiler may allow less."""


class Grammar(BaseModel):
    """Required form of an output. Hashable: equal grammars are compiled once."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    kind: Literal["json_schema", "json_object", "regex", "choice", "lark", "ebnf"]
    """json_schema: a value that matches the schema in `value`; json_object: any JSON object; regex: the whole output
    matches; choice: one of the strings in `value`; lark: a grammar in the Lark dialect of llguidance; ebnf: a grammar
    in GBNF, the notation of llama.cpp."""
    value: str | tuple[str, ...] = ""
    """The schema (object or JSON text), regular expression, list of strings, or grammar. Empty for json_object."""

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, data: object) -> object:
        """Convert a schema to text and a list to a tuple."""
        if not isinstance(data, dict):
            return data
        value = data.get("value")
        if isinstance(value, list):
            return {**data, "value": tuple(value)}
        if data.get("kind") == "json_schema" and isinstance(value, dict | bool):
            try:
                return {**data, "value": json.dumps(value, ensure_ascii=False, separators=(",", ":"))}
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"json_schema: the schema is not JSON: {error}") from None
        return data

    @field_validator("value")
    @classmethod
    def _bounded(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        size = len(value) if isinstance(value, str) else sum(map(len, value))
        if size > MAX_CHARACTERS:
            raise ValueError(f"a grammar has {MAX_CHARACTERS} characters at most, and this one has {size}")
        return value

    @model_validator(mode="after")
    def _check(self) -> Grammar:
        if self.kind == "json_object":
            if self.value:
                raise ValueError("json_object takes no value: json_schema takes a schema")
        elif self.kind == "choice":
            if isinstance(self.value, str) or not self.value or not all(self.value):
                raise ValueError("choice: give a list of strings, none of them empty")
        elif not isinstance(self.value, str) or not self.value:
            raise ValueError(f"{self.kind}: give its text as `value`")
        return self


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Facts about the model's tokens for a compiler."""

    size: int
    """Number of logits columns. May exceed the tokenizer's vocabulary."""
    eos_ids: tuple[int, ...]
    """The model's end-of-sequence tokens."""
    tokenizer: str | None
    """Content of tokenizer.json (Hugging Face tokenizers); None = the model has none."""


class Matcher(ABC):
    """Follows one output. Calls come from one thread at a time, but the thread may change."""

    @abstractmethod
    def mask(self, out: NDArray[np.uint32]) -> None:
        """Write the allowed next tokens into out [ceil(vocabulary / 32)]: bit t % 32 of word t // 32 is token t.

        Overwrites all of `out`. The core sets the end-of-sequence tokens itself, from `accepting`, so their bits do not
        matter. Changes no state that later calls can observe. Release the GIL if the computation is long, since the
        step loop runs concurrently. Raises RequestError if a limit on the work is reached.
        """

    @abstractmethod
    def advance(self, token: int) -> None:
        """Append this token to the output. Raises RequestError if the grammar does not allow it or a limit on the work
        is reached; the matcher is unusable afterwards. Called in the step loop, and for drafts in another
        thread, so it must take microseconds."""

    @abstractmethod
    def rollback(self, tokens: int) -> None:
        """Take back the last `tokens` tokens of the output, 0 or more: the matcher is in the state before them, also if
        it had finished. Called after the masks behind a row's drafts are computed."""

    def forced(self) -> Sequence[int]:
        """Return tokens that follow with certainty or nearly so, such as the names of a JSON schema: rows verify them
        as drafts. Wrong tokens cost time and change no output. Called in the step loop after each `advance`, so it must
        take microseconds. Default: none."""
        return ()

    @property
    @abstractmethod
    def accepting(self) -> bool:
        """Whether the output may end here."""

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether the output may end here and no token may follow: the core then ends it without an end-of-sequence
        token. May return False if only an empty mask would show this."""

    @abstractmethod
    def fork(self) -> Matcher:
        """Return an independent matcher in the same state. Several threads may fork one matcher concurrently."""


class GrammarCompiler(ABC):
    """Creates matchers. Built only on rank 0, at engine start, and a second time, from the same options and vocabulary,
    in each process that checks grammars (`checked`). Importing its module must load nothing heavy."""

    timeout: float = 30.0
    """Seconds that a request waits for its grammar before it is rejected."""
    memory: int = 256 << 20
    """Most bytes that the compilation of one grammar may allocate; beyond, the grammar is rejected."""
    checked: bool = True
    """Compile each grammar in a separate process first, and in the engine's only after that succeeded: a grammar that
    exhausts stack, memory or time there is rejected, and the engine survives. False: for compilers that cannot crash
    and whose work is bounded."""

    def __init__(self, config: Any, vocabulary: Vocabulary) -> None:
        self.config, self.vocabulary = config, vocabulary

    @abstractmethod
    def compile(self, grammar: Grammar) -> Matcher:
        """Return a matcher at the start of an output. Called from several threads, never from the step loop. Grammars
        come from clients: bound the work. Raises RequestError that names the mistake in the grammar."""
