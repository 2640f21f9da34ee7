"""The pytest plugin `dovetail` (entry point pytest11): fixtures for plugin authors' own tests.

Contract suites need no fixture: import and subclass them, such as dovetail.core.testing.kv_cache.KVAllocatorContract.
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
    """KV groups and page counts to build an allocator from; a test that takes it runs once for each layout."""
    from dovetail.core.testing.kv_model import LAYOUTS

    return LAYOUTS[request.param]


@pytest.fixture
def kv_sequence() -> Callable[..., TokenSequence]:
    """kv_sequence(tokens, salt=""): a sequence for an allocator, with a uid of its own."""
    from dovetail.core.testing.kv_model import TokenSequence

    uids = itertools.count()

    def make(tokens: Iterable[int], salt: str = "") -> TokenSequence:
        return TokenSequence(next(uids), list(tokens), salt)

    return make
