"""Workload of random conversations with drawn lengths."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice

from dovetail.core.interfaces import Grammar, SamplingParams, TimedRequest, Workload, WorkloadContext
from dovetail.plugins.workload.config import ChatsConfig, LengthsConfig
from dovetail.plugins.workload.synthetic import check_length, gamma_arrivals, poisson_arrivals, random_ids


class Chats(Workload):
    config: ChatsConfig

    def rates(self) -> Sequence[float | None]:
        return tuple(dict.fromkeys(self.config.rates)) or (None,)

    def requests(self, ctx: WorkloadContext) -> Sequence[TimedRequest]:
        config, rng = self.config, random.Random(ctx.seed)
        # Separate generators, so that neither lengths nor tokens depend on the options of the other.
        lengths = random.Random(f"lengths {ctx.seed}")
        messages = config.shared_tokens + config.rounds * config.message.bound
        check_length("chats", messages, config.rounds * config.output.bound, ctx)
        sampling = SamplingParams(**config.sampling)
        if config.json_schema is not None:
            grammar = Grammar(kind="json_schema", value=config.json_schema)
            sampling = sampling.model_copy(update={"grammar": grammar})
        shared = random_ids(rng, ctx, config.shared_tokens)
        arrivals = self._arrivals(random.Random(f"arrivals {ctx.seed}"), ctx.rate)
        found: list[TimedRequest] = []
        for arrival in islice(arrivals, self._count(ctx.rate)):
            for number in range(config.rounds):
                message = random_ids(rng, ctx, draw(config.message, lengths))
                found.append(
                    TimedRequest(
                        message if number else shared + message,
                        draw(config.output, lengths),
                        config.pause if number else arrival,
                        sampling=sampling,
                        continues=len(found) - 1 if number else None,
                    )
                )
        return found

    def _arrivals(self, rng: random.Random, rate: float | None) -> Iterator[float]:
        if rate is None or self.config.burstiness == 1:
            return poisson_arrivals(rng, rate)
        return gamma_arrivals(rng, rate, self.config.burstiness)

    def _count(self, rate: float | None) -> int:
        """Return the number of conversations."""
        if rate is None or self.config.seconds is None:
            return self.config.conversations
        return max(self.config.at_least, round(rate * self.config.seconds))


def draw(lengths: LengthsConfig, rng: random.Random) -> int:
    """Draw a number of tokens: log-normal, drawn again if it is out of bounds."""
    while not 1 <= (found := round(lengths.median * rng.lognormvariate(0.0, lengths.sigma))) <= lengths.bound:
        pass
    return found
