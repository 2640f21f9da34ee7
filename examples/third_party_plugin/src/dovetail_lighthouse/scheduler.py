"""Newest request first, with an age limit so that no request starves."""

import heapq

from dovetail import PolicyScheduler


class Lighthouse(PolicyScheduler):
    def order(self, waiting, ctx):
        late, fresh = [], []
        for seq in waiting:
            (late if self._late(seq, ctx) else fresh).append((seq.uid, seq))
        # uids rise with arrival. A heap sorts only as much of a long queue as is admitted.
        heapq.heapify(late)
        while late:
            yield heapq.heappop(late)[1]
        fresh = [(-uid, seq) for uid, seq in fresh]
        heapq.heapify(fresh)
        while fresh:
            yield heapq.heappop(fresh)[1]

    def victim(self, candidates, ctx):
        """Return the oldest sequence that is not late, else the newest: the reverse of `order`."""
        fresh = [seq for seq in candidates if not self._late(seq, ctx)]
        return min(fresh, key=lambda seq: seq.uid) if fresh else max(candidates, key=lambda seq: seq.uid)

    def _late(self, seq, ctx):
        return ctx.clock - seq.request.arrival >= self.config.max_age
