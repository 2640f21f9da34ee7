"""The grammar seam: which tokens may come next, for requests whose output must have a given form.

A request carries a Grammar. A compiler turns it into a matcher off the step loop; each sequence then has a matcher of
its own, which follows its output token by token and says as a bitmask what may follow. The mask reaches the device
between a step's forward and its sampling (dovetail.core.interfaces.LateInputs).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_CHARACTERS = 1 << 20
"""Of a grammar. A compiler may allow less."""


class Grammar(BaseModel):
    """The form of an output. Hashable: equal grammars are compiled once."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    kind: Literal["json_schema", "json_object", "regex", "choice", "lark", "ebnf"]
    """json_schema: a value that the schema in `value` allows; json_object: any JSON object; regex: the whole output
    matches; choice: one of the strings in `value`; lark: a grammar in the Lark dialect of llguidance; ebnf: a grammar
    in GBNF, the notation of llama.cpp."""
    value: str | tuple[str, ...] = ""
    """The schema (an object, or its JSON text), the regular expression, the strings to choose from, or the grammar.
    Nothing for json_object."""

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, data: object) -> object:
        """A schema as text, a list as a tuple."""
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
    """What a compiler may know of the model's tokens."""

    size: int
    """Columns of the logits. It may exceed the tokenizer's own count."""
    eos_ids: tuple[int, ...]
    """The model's end-of-sequence tokens."""
    tokenizer: Path | None
    """The tokenizer.json of Hugging Face's tokenizers; None where the model has none."""


class Matcher(ABC):
    """Follows one output. One thread at a time calls it, not always the same one."""

    @abstractmethod
    def mask(self, out: NDArray[np.uint32]) -> None:
        """Write which tokens may come next into out [ceil(vocabulary / 32)]: bit t % 32 of word t // 32 is token t.

        Whatever `out` held is overwritten. End-of-sequence tokens are the core's: it allows them where `accepting`, so
        what is written of them does not matter. Changes nothing that a later call could see; release the GIL where it
        takes long, since the step loop runs meanwhile. Raises RequestError when a limit on the work is reached.
        """

    @abstractmethod
    def advance(self, token: int) -> None:
        """The output goes on with this token. Raises RequestError if the grammar does not allow that, or a limit on the
        work is reached; the matcher is then of no more use. Called in the step loop: microseconds."""

    @property
    @abstractmethod
    def accepting(self) -> bool:
        """The output may end here."""

    @property
    @abstractmethod
    def finished(self) -> bool:
        """The output may end here, and no token may follow: the core then ends it without an end-of-sequence token.
        Where only an empty mask would tell, False is fine."""

    @abstractmethod
    def fork(self) -> Matcher:
        """An independent matcher in the same state. Several threads may fork one matcher."""


class GrammarCompiler(ABC):
    """Makes matchers. Built on rank 0 alone, when the engine starts; importing its module loads nothing heavy."""

    timeout: float = 30.0
    """Seconds after which a request no longer waits for its grammar and is refused."""

    def __init__(self, config: Any, vocabulary: Vocabulary) -> None:
        self.config, self.vocabulary = config, vocabulary

    @abstractmethod
    def compile(self, grammar: Grammar) -> Matcher:
        """A matcher at the start of an output. Several threads call it, never the step loop. Grammars come from
        clients: bound the work. Raises RequestError, which names what is wrong with the grammar."""
