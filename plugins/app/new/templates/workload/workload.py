"""Bursts of requests."""

import random

from dovetail import ConfigError
from dovetail.core.interfaces import TimedRequest, Workload

from dovetail_mine.config import MineConfig


class Mine(Workload):
    config: MineConfig

    def requests(self, ctx):
        """Return the requests of one run. Equal seeds give equal requests."""
        config, rng = self.config, random.Random(ctx.seed)
        if 2 * config.longest > ctx.max_len:
            raise ConfigError(f"workload.longest={config.longest} is more than half a context of {ctx.max_len}")
        return [
            TimedRequest(
                prompt_ids=tuple(rng.choices(range(ctx.vocab), k=rng.randint(1, config.longest))),
                output_tokens=rng.randint(1, config.longest),
                arrival=burst * config.pause,
            )
            for burst in range(config.bursts)
            for _ in range(config.size)
        ]
