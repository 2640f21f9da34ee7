"""Runs of a workload on one target: their requests, their order and their figures."""

from __future__ import annotations

import hashlib
import random
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import SLO, TimedRequest, Workload, WorkloadContext
from dovetail.plugins.app.bench.config import RunsConfig
from dovetail.plugins.app.bench.metrics import measure, per_token_of_run
from dovetail.plugins.app.bench.target import OnDone, Target

WARMUP_TOKENS = 4

Bar = Callable[[str, int], AbstractContextManager[OnDone]]
"""bar(title, requests): context manager that shows the progress of a run."""


class Runs:
    def __init__(self, config: RunsConfig, target: Target, bar: Bar, note: Callable[[str], None]) -> None:
        """`note` prints a line to the user."""
        self.config, self.target, self.bar, self.note = config, target, bar, note
        self.slo = SLO(config.slo.ttft, config.slo.tpot)
        self.seed = target.composition.engine.seed
        self._sent: set[int] = set()
        self._noted = False

    # Requests.

    def requests(self, name: str, workload: Workload, number: int, rate: float | None) -> Sequence[TimedRequest]:
        """Return the requests of run `number`, spread over `config.adapters` if given.

        The prompts are reproducible and differ between runs, workloads and rates, so that a server does not find those
        of an earlier run in its prefix cache. Workloads that read a file may still repeat prompts.
        """
        target = self.target
        seed = zlib.crc32(f"{self.seed} {name} {rate} {number}".encode())
        requests = workload.requests(WorkloadContext(target.vocab, target.max_len, seed, rate, target.encode))
        names = self.config.adapters
        if not names:
            return requests
        shares = [k**-self.config.adapter_skew for k in range(1, len(names) + 1)]
        chosen = random.Random(f"adapters {seed}").choices(names, shares, k=len(requests))
        return [replace(request, adapter=name) for request, name in zip(requests, chosen, strict=True)]

    def check(self, name: str, workload: Workload) -> Sequence[TimedRequest]:
        """Check, before the model is loaded, that requests can be made. Returns those of the warm-up."""
        requests = self.requests(name, workload, 0, workload.rates()[0])
        if any(request.sampling.grammar is not None for request in requests):
            self.target.check_grammars()
        known = self.target.adapters
        wanted = dict.fromkeys((*self.config.adapters, *(request.adapter for request in requests)))
        if known is not None and (missing := [one for one in wanted if one and one not in known]):
            raise ConfigError(
                f"requests name adapters that are not loaded: {', '.join(missing)}; loaded: "
                f"{', '.join(known) or 'none'}. adapter=lora 'adapter.load={{name: folder}}' loads some at start-up"
            )
        return requests

    # Runs.

    def measure(
        self, name: str, workload: Workload, rate: float | None, *, first: int = 0, one_token_run: bool = False
    ) -> tuple[list[dict[str, Any]], list[Any]]:
        """Warm up, then measure `config.runs` runs, numbered from `first`. Returns their figures, and the timelines of
        the last one. Run n has the same requests in every process. `one_token_run` adds the time per output token of
        the run."""
        title = name if rate is None else f"{name} at {rate:g}/s"
        self._warm_up(title, self.requests(name, workload, 0, rate))
        runs: list[dict[str, Any]] = []
        lines: list[Any] = []
        for i in range(self.config.runs):
            of, number = f"{title}, run {i + 1} of {self.config.runs}", 2 * (first + i) + 1
            figures, lines = self._run(of, self.requests(name, workload, number, rate))
            if one_token_run:
                # With other prompts: a server may have cached those of the run.
                figures |= self._tpot_of_run(of, self.requests(name, workload, number + 1, rate), figures)
            runs.append(figures)
        return runs, lines

    def _warm_up(self, title: str, requests: Sequence[TimedRequest]) -> None:
        if few := requests[: self.config.warmup]:
            short = [replace(r, arrival=0.0, output_tokens=min(r.output_tokens, WARMUP_TOKENS)) for r in few]
            self._run(f"{title}, warm-up", short)

    def _run(self, title: str, requests: Sequence[TimedRequest]) -> tuple[dict[str, Any], list[Any]]:
        with self.bar(title, len(requests)) as done:
            timelines, extra = self.target.run(requests, done)
        figures = measure(timelines, self.slo) | extra | {"requests_hash": hash_of(requests)}
        if self.target.remembers and (again := self._sent_before(requests)):
            figures["prompts_sent_before"] = again
        failures = dict.fromkeys(line.failure for line in timelines if line.failure)
        if figures["failed"] == len(timelines):
            raise ConfigError(f"{title}: every request failed; the first: {next(iter(failures))}")
        if failures:
            figures["failures"] = list(failures)[:5]
        return figures, timelines

    def _sent_before(self, requests: Sequence[TimedRequest]) -> int:
        """Return the number of prompts already used by an earlier run, which the target may have cached."""
        prompts = {hash(request.prompt_ids) for request in requests}
        again = len(prompts & self._sent)
        if again and not self._noted:
            self._noted = True
            self.note(
                f"{again} of {len(requests)} prompts had been sent before, and the server may still have them in its "
                "prefix cache; prompts_sent_before in the results counts them per run"
            )
        self._sent |= prompts
        return again

    def _tpot_of_run(self, title: str, requests: Sequence[TimedRequest], figures: dict[str, Any]) -> dict[str, Any]:
        lengths = {request.output_tokens for request in requests}
        at_once = all(request.arrival == 0.0 for request in requests)
        alone = all(request.continues is None for request in requests)
        if not at_once or not alone or len(lengths) > 1 or lengths == {1} or figures["failed"]:
            return {}
        first, _ = self._run(f"{title}, one token", [replace(r, output_tokens=1) for r in requests])
        tpot = per_token_of_run(figures["seconds"], first["seconds"], lengths.pop())
        return {"one_token_run_s": first["seconds"], "run_tpot_ms": round(tpot, 4)}


def hash_of(requests: Sequence[TimedRequest]) -> str:
    """Return a hash that is equal in all processes for equal requests; shows whether two runs did the same work."""
    digest = hashlib.sha256()
    for request in requests:
        digest.update(repr(request).encode())
    return digest.hexdigest()[:16]
