"""Routing by load. Its unit is prompt tokens, so that cached prefixes and queues are comparable."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from dovetail.core.interfaces import Arrival, ReplicaLoad, Router
from dovetail.plugins.router.config import LeastLoadedConfig, PrefixAwareConfig


class LeastLoaded(Router):
    config: LeastLoadedConfig

    def work(self, load: ReplicaLoad) -> int:
        """Return the outstanding work in prompt tokens."""
        return load.prompt_tokens + self.config.sample_tokens * load.samples

    def route(self, arrival: Arrival, loads: Sequence[ReplicaLoad]) -> int:
        return min(loads, key=self.work).replica


class PrefixAware(LeastLoaded):
    """Remembers for each prefix hash, one per block, the replicas it was sent to. A hash collision only costs time: it
    affects routing, not answers."""

    config: PrefixAwareConfig

    def __init__(self, config: PrefixAwareConfig, replicas: int) -> None:
        super().__init__(config, replicas)
        self._seen: OrderedDict[int, int] = OrderedDict()
        """Prefix hash -> bit mask of replicas, in order of last use."""
        self._room = config.blocks * replicas
        self._sent = [0] * replicas
        """Blocks of all prompts sent to each replica. Ties go to the replica with fewer, so that all caches fill up
        evenly."""

    def route(self, arrival: Arrival, loads: Sequence[ReplicaLoad]) -> int:
        chain = self._chain(arrival)
        cached = self._cached(chain)
        # The prompt's length is the same for every replica, so only its cached part counts.
        chosen = min(loads, key=lambda load: (self.work(load) - cached[load.replica], self._sent[load.replica])).replica
        self._remember(chain, chosen)
        self._sent[chosen] += len(chain)
        return chosen

    def forget(self, replica: int) -> None:
        kept = ~(1 << replica)
        self._sent[replica] = 0
        self._seen = OrderedDict((prefix, left) for prefix, who in self._seen.items() if (left := who & kept))

    def _chain(self, arrival: Arrival) -> list[int]:
        """Return the hashes of the prompt's prefixes of 1, 2, ... blocks."""
        ids, size = tuple(arrival.prompt_ids), self.config.block_tokens
        prefix = zlib.crc32(arrival.cache_salt.encode("utf-8", "surrogatepass"))
        chain = []
        for start in range(0, len(ids) - size + 1, size):
            prefix = hash((prefix, ids[start : start + size]))
            chain.append(prefix)
        return chain

    def _cached(self, chain: Sequence[int]) -> list[int]:
        """Return the cached tokens of the prompt per replica, estimated from earlier prompts."""
        tokens, size = [0] * self.replicas, self.config.block_tokens
        holders = (1 << self.replicas) - 1
        for prefix in chain:
            holders &= self._seen.get(prefix, 0)
            if not holders:
                break
            for replica in range(self.replicas):
                tokens[replica] += size * (holders >> replica & 1)
        return tokens

    def _remember(self, chain: Sequence[int], replica: int) -> None:
        seen, bit = self._seen, 1 << replica
        # Longest prefix first: a prefix is then never older than its continuations, which are useless without it.
        for prefix in reversed(chain):
            seen[prefix] = seen.get(prefix, 0) | bit
            seen.move_to_end(prefix)
        for prefix in list(islice(seen, max(len(seen) - self._room, 0))):
            del seen[prefix]
