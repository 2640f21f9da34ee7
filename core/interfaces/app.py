"""App contract: what one run of the program does with a composition."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.core.compose import AppConfig, Composition


class App(ABC):
    """Built as `Class(config)`, then run once. Its config class derives from `AppConfig` and lists in `needs` the nodes
    that the app reads; other parts of the composition are not validated. Its options are addressed by its own name:
    `generate.max_tokens`."""

    def __init__(self, config: AppConfig) -> None:
        self.config = config

    @abstractmethod
    def run(self, composition: Composition, prompts: Sequence[str]) -> int:
        """Return the exit code. `prompts` are the unparsed words after `--`, empty unless config.takes_prompts.
        A user's mistake must be raised as a `DovetailError`, which the caller prints; the exit code is then 2."""
