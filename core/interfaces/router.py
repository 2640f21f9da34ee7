"""Router contract: which data-parallel replica runs a request, chosen on the host before it reaches an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.core.interfaces.records import RequestOptions


@dataclass(frozen=True, slots=True)
class Arrival(RequestOptions):
    """A request that is not assigned to a replica yet. Its `cache_salt` includes the adapter, since prefixes are cached
    per adapter."""

    prompt_ids: Sequence[int]
    samples: int = 1
    """Completions of this prompt. All of them run on one replica and share its pages."""


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """Load of one replica when a request arrives. The router's process counts samples and prompt tokens as it sends
    requests and receives results, so these two numbers are exact."""

    replica: int
    samples: int = 0
    """Samples that run or wait there."""
    prompt_tokens: int = 0
    """Prompt tokens, cached ones included, of its requests without output so far."""
    kv_usage: float = 0.0
    """Fraction of its KV pages owned by running samples; at most a quarter of a second old."""


class Router(ABC):
    """Built as `Class(config, replicas)` if there are at least two replicas. Calls do not overlap. Deterministic: equal
    calls in equal order give equal choices."""

    def __init__(self, config: object, replicas: int) -> None:
        self.config, self.replicas = config, replicas

    @abstractmethod
    def route(self, arrival: Arrival, loads: Sequence[ReplicaLoad]) -> int:
        """Return the `replica` of one entry of `loads`. `loads` lists the replicas that accept requests, ascending, at
        least one. The request is sent to the chosen replica, so the router may record the choice."""

    def forget(self, replica: int) -> None:
        """Drop assumptions about the replica's prefix cache: it is empty after a restart or a reset."""
