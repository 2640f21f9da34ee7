"""Contract suite for every built-in router."""

from __future__ import annotations

from dovetail.core.interfaces import Router
from dovetail.core.testing.router import RouterContract
from dovetail.plugins.router.config import LeastLoadedConfig, PrefixAwareConfig, RoundRobinConfig
from dovetail.plugins.router.load import LeastLoaded, PrefixAware
from dovetail.plugins.router.round_robin import RoundRobin


class TestRoundRobin(RouterContract):
    def make(self, replicas: int) -> Router:
        return RoundRobin(RoundRobinConfig(), replicas)


class TestLeastLoaded(RouterContract):
    def make(self, replicas: int) -> Router:
        return LeastLoaded(LeastLoadedConfig(), replicas)


class TestPrefixAware(RouterContract):
    def make(self, replicas: int) -> Router:
        return PrefixAware(PrefixAwareConfig(), replicas)


class TestPrefixAwareWithLittleRoom(RouterContract):
    def make(self, replicas: int) -> Router:
        return PrefixAware(PrefixAwareConfig(block_tokens=16, blocks=8), replicas)


class TestTwoReplicas(RouterContract):
    replicas = 2

    def make(self, replicas: int) -> Router:
        return PrefixAware(PrefixAwareConfig(), replicas)
