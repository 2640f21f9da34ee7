"""Pages in order of their ids. PageTables implements page tables, forks and copy-on-write."""

import heapq

from dovetail.core.memory.page_list import PageList
from dovetail.core.memory.page_tables import PageTables, SequencePages

from dovetail_mine.config import MineConfig


class SortedPages(PageList):
    __slots__ = ("sign",)

    def __init__(self, group, total, sign):
        super().__init__(group, total)
        self.sign = sign
        self.free = sorted(sign * page for page in self.free)  # sorted, hence a heap

    def take(self):
        page = self.sign * heapq.heappop(self.free)
        self.refs[page] = 1
        return page

    def drop(self, page):
        self.refs[page] -= 1
        if not self.refs[page]:
            heapq.heappush(self.free, self.sign * page)


class Mine(PageTables):
    config: MineConfig

    def _page_list(self, group, total):
        return SortedPages(group, total, 1 if self.config.lowest_first else -1)

    def _new_state(self, seq):
        return SequencePages([[] for _ in self.groups])
