"""Contract suite for workloads. Subclass WorkloadContract in a test module and override `make`."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import SLO, TimedRequest, Workload, WorkloadContext
from dovetail.core.testing.suite import assert_torch_free


class WorkloadContract:
    """Tests of the rules of dovetail.core.interfaces.Workload. Only `make` must be overridden."""

    vocab = 500
    """Vocabulary size of the model."""
    max_len = 8192
    """Context length of the model in tokens. The requests of `make`'s workload must fit."""

    def make(self) -> Workload:
        """Return a fresh workload. Every call must return an equal one."""
        raise NotImplementedError("return your workload: MyWorkload(MyConfig(...))")

    def encode(self, text: str) -> Sequence[int]:
        """Tokenize by bytes. Override for a workload that needs another tokenizer."""
        return [byte % self.vocab for byte in text.encode()]

    # Drivers

    def context(self, workload: Workload, seed: int = 1, rate: float | None = None) -> WorkloadContext:
        """Return the context for a rate; the default is the workload's first one."""
        rate = workload.rates()[0] if rate is None else rate
        return WorkloadContext(self.vocab, self.max_len, seed, rate, self.encode)

    @staticmethod
    def lengths(requests: Sequence[TimedRequest]) -> list[int]:
        """Return the tokens of each request, with the rounds that it continues."""
        found: list[int] = []
        for request in requests:
            before = 0 if request.continues is None else found[request.continues]
            found.append(before + len(request.prompt_ids) + request.output_tokens)
        return found

    def every_run(self) -> list[tuple[float | None, Sequence[TimedRequest]]]:
        workload = self.make()
        return [(rate, workload.requests(self.context(workload, rate=rate))) for rate in workload.rates()]

    # Tests

    def test_there_is_a_run(self) -> None:
        rates = self.make().rates()
        assert rates and len(set(rates)) == len(rates), f"rates() must be distinct and not empty, got {rates}"
        valid = all(rate is None or (rate > 0 and math.isfinite(rate)) for rate in rates)
        assert valid, f"each rate must be None or positive and finite, got {rates}"
        assert None not in rates or len(rates) == 1, f"None means that there is no rate to vary, got {rates}"
        assert all(len(requests) >= 1 for _, requests in self.every_run()), "each run must have a request"

    def test_every_request_can_run(self) -> None:
        """Ids are in the vocabulary, prompt and output are not empty, and both fit into the context."""
        for _, requests in self.every_run():
            for request in requests:
                typed = isinstance(request, TimedRequest) and isinstance(request.prompt_ids, tuple)
                assert typed, f"requests must be TimedRequests whose prompt_ids are a tuple, got {request!r}"
                assert request.prompt_ids and request.output_tokens >= 1, f"prompt or output is empty: {request}"
                known = all(type(token) is int and 0 <= token < self.vocab for token in request.prompt_ids)
                assert known, f"prompt ids must be ints below {self.vocab}: {request.prompt_ids}"
                assert request.pooling is None, f"a benchmark measures generation; pooling must be None: {request!r}"
                assert request.slo is None or isinstance(request.slo, SLO), f"slo must be an SLO: {request.slo!r}"
                sampling = request.sampling
                whole = sampling.n == 1 and not sampling.stop and not sampling.stop_token_ids
                assert whole, f"n must be 1, and nothing may stop an output early: {sampling!r}"

    def test_conversations_follow_earlier_requests_and_fit(self) -> None:
        for _, requests in self.every_run():
            for index, request in enumerate(requests):
                before = request.continues
                earlier = before is None or (type(before) is int and 0 <= before < index)
                assert earlier, f"request {index} continues {before!r}, which must be the index of an earlier request"
            longest = max(self.lengths(requests))
            assert longest <= self.max_len, f"a request needs {longest} tokens, the context has {self.max_len}"

    def test_ids_stay_in_a_small_vocabulary(self) -> None:
        """A workload may instead refuse the vocabulary with a ConfigError."""
        workload = self.make()
        ctx = replace(self.context(workload), vocab=3, encode=lambda text: [len(text) % 3] * 9)
        try:
            requests = workload.requests(ctx)
        except ConfigError:
            return
        known = all(0 <= token < 3 for request in requests for token in request.prompt_ids)
        assert known, "prompt ids must be below vocab = 3, or the workload must raise ConfigError"

    def test_requests_come_in_order(self) -> None:
        """A request that continues another arrives after its answer, so its arrival has no place in the order."""
        for _, requests in self.every_run():
            valid = all(request.arrival >= 0 and math.isfinite(request.arrival) for request in requests)
            arrivals = [request.arrival for request in requests if request.continues is None]
            assert valid and arrivals == sorted(arrivals), f"arrivals must be finite, >= 0 and sorted, got {arrivals}"

    def test_the_rate_is_the_requested_one(self) -> None:
        """The mean rate of a run with more than 20 requests is within the statistical error."""
        for rate, requests in self.every_run():
            arrivals = [request.arrival for request in requests if request.continues is None]
            if rate is not None and len(arrivals) > 20:
                gaps = len(arrivals) - 1
                found, error = gaps / max(arrivals[-1], 1e-9), 5 / math.sqrt(gaps)
                near = rate * (1 - error) < found < rate * (1 + 3 * error)
                assert near, f"expected {rate:g} requests/s on average, got {found:.2f}"

    def test_equal_seeds_give_equal_requests(self) -> None:
        """Requests do not depend on earlier calls or on global random generators."""
        first, again = self.make(), self.make()
        for rate in first.rates():
            random.seed(1)
            expected = list(first.requests(self.context(first, 7, rate)))
            state = random.getstate()
            random.seed(2)
            again.requests(self.context(again, 8, rate))
            equal = list(again.requests(self.context(again, 7, rate))) == expected
            assert equal, "equal seeds must give equal requests, whatever was drawn before"
            random.seed(1)
            assert random.getstate() == state, "draw from ctx.seed, not from Python's global generator"

    def test_too_long_requests_are_refused(self) -> None:
        """The workload raises ConfigError; otherwise the engine would reject the request during a run."""
        workload = self.make()
        try:
            requests = workload.requests(replace(self.context(workload), max_len=4))
        except ConfigError as error:
            assert "4" in str(error), f"the error must name the context length 4: {error}"
            return
        pytest.fail(f"a request of {max(self.lengths(requests))} tokens does not fit max_len = 4: raise ConfigError")

    def test_it_needs_no_torch(self) -> None:
        module = type(self.make()).__module__
        if module in ("__main__", "builtins") or module.rpartition(".")[2].startswith("test_"):
            pytest.skip("defined in a test module")
        assert_torch_free(module)
