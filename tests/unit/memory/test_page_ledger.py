"""Allocators that give a page to two owners end the engine with an error that names them."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.core.engine.policy import PolicyScheduler
from dovetail.core.errors import PluginError
from dovetail.core.interfaces import Reservation, SamplingParams
from dovetail.core.memory.page_list import PageList
from dovetail.core.testing.scheduler import SchedulerContract
from dovetail.plugins.kv_cache.config import PagedConfig
from dovetail.plugins.kv_cache.paged import PagedAllocator


class OnePage(PagedAllocator):
    """Gives page 1 for everything."""

    def _page_list(self, group, total):
        class Pages(PageList):
            def take(self):
                return 1

        return Pages(group, total)


class FreesTooEarly(PagedAllocator):
    """Frees the first page of each sequence while it still runs."""

    def publish(self, seq, upto):
        super().publish(seq, upto)
        for pages, table in self._by_group(self._states[seq.uid]):
            if table[0] not in pages.free:
                pages.free.append(table[0])


class NeverCopies(PagedAllocator):
    """Lets both samples write to the last page of their prompt."""

    def _shared_index(self, pages, table, written, upto):
        return None


class Beyond(PagedAllocator):
    def reserve(self, seq, upto, ahead=0):
        made = super().reserve(seq, upto, ahead)
        return Reservation(tuple((group, index, page + 1000) for group, index, page in made.entries))


def engine(allocator: Any) -> Any:
    suite: Any = SchedulerContract()
    suite.make = lambda limits, kv: PolicyScheduler(None, limits, kv)
    suite.make_kv = lambda groups, num_pages: allocator(PagedConfig(), groups, num_pages)
    return suite.engine(max_seqs=4)


@pytest.mark.parametrize(
    ("allocator", "message"),
    [
        (OnePage, "page 1 of group 0 has two owners"),
        (FreesTooEarly, "has two owners: it gives page 0 of request|has two owners: request"),
        (NeverCopies, r"request 0, sample \d writes to it, but request 0, sample 0 and request 0, sample 1 share it"),
        (Beyond, "page 10.. of group 0 does not exist: the group has pages 1 to 60"),
    ],
)
def test_a_page_with_two_owners_is_an_error(allocator: type, message: str) -> None:
    made = engine(allocator)
    for first in range(6):
        made.add([first + 1] * 6, SamplingParams(temperature=0, max_tokens=12, n=2, ignore_eos=True))
    with pytest.raises(PluginError, match="package under test: kv_cache: step .*" + message):
        while made.has_work:
            made.step()
