"""Segmented LRU (Karedla, Love and Wherry 1994) for KV pages: a page that was reused outlives pages that never were.
Choose it with kv_cache.eviction=dovetail_lighthouse.eviction:SegmentedLRU."""

from collections import OrderedDict


class SegmentedLRU:
    """Keeps pages never reused in `probation` and the others in `protected`, each in order of release."""

    share = 0.8
    """Maximum share of evictable pages in `protected`. Beyond it the oldest pages return to `probation`."""

    def __init__(self):
        self.probation = OrderedDict()
        self.protected = OrderedDict()
        self.reused = set()

    def on_publish(self, page, depth, parent):
        self.reused.discard(page)

    def on_release(self, page):
        if page not in self.reused:
            self.probation[page] = None
            return
        self.protected[page] = None
        while len(self.protected) > self.share * (len(self.protected) + len(self.probation)):
            oldest, _ = self.protected.popitem(last=False)
            self.reused.discard(oldest)
            self.probation[oldest] = None

    def on_hit(self, page):
        self.probation.pop(page, None)
        self.protected.pop(page, None)
        self.reused.add(page)

    def victim(self):
        page, _ = (self.probation or self.protected).popitem(last=False)
        self.reused.discard(page)
        return page
