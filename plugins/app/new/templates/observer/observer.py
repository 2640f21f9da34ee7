"""A line about the last steps."""

import sys

from dovetail.core.interfaces import Observer

from dovetail_mine.config import MineConfig


class Mine(Observer):
    config: MineConfig

    def __init__(self, config):
        super().__init__(config)
        self.steps = self.fed = self.sampled = 0

    def step(self, record):
        self.steps += 1
        self.fed += record.tokens
        self.sampled += record.sampled
        if self.steps == self.config.every:
            self.close()

    def close(self):
        """Print what was not printed yet."""
        if self.steps:
            print(f"{self.steps} steps: {self.fed} tokens fed, {self.sampled} sampled", file=sys.stderr)
        self.steps = self.fed = self.sampled = 0
