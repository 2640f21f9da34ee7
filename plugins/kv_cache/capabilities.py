"""What the allocators that evict state: nothing, but a policy that does not load is told before weights are."""

from __future__ import annotations

from dovetail.core.compose import Capabilities, Host
from dovetail.core.memory.eviction import load_policy
from dovetail.plugins.kv_cache.config import PrefixHashConfig, RadixConfig


def evicting(config: PrefixHashConfig | RadixConfig, host: Host) -> Capabilities:
    load_policy(config.eviction)
    return Capabilities()
