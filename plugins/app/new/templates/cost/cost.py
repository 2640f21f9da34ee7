"""A cost that is linear in the tokens of a step."""

from dovetail.core.interfaces import CostModel

from dovetail_mine.config import MineConfig


class Mine(CostModel):
    config: MineConfig

    def step_seconds(self, rows):
        tokens = sum(row.tokens * row.times for row in rows)
        return self.config.step + self.config.token * tokens if tokens else 0.0
