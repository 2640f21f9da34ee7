"""What is measured: the engine in this process, or a server."""

from __future__ import annotations

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
"""on_done(requests complete so far)"""


class Target(ABC):
    """`start`, then `run` any number of times, then `close`."""

    remembers = False
    """What one run left in its prefix cache is there in the next."""

    def __init__(self, composition: Composition) -> None:
        self.composition = composition
        model = composition.part("model")
        spec: ModelSpec = model.facts() or model.target().spec(model.config)
        self.vocab = spec.vocab
        """Prompt ids lie in [0, vocab)."""
        self.max_len = spec.longest(composition.engine.max_len)
        """Tokens of the longest sequence; start may find that it is less."""

    @property
    def adapters(self) -> Collection[str] | None:
        """Those that requests may name; None = not known before they ask."""
        return None

    @abstractmethod
    def start(self, progress: Progress) -> dict[str, Any]:
        """Get ready. What the result says about it: start-up seconds by phase, versions, the server's address."""

    @abstractmethod
    def run(self, requests: Sequence[TimedRequest], on_done: OnDone) -> tuple[list[Timeline], dict[str, Any]]:
        """Send each request when its time has come; its timeline, in their order, and what else can be told."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent."""

    def encode(self, text: str) -> Sequence[int]:
        """Raises ConfigError, a ValueError, where the model has no tokenizer."""
        return self.tokenizer.encode(text)

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ConfigError where the model has none."""
        from dovetail.core.tokenizer import Tokenizer

        model = self.composition.part("model")
        folder = model.target().source(model.config).folder
        if folder is None:
            raise ConfigError("this model has shapes and no folder, so it has no tokenizer: set model.path=<folder>")
        return Tokenizer(folder)
