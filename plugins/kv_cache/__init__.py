"""Built-in KV allocators."""

from dovetail.plugins import builtin
from dovetail.plugins.kv_cache.config import ContiguousConfig, PagedConfig, PrefixHashConfig, RadixConfig

COMPONENTS = (
    builtin("kv_cache", "contiguous", ContiguousConfig, "contiguous:ContiguousAllocator"),
    builtin("kv_cache", "paged", PagedConfig, "paged:PagedAllocator"),
    builtin(
        "kv_cache",
        "prefix_hash",
        PrefixHashConfig,
        "prefix_hash:PrefixHashAllocator",
        capabilities="capabilities:evicting",
    ),
    builtin("kv_cache", "radix", RadixConfig, "radix:RadixAllocator", capabilities="capabilities:evicting"),
)
