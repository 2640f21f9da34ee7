"""Pages that are evicted from the device and kept on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import KVGroup, PageOp, PageOpKind, Plane
from dovetail.core.memory.host_tier import HostTier
from dovetail.core.testing.kv_model import layout, reserve, sequence, write
from dovetail.plugins.kv_cache.config import PrefixHashConfig, RadixConfig
from dovetail.plugins.kv_cache.prefix_hash import PrefixHashAllocator
from dovetail.plugins.kv_cache.radix import RadixAllocator


@pytest.mark.parametrize(("made", "config"), [(PrefixHashAllocator, PrefixHashConfig), (RadixAllocator, RadixConfig)])
def test_a_prefix_is_stored_on_the_host_and_loaded_back(made: Any, config: Any) -> None:
    small = layout(a=(4, 3))
    kv = made(config(host_pages=4), small.groups, small.num_pages)
    first, other, again = sequence(1, 8), sequence(2, 12, first=100), sequence(3, 9)
    write(kv, first)
    kv.release(first)
    kv.acquire(other)
    stored = [op for op in reserve(kv, other, 12).ops if op.kind == PageOpKind.STORE]
    assert [op.src for op in stored] == [2, 1], "the end of the prefix goes first"
    kv.release(other)

    assert kv.peek(again) == 8
    hit = kv.acquire(again)
    loaded = [op for op in hit.ops if op.kind == PageOpKind.LOAD]
    assert [op.src for op in loaded] == [op.dst for op in reversed(stored)]
    assert [op.dst for op in loaded] == [page for _, _, page in hit.entries]
    assert (hit.tokens, kv.stats().host_pages, kv.stats().loads, kv.stats().stores) == (8, 2, 2, 2)
    kv.check()


def test_pages_about_to_be_loaded_are_kept() -> None:
    tier = HostTier(0, 1)
    tier.store("a", 5)
    tier.pin(["a"])
    tier.store("b", 6)
    assert "a" in tier and "b" not in tier
    tier.pin([])
    tier.store("b", 6)
    assert "b" in tier and "a" not in tier
    assert tier.take_ops() == (PageOp(PageOpKind.STORE, 0, 5, 1), PageOp(PageOpKind.STORE, 0, 6, 1))
    tier.check()


def test_the_size_is_given_in_pages_or_bytes() -> None:
    groups = tuple(KVGroup(n, (n,), (Plane("k", (1, 64), torch.float32),), page_tokens=16) for n in (0, 1))
    assert PrefixHashAllocator.host_pages(PrefixHashConfig(host_gib=1), groups) == {0: 2**17, 1: 2**17}
    assert PrefixHashAllocator.host_pages(PrefixHashConfig(host_pages=7), groups) == {0: 7, 1: 7}
    with pytest.raises(ConfigError, match=r"host_gib=1e-09: a page takes \d+ bytes"):
        PrefixHashAllocator.host_pages(PrefixHashConfig(host_gib=1e-9), groups)
    with pytest.raises(ValidationError, match="host_pages=7 and host_gib=1"):
        PrefixHashConfig(host_pages=7, host_gib=1)
