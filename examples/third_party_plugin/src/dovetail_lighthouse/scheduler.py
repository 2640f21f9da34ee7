"""Newest first, as a mail reader works off its inbox, with an age limit so that nobody starves."""

import heapq

from dovetail import PolicyScheduler


class Lighthouse(PolicyScheduler):
    def order(self, waiting, ctx):
        late, fresh = [], []
        for seq in waiting:
            (late if self._late(seq, ctx) else fresh).append((seq.uid, seq))
        # uids rise with arrival. Heaps: of a long queue only as many are sorted as enter.
        heapq.heapify(late)
        while late:
            yield heapq.heappop(late)[1]
        fresh = [(-uid, seq) for uid, seq in fresh]
        heapq.heapify(fresh)
        while fresh:
            yield heapq.heappop(fresh)[1]

    def victim(self, candidates, ctx):
        """The reverse of order: the oldest that is not late, else the newest."""
        fresh = [seq for seq in candidates if not self._late(seq, ctx)]
        return min(fresh, key=lambda seq: seq.uid) if fresh else max(candidates, key=lambda seq: seq.uid)

    def _late(self, seq, ctx):
        return ctx.clock - seq.request.arrival >= self.config.max_age
