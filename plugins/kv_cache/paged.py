"""Pages from a free list, forks by copy-on-write, no reuse between sequences: PagedAttention (Kwon et al. 2023)."""

from __future__ import annotations

from dovetail.core.interfaces import KVGroup, KVSequence
from dovetail.core.memory.page_list import PageList
from dovetail.core.memory.page_tables import PageTables, SequencePages


class PagedAllocator(PageTables[PageList, SequencePages]):
    """PageTables unchanged: acquire finds nothing, publish only records the written length."""

    def _page_list(self, group: KVGroup, total: int) -> PageList:
        return PageList(group, total)

    def _new_state(self, seq: KVSequence) -> SequencePages:
        return SequencePages([[] for _ in self.groups])
