"""Built-in KV allocators."""

from dovetail.core.compose import Component
from dovetail.plugins.kv_cache.config import ContiguousConfig, PagedConfig, PrefixHashConfig, RadixConfig

COMPONENTS = (
    Component(
        kind="kv_cache",
        name="contiguous",
        config=ContiguousConfig,
        target="dovetail.plugins.kv_cache.contiguous:ContiguousAllocator",
        api="kv_cache/0.1",
    ),
    Component(
        kind="kv_cache",
        name="paged",
        config=PagedConfig,
        target="dovetail.plugins.kv_cache.paged:PagedAllocator",
        api="kv_cache/0.1",
    ),
    Component(
        kind="kv_cache",
        name="prefix_hash",
        config=PrefixHashConfig,
        target="dovetail.plugins.kv_cache.prefix_hash:PrefixHashAllocator",
        capabilities="dovetail.plugins.kv_cache.capabilities:evicting",
        api="kv_cache/0.1",
    ),
    Component(
        kind="kv_cache",
        name="radix",
        config=RadixConfig,
        target="dovetail.plugins.kv_cache.radix:RadixAllocator",
        capabilities="dovetail.plugins.kv_cache.capabilities:evicting",
        api="kv_cache/0.1",
    ),
)
