"""Target of a measurement: the engine in this process, or a server."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import ModelSpec, Progress, TimedRequest
from dovetail.plugins.app.bench.metrics import Timeline

if TYPE_CHECKING:
    from dovetail.core.compose import Composition
    from dovetail.core.tokenizer import Tokenizer

OnDone = Callable[[int], None]
"""on_done(number of completed requests)"""


class Target(ABC):
    """Target of a measurement. Call `start`, then `run` any number of times, then `close`."""

    remembers = False
    """Whether prompts of earlier runs may stay in the target's prefix cache."""

    def __init__(self, composition: Composition) -> None:
        self.composition = composition
        model = composition.part("model")
        spec: ModelSpec = model.facts() or model.target().spec(model.config)
        self.vocab = spec.vocab
        """Prompt ids are in [0, vocab)."""
        self.max_len = spec.longest(composition.engine.max_len)
        """Longest sequence, tokens; `start` may lower it."""

    def now(self) -> float:
        """Time in which the target runs, seconds."""
        return time.perf_counter()

    @property
    def adapters(self) -> Collection[str] | None:
        """Adapters that requests may name; None = unknown before a request is sent."""
        return None

    def check_grammars(self) -> None:
        """Raise ConfigError if the target is known not to serve requests with a grammar."""

    @abstractmethod
    def start(self, progress: Progress) -> dict[str, Any]:
        """Start the target. Returns its description for the result file: start-up times, device or address."""

    @abstractmethod
    def run(self, requests: Sequence[TimedRequest], on_done: OnDone) -> tuple[list[Timeline], dict[str, Any]]:
        """Send each request at its arrival time. Returns their timelines, in the same order, and additional figures."""

    @abstractmethod
    def close(self) -> None:
        """Release the target's resources. Idempotent."""

    def encode(self, text: str) -> Sequence[int]:
        """Tokenize a text. Raises ConfigError, which is a ValueError, if the model has no tokenizer."""
        return self.tokenizer.encode(text)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ConfigError if it has none."""
        from dovetail.core.tokenizer import Tokenizer

        model = self.composition.part("model")
        checkpoint = model.target().source(model.config).checkpoint
        if checkpoint is None:
            raise ConfigError(
                "this model has no checkpoint and therefore no tokenizer: set model.path=<folder or file>"
            )
        return Tokenizer(checkpoint)
