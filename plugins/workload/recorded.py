"""Requests of a recording."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import SamplingParams, TimedRequest, Workload, WorkloadContext
from dovetail.core.recording.recording import Life, Recording
from dovetail.plugins.workload.config import FIXED_BY_THE_RUN, RecordingConfig
from dovetail.plugins.workload.synthetic import check_length


class Recorded(Workload):
    """Each sample of a request becomes a request, since requests of a run have one sample."""

    config: RecordingConfig

    @cached_property
    def _recording(self) -> Recording:
        return Recording(self.config.path, "workload.path")

    def requests(self, ctx: WorkloadContext) -> Sequence[TimedRequest]:
        config, lives = self.config, self._recording.lives
        begin = self._recording.header.clock + config.start
        end = begin + config.seconds if config.seconds is not None else float("inf")
        kept = [life for life in lives if life.output and begin <= life.request.arrival < end]
        if not kept:
            raise ConfigError(f"workload.path={config.path}: no request with an output arrives in the chosen seconds")
        kept.sort(key=lambda life: life.request.arrival)
        first = kept[0].request.arrival
        return [self._request(life, first, ctx) for life in kept]

    def _request(self, life: Life, first: float, ctx: WorkloadContext) -> TimedRequest:
        request, speed = life.request, self.config.speed
        ids = self._recording.ids(request.prompt)
        if not self._recording.header.tokens:
            ids = ids % ctx.vocab
        elif ids.max() >= ctx.vocab:
            raise ConfigError(
                f"workload.path={self.config.path}: token id {ids.max()} of request {request.uid} is not in the "
                f"model's vocabulary of {ctx.vocab}"
            )
        check_length(f"recording ({self.config.path}, request {request.uid})", len(ids), life.output, ctx)
        params = {name: value for name, value in request.params.items() if name not in FIXED_BY_THE_RUN}
        return TimedRequest(
            tuple(ids.tolist()),
            life.output,
            (request.arrival - first) / speed,
            sampling=SamplingParams(**params),
            priority=request.priority,
            deadline=None if request.deadline is None else max(request.deadline - request.arrival, 1e-3),
            user=request.user,
            cache_salt=request.cache_salt.rpartition("\0")[2],
            hints=request.hints,
            adapter=request.adapter.partition("@")[0],
        )
