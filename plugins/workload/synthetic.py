"""Workloads of random token ids."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import TimedRequest, Workload, WorkloadContext
from dovetail.plugins.workload.config import FixedConfig, PoissonConfig, SharedPrefixConfig


def random_ids(rng: random.Random, ctx: WorkloadContext, count: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(ctx.vocab), k=count))


def poisson_arrivals(rng: random.Random, rate: float | None) -> Iterator[float]:
    """Yield arrival times in seconds, from 0 on, without end. rate=None: all at 0."""
    clock = 0.0
    while True:
        yield clock
        clock += rng.expovariate(rate) if rate is not None else 0.0


def gamma_arrivals(rng: random.Random, rate: float, shape: float) -> Iterator[float]:
    """Yield arrival times in seconds, from 0 on, without end: Poisson for shape=1, bursts for less, as production
    traffic has (BurstGPT, Wang et al. 2024)."""
    clock = 0.0
    while True:
        yield clock
        clock += rng.gammavariate(shape, 1 / (shape * rate))


def check_length(name: str, prompt: int, output: int, ctx: WorkloadContext) -> None:
    if prompt + output > ctx.max_len:
        raise ConfigError(
            f"workload={name}: {prompt} prompt and {output} output tokens do not fit into a context of {ctx.max_len}: "
            "raise engine.max_len up to the model's limit, or lower the workload's lengths"
        )


class Fixed(Workload):
    config: FixedConfig

    def requests(self, ctx: WorkloadContext) -> Sequence[TimedRequest]:
        config, rng = self.config, random.Random(ctx.seed)
        check_length("fixed", config.prompt_tokens, config.output_tokens, ctx)
        return [
            TimedRequest(random_ids(rng, ctx, config.prompt_tokens), config.output_tokens)
            for _ in range(config.requests)
        ]


class Poisson(Workload):
    config: PoissonConfig

    def rates(self) -> Sequence[float | None]:
        return tuple(dict.fromkeys(self.config.rates))

    def requests(self, ctx: WorkloadContext) -> Sequence[TimedRequest]:
        config, rng = self.config, random.Random(ctx.seed)
        check_length("poisson", config.prompt_tokens, config.output_tokens, ctx)
        assert ctx.rate is not None, "this workload has rates"
        count = max(config.at_least, round(ctx.rate * config.seconds))
        arrivals = poisson_arrivals(rng, ctx.rate)
        return [
            TimedRequest(random_ids(rng, ctx, config.prompt_tokens), config.output_tokens, next(arrivals))
            for _ in range(count)
        ]


class SharedPrefix(Workload):
    config: SharedPrefixConfig

    def requests(self, ctx: WorkloadContext) -> Sequence[TimedRequest]:
        config, rng = self.config, random.Random(ctx.seed)
        # A separate generator, so that the tokens do not depend on the lengths.
        lengths = random.Random(f"lengths {ctx.seed}")

        def bounds(mean: int) -> tuple[int, int]:
            return max(1, round(mean * (1 - config.range_ratio))), round(mean * (1 + config.range_ratio))

        own, output = bounds(config.own_tokens), bounds(config.output_tokens)
        check_length("shared_prefix", config.shared_tokens + own[1], output[1], ctx)
        shared = random_ids(rng, ctx, config.shared_tokens)
        return [
            TimedRequest(shared + random_ids(rng, ctx, lengths.randint(*own)), lengths.randint(*output))
            for _ in range(config.requests)
        ]
