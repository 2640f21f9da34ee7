"""Recorder: writes the calls of an engine's scheduler, their results, and the state after them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from dovetail.core.interfaces import (
    ExecutorInfo,
    FinishReason,
    ModelSpec,
    Request,
    RowResult,
    Scheduler,
    SchedulerContext,
    SchedulerLimits,
    SchedulerStats,
    Sequence,
    StepPlan,
    StepResult,
)
from dovetail.core.recording.events import (
    Added,
    Arrived,
    Emptied,
    Ended,
    GroupFacts,
    Header,
    Idled,
    PlaneFacts,
    Planned,
    Resulted,
)
from dovetail.core.recording.file import FrameWriter, check_new, free_path
from dovetail.core.recording.pseudonyms import Pseudonyms

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dovetail.core.compose import Composition

_UID, _TOKENS, _DRAFTED = (itemgetter(RowResult._fields.index(name)) for name in ("uid", "tokens", "drafted"))

WITHOUT_TEXT = frozenset(
    "n max_tokens min_tokens temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty "
    "include_stop ignore_eos logprobs prompt_logprobs".split()
)
"""Fields of SamplingParams that hold no text and no token ids."""

SHAPES = ("architecture", "vocab", "layers", "hidden", "heads", "kv_heads", "head_dim", "max_len")
"""Fields of ModelSpec that identify a recording's model."""


class NoRecorder:
    """Recorder of an engine that records nothing, and the interface of `Recorder`. Called in the engine's thread, after
    the call that it is named for."""

    def added(self, seq: Sequence) -> None:
        """Scheduler.add."""

    def planned(
        self, ctx: SchedulerContext, plan: StepPlan | None, seconds: float = 0.0, launch_seconds: float = 0.0
    ) -> None:
        """Scheduler.schedule. A plan is given after it was launched."""

    def resulted(self, result: StepResult, clock: float) -> None:
        """Scheduler.update, before any sequence ends with it."""

    def ended(self, uid: int, keep_len: int, reason: FinishReason) -> None:
        """Scheduler.finish or abort."""

    def emptied(self) -> None:
        """KVAllocator.reset."""

    def close(self) -> None:
        """Finish the file. Idempotent."""


class Recorder(NoRecorder):
    """Hands what it is given to the file's thread, which encodes, compresses and writes it: requests, plans and results
    do not change once the engine has them."""

    def __init__(
        self,
        path: Path,
        composition: Composition,
        info: ExecutorInfo,
        limits: SchedulerLimits,
        scheduler: Scheduler,
        now: Callable[[], float],
    ) -> None:
        self._scheduler, self._now, tokens = scheduler, now, composition.engine.record_tokens
        self._entries = Entries(None if tokens else Pseudonyms(info.spec.vocab), drafts=limits.lookahead > 0)
        self._request: Request | None = None
        """The newest request. A server's first request may have the uid of its warm-up, which has ended."""
        header = Header(
            metadata.version("dovetail"),
            composition.overrides,
            composition.config_dirs,
            composition.nodes(),
            shapes(info.spec),
            info.device,
            asdict(limits),
            tuple(_group(group) for group in info.groups),
            dict(info.num_pages),
            info.adapter_slots,
            tokens,
            now(),
            time.time(),
        )
        self._file = FrameWriter(path, msgspec.msgpack.encode(header))

    def added(self, seq: Sequence) -> None:
        if seq.request is not self._request:
            self._request = seq.request
            self._file.put(self._entries.arrived, seq.request)
        parent = None if seq.parent is None else seq.parent.uid
        self._file.put(self._entries.added, seq.uid, seq.sample, parent, seq.limit)

    def planned(
        self, ctx: SchedulerContext, plan: StepPlan | None, seconds: float = 0.0, launch_seconds: float = 0.0
    ) -> None:
        if plan is None:
            self._file.put(self._entries.idled, ctx.step, ctx.clock)
        else:
            self._file.put(self._entries.planned, plan, ctx.clock, seconds, launch_seconds, self._scheduler.stats())

    def resulted(self, result: StepResult, clock: float) -> None:
        self._file.put(self._entries.resulted, result, clock)

    def ended(self, uid: int, keep_len: int, reason: FinishReason) -> None:
        self._file.put(self._entries.ended, uid, self._now(), keep_len, reason)

    def emptied(self) -> None:
        self._file.put(self._entries.emptied, self._now())

    def close(self) -> None:
        self._file.close()


class Entries:
    """Encodes entries, in their order. Called in the file's thread only."""

    def __init__(self, pseudonyms: Pseudonyms | None, *, drafts: bool) -> None:
        """`pseudonyms`: None = token ids and other text are kept. `drafts`: whether rows may verify drafts."""
        self._pseudonyms, self._drafts = pseudonyms, drafts
        self._encode = msgspec.msgpack.Encoder().encode
        self._prompt_state = np.uint64(0)
        """State of the pseudonyms after the newest request's prompt."""

    def arrived(self, request: Request) -> bytes:
        params = request.params.model_dump(mode="json", exclude_defaults=True)
        salt = request.cache_salt
        if self._pseudonyms is None:
            ids = np.array(request.prompt_ids, np.int32)
        else:
            ids, self._prompt_state = self._pseudonyms.prompt(request.prompt_ids)
            params = {name: value for name, value in params.items() if name in WITHOUT_TEXT}
            salt = self._pseudonyms.salt(salt)
        entry = Arrived(
            request.uid,
            ids.tobytes(),
            request.arrival,
            params,
            request.params.grammar is not None,
            request.eos_ids,
            request.priority,
            request.deadline,
            request.user,
            salt,
            dict(request.hints),
            request.pooling,
            request.adapter,
        )
        return self._encode(entry)

    def added(self, uid: int, sample: int, parent: int | None, limit: int) -> bytes:
        if self._pseudonyms is not None:
            self._pseudonyms.add(uid, self._prompt_state)
        return self._encode(Added(uid, sample, parent, limit))

    def idled(self, step: int, clock: float) -> bytes:
        return self._encode(Idled(step, clock))

    def planned(
        self, plan: StepPlan, clock: float, seconds: float, launch_seconds: float, queue: SchedulerStats
    ) -> bytes:
        lists = (plan.rows, plan.joins, plan.leaves, plan.pages, plan.ops)
        counts = queue.waiting, queue.running, queue.preemptions
        drafter = plan.follows, plan.catch_up
        return self._encode(Planned(plan.step, clock, seconds, *lists, *counts, launch_seconds, *drafter))

    def resulted(self, result: StepResult, clock: float) -> bytes:
        tokens = list(map(_TOKENS, result.rows))
        flat = list(chain.from_iterable(tokens))
        single = len(flat) == len(tokens) and not (self._drafts and () in tokens)
        ids = np.array(flat, np.int32) if self._pseudonyms is None else self._hidden(result, tokens, flat, single)
        counts = None if single else list(map(len, tokens))
        drafted = list(map(_DRAFTED, result.rows)) if self._drafts else None
        seconds = result.device_seconds, result.idle_seconds
        return self._encode(Resulted(result.step, clock, *seconds, ids.tobytes(), counts, drafted))

    def _hidden(
        self, result: StepResult, tokens: list[tuple[int, ...]], flat: list[int], single: bool
    ) -> NDArray[np.int32]:
        """Return the pseudonyms of a step's tokens. Tokens of ended sequences, which are dropped, have the id 0; -1
        stays."""
        assert self._pseudonyms is not None
        follow, places = self._pseudonyms.follow, self._pseudonyms.places(map(_UID, result.rows))
        ids = np.fromiter(flat, np.int64, len(flat))
        if single and None not in places and ids.min() >= 0:
            return follow(places, ids)  # nearly every step
        found = [[min(token, 0) for token in each] for each in tokens]
        for place in range(max(map(len, tokens), default=0)):
            rows = [r for r, each in enumerate(tokens) if each[place : place + 1] >= (0,) and places[r] is not None]
            ids = np.array([tokens[row][place] for row in rows], np.int64)
            for row, token in zip(rows, follow([places[row] for row in rows], ids).tolist(), strict=True):
                found[row][place] = token
        return np.array(list(chain.from_iterable(found)), np.int32)

    def ended(self, uid: int, clock: float, keep_len: int, reason: FinishReason) -> bytes:
        if self._pseudonyms is not None:
            self._pseudonyms.drop(uid)
        return self._encode(Ended(uid, clock, keep_len, reason.value))

    def emptied(self, clock: float) -> bytes:
        return self._encode(Emptied(clock))


def shapes(spec: ModelSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in SHAPES}


def _group(group: Any) -> GroupFacts:
    planes = tuple(PlaneFacts(p.name, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for p in group.planes)
    return GroupFacts(group.id, group.layers, planes, group.kind, group.window, group.page_tokens)


def make_recorder(
    path: Path | None,
    composition: Composition,
    info: ExecutorInfo,
    limits: SchedulerLimits,
    scheduler: Scheduler,
    now: Callable[[], float],
) -> NoRecorder:
    """Return the recorder of a new engine. `path`: a new file; None = nothing is recorded. `now`: the engine's time."""
    return NoRecorder() if path is None else Recorder(path, composition, info, limits, scheduler, now)


def recording_path(composition: Composition, *, again: bool = False) -> Path | None:
    """Return the path of engine.record, or None. Raises ConfigError if no new file can be made there. `again`: the
    engine is started once more, and gets a file beside that of its predecessor."""
    if composition.engine.record is None:
        return None
    path = Path(composition.engine.record)
    if again:
        return free_path(path)
    check_new(path)
    return path
