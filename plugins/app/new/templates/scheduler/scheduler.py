"""Shortest prompt first."""

from dovetail import PolicyScheduler

from dovetail_mine.config import MineConfig


class Mine(PolicyScheduler):
    config: MineConfig

    def order(self, waiting, ctx):
        """Return the waiting sequences, first to be admitted first. uids rise with arrival."""

        def key(seq):
            late = ctx.clock - seq.request.arrival >= self.config.max_wait
            return (0, 0, seq.uid) if late else (1, len(seq.request.prompt_ids), seq.uid)

        return sorted(waiting, key=key)
