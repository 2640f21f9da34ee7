"""Capabilities of allocators that evict: none. They load the eviction policy, so an error shows before weights load."""

from __future__ import annotations

from dovetail.core.compose import Capabilities, Host
from dovetail.core.memory.eviction import load_policy
from dovetail.plugins.kv_cache.config import PrefixHashConfig, RadixConfig


def evicting(config: PrefixHashConfig | RadixConfig, host: Host) -> Capabilities:
    load_policy(config.eviction)
    return Capabilities()
