"""Pytest plugin `dovetail` (entry point pytest11): fixtures for plugin authors' tests.

Contract suites need no fixture. Import and subclass them, for instance
dovetail.core.testing.kv_cache.KVAllocatorContract.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from dovetail.core.testing.kv_model import Layout, TokenSequence

pytest.register_assert_rewrite("dovetail.core.testing")


@pytest.fixture(params=("one_group", "uneven_pages", "mixed_page_sizes"))
def kv_groups(request: pytest.FixtureRequest) -> Layout:
    """KV groups and page counts for an allocator. A test with this fixture runs once for each layout."""
    from dovetail.core.testing.kv_model import LAYOUTS

    return LAYOUTS[request.param]


@pytest.fixture
def kv_sequence() -> Callable[..., TokenSequence]:
    """Factory kv_sequence(tokens, salt="") of sequences with unique uids for an allocator."""
    from dovetail.core.testing.kv_model import TokenSequence

    uids = itertools.count()

    def make(tokens: Iterable[int], salt: str = "") -> TokenSequence:
        return TokenSequence(next(uids), list(tokens), salt)

    return make
