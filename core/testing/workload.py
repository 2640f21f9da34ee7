"""The contract suite of workloads. Subclass WorkloadContract in a test module and override `make`."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import SLO, TimedRequest, Workload, WorkloadContext


class WorkloadContract:
    """Every sentence of dovetail.core.interfaces.Workload. `make` is the only thing that must be overridden."""

    vocab = 500
    """Of the model that requests are made for."""
    max_len = 8192
    """Of its context; the workload as `make` gives it must fit."""

    def make(self) -> Workload:
        """A fresh workload; every call gives an equal one."""
        raise NotImplementedError("return your workload: MyWorkload(MyConfig(...))")

    def encode(self, text: str) -> Sequence[int]:
        """A tokenizer of bytes; override for a workload that needs another."""
        return [byte % self.vocab for byte in text.encode()]

    # Drivers.

    def context(self, workload: Workload, seed: int = 1, rate: float | None = None) -> WorkloadContext:
        """For the first of its rates unless one is given."""
        rate = workload.rates()[0] if rate is None else rate
        return WorkloadContext(self.vocab, self.max_len, seed, rate, self.encode)

    def every_run(self) -> list[tuple[float | None, Sequence[TimedRequest]]]:
        workload = self.make()
        return [(rate, workload.requests(self.context(workload, rate=rate))) for rate in workload.rates()]

    # Tests.

    def test_there_is_a_run(self) -> None:
        rates = self.make().rates()
        assert rates and len(set(rates)) == len(rates), f"rates() gave {rates}"
        assert all(rate is None or (rate > 0 and math.isfinite(rate)) for rate in rates), f"rates() gave {rates}"
        assert None not in rates or len(rates) == 1, "None stands alone: there is no rate to vary"
        assert all(len(requests) >= 1 for _, requests in self.every_run())

    def test_every_request_can_run(self) -> None:
        """Ids in the vocabulary, at least one token each way, and no more than the context holds."""
        for _, requests in self.every_run():
            for request in requests:
                assert isinstance(request, TimedRequest) and isinstance(request.prompt_ids, tuple)
                assert request.prompt_ids and request.output_tokens >= 1
                assert all(type(token) is int and 0 <= token < self.vocab for token in request.prompt_ids)
                assert len(request.prompt_ids) + request.output_tokens <= self.max_len
                assert request.slo is None or isinstance(request.slo, SLO)

    def test_ids_stay_in_a_small_vocabulary(self) -> None:
        """Or the workload says that it cannot be made for it."""
        workload = self.make()
        ctx = replace(self.context(workload), vocab=3, encode=lambda text: [len(text) % 3] * 9)
        try:
            requests = workload.requests(ctx)
        except ConfigError:
            return
        assert all(0 <= token < 3 for request in requests for token in request.prompt_ids)

    def test_requests_come_in_order(self) -> None:
        for _, requests in self.every_run():
            arrivals = [request.arrival for request in requests]
            assert all(arrival >= 0 and math.isfinite(arrival) for arrival in arrivals)
            assert arrivals == sorted(arrivals)

    def test_the_rate_is_the_one_asked_for(self) -> None:
        """Over all arrivals, within what chance allows; 20 or fewer prove nothing."""
        for rate, requests in self.every_run():
            if rate is not None and len(requests) > 20:
                gaps = len(requests) - 1
                found, error = gaps / max(requests[-1].arrival, 1e-9), 5 / math.sqrt(gaps)
                assert rate * (1 - error) < found < rate * (1 + 3 * error), (
                    f"{found:.2f} requests/s where {rate:g} were asked for"
                )

    def test_equal_seeds_give_equal_requests(self) -> None:
        """Whatever was drawn before, and from whatever global generator."""
        first, again = self.make(), self.make()
        for rate in first.rates():
            random.seed(1)
            expected = list(first.requests(self.context(first, 7, rate)))
            state = random.getstate()
            random.seed(2)
            again.requests(self.context(again, 8, rate))
            assert list(again.requests(self.context(again, 7, rate))) == expected
            random.seed(1)
            assert random.getstate() == state, "draws come from ctx.seed, not from Python's own generator"

    def test_what_does_not_fit_is_refused(self) -> None:
        """Before anything runs: a request that the context cannot hold would be rejected in the middle of a run."""
        workload = self.make()
        try:
            requests = workload.requests(replace(self.context(workload), max_len=4))
        except ConfigError as error:
            assert "4" in str(error), f"the message does not say how long the context is: {error}"
            return
        longest = max(len(request.prompt_ids) + request.output_tokens for request in requests)
        pytest.fail(f"a request of {longest} tokens for a context of 4")

    def test_it_needs_no_torch(self) -> None:
        module = type(self.make()).__module__
        if module in ("__main__", "builtins") or module.rpartition(".")[2].startswith("test_"):
            pytest.skip("defined in a test module")
        code = f"import sys, {module}; raise SystemExit('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr or f"importing {module} loads torch"
