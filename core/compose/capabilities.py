"""Capabilities that components state and requirements between them: plain data, so that it can be checked and
tabulated.

A component's capabilities function takes (config, host) and returns `Capabilities`. Requirements may name a kind or one
of three other records: `engine` (its config values), `host` (the record below) and `model` (what the model component
provides, together with facts from the checkpoint).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from dovetail.core.compose.wording import show

FP8_HARDWARE = (8, 9)
"""Compute capability from which GPUs convert and multiply FP8: Ada, then Hopper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The machine that a composition is checked for. Plain values, so that a check needs no device."""

    device: str = "cpu"
    """"cpu" or "cuda"."""
    device_count: int = 0
    """Number of GPUs that this process may use."""
    compute_capability: tuple[int, int] = (0, 0)
    """Compute capability of the first GPU; (9, 0) is Hopper."""
    memory_bytes: int = 0
    """Memory of the first GPU; on the CPU, of the machine."""
    platform: str = "linux"
    """sys.platform."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requires:
    """One requirement on another part. Set exactly one of `allowed`, `contains`, `at_least`, `at_most`."""

    kind: str
    """A kind, "engine", "model" or "host"."""
    key: str
    """Required fact: a key of that part's `provides`, or a field of the engine's config or of the host."""
    reason: str
    """Reason, as the end of a sentence: "its kernel reads pages of that size"."""
    allowed: tuple[object, ...] | None = None
    """The value must be one of these."""
    contains: object | None = None
    """The value must be a collection that contains this."""
    at_least: Any = None
    at_most: Any = None

    def __post_init__(self) -> None:
        given = [n for n in ("allowed", "contains", "at_least", "at_most") if getattr(self, n) is not None]
        if len(given) != 1:
            raise ValueError(f"Requires({self.kind}.{self.key}) gives {given or 'no bound'}; give exactly one")

    def admits(self, value: object) -> bool:
        # True == 1 in Python, but a flag is not a count.
        if self.allowed is not None:
            return any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in self.allowed)
        if self.contains is not None:
            return isinstance(value, Collection) and self.contains in value
        if self.at_least is not None:
            return bool(value >= self.at_least)
        return bool(value <= self.at_most)

    def words(self) -> str:
        if self.allowed is not None:
            names = " or ".join(show(a) for a in self.allowed)
            return f"{self.key} {names}"
        if self.contains is not None:
            return f"{show(self.contains)} among {self.key}"
        if self.at_least is not None:
            return f"{self.key} at least {self.at_least}"
        return f"{self.key} at most {self.at_most}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    provides: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    """Facts that other parts may require. Values are strings, numbers, flags or tuples of these."""
    requires: tuple[Requires, ...] = ()
    lacks: tuple[str, ...] = ()
    """Prerequisites missing on this host, whatever the other parts, and the remedy: "the package x: pip install x"."""
