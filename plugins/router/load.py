"""By work: in units of prompt tokens, so that a cached prefix and a queue can be weighed against each other."""

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
        """Before a request that arrives now."""
        return load.prompt_tokens + self.config.sample_tokens * load.samples

    def route(self, arrival: Arrival, loads: Sequence[ReplicaLoad]) -> int:
        return min(loads, key=self.work).replica


class PrefixAware(LeastLoaded):
    """Remembers hashes of prefixes, one a block, and which replicas were sent them. Two prompts that share a hash by
    chance are routed together and answered apart: nothing but time is lost."""

    config: PrefixAwareConfig

    def __init__(self, config: PrefixAwareConfig, replicas: int) -> None:
        super().__init__(config, replicas)
        self._seen: OrderedDict[int, int] = OrderedDict()
        """Hash of a prefix -> its replicas as bits; the one used last comes last."""
        self._room = config.blocks * replicas
        self._sent = [0] * replicas
        """Blocks of all prompts. Of replicas that are alike, the one that was sent less gets the next: so each cache is
        used before one overflows."""

    def route(self, arrival: Arrival, loads: Sequence[ReplicaLoad]) -> int:
        chain = self._chain(arrival)
        cached = self._cached(chain)
        # Every replica has the whole prompt before it, less what it has cached.
        chosen = min(loads, key=lambda load: (self.work(load) - cached[load.replica], self._sent[load.replica])).replica
        self._remember(chain, chosen)
        self._sent[chosen] += len(chain)
        return chosen

    def forget(self, replica: int) -> None:
        kept = ~(1 << replica)
        self._sent[replica] = 0
        self._seen = OrderedDict((prefix, left) for prefix, who in self._seen.items() if (left := who & kept))

    def _chain(self, arrival: Arrival) -> list[int]:
        """Hashes of the prompt's prefixes of 1, 2, ... blocks."""
        ids, size = tuple(arrival.prompt_ids), self.config.block_tokens
        prefix = zlib.crc32(arrival.cache_salt.encode("utf-8", "surrogatepass"))
        chain = []
        for start in range(0, len(ids) - size + 1, size):
            prefix = hash((prefix, ids[start : start + size]))
            chain.append(prefix)
        return chain

    def _cached(self, chain: Sequence[int]) -> list[int]:
        """Tokens of the prompt that each replica was sent before."""
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
        # A prefix is never older than what continues it: what is dropped first is of use to nobody else.
        for prefix in reversed(chain):
            seen[prefix] = seen.get(prefix, 0) | bit
            seen.move_to_end(prefix)
        for prefix in list(islice(seen, max(len(seen) - self._room, 0))):
            del seen[prefix]
