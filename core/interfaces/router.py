"""The router seam: which data-parallel replica runs a request. It works at the front door, on the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.core.interfaces.records import RequestOptions


@dataclass(frozen=True, slots=True)
class Arrival(RequestOptions):
    """A request that has no replica yet. Its `cache_salt` includes the adapter: prefixes are cached per adapter."""

    prompt_ids: Sequence[int]
    samples: int = 1
    """Completions of this prompt; all of them run on one replica and share its pages."""


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """One replica as the front door sees it when a request arrives. It counts what it sent and what came back, so the
    first two are exact."""

    replica: int
    samples: int = 0
    """That run or wait there."""
    prompt_tokens: int = 0
    """Of requests there that have no output yet, cached ones included."""
    kv_usage: float = 0.0
    """Share of its KV pages that running samples own, up to a quarter of a second ago."""


class Router(ABC):
    """Built as `Class(config, replicas)`, where there are two replicas or more. Calls never overlap. Equal calls in the
    same order give equal choices."""

    def __init__(self, config: object, replicas: int) -> None:
        self.config, self.replicas = config, replicas

    @abstractmethod
    def route(self, arrival: Arrival, loads: Sequence[ReplicaLoad]) -> int:
        """The `replica` of one of `loads`, which are those that take requests, rising, at least one. The request goes
        there: the router may remember it."""

    def forget(self, replica: int) -> None:
        """Its prefix cache is empty: it died and starts anew, or its cache was reset."""
