"""Recording: a file of a recorder, read and checked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from dovetail.core.errors import ConfigError, shown
from dovetail.core.interfaces import Grammar, KVGroup, Plane, Request, SamplingParams, SchedulerLimits
from dovetail.core.recording.events import Added, AnyEvent, Arrived, Emptied, Ended, Header, Planned, Resulted
from dovetail.core.recording.file import read_frames

if TYPE_CHECKING:
    from numpy.typing import NDArray

_HEADER = msgspec.msgpack.Decoder(tuple[Header])
_SECONDS = ("clock", "arrival", "seconds", "launch_seconds", "device_seconds", "idle_seconds")
"""Fields of entries that are times."""
_EVENTS = msgspec.msgpack.Decoder(list[AnyEvent])

ANY_TEXT = Grammar(kind="regex", value="(?s:.*)")


@dataclass(slots=True)
class Life:
    """One sequence in a recording. Times are of the engine's clock, seconds."""

    number: int
    """Index in Recording.lives. A uid may be used again after its sequence has ended."""
    request: Arrived
    added: Added
    parent: Life | None = None
    """Set for further samples: the sequence whose prompt this one forks."""
    tokens: list[int] = field(default_factory=list)
    """Ids of the output, or their pseudonyms."""
    scheduled: float | None = None
    """Start of the decision with which it entered for the first time; None = it never did."""
    first_token: float | None = None
    ended: Ended | None = None
    """None = it ran when the recording ended."""
    cached: int = 0
    """Prompt tokens found in the prefix cache at the first entry."""
    preemptions: int = 0

    @property
    def output(self) -> int:
        """Output tokens that were kept. An aborted output counts as far as it came."""
        if self.ended is None or self.ended.reason == "abort":
            return len(self.tokens)
        return max(min(self.ended.keep_len - len(self.request.prompt) // 4, len(self.tokens)), 0)


class Recording:
    def __init__(self, path: str, option: str) -> None:
        """Read a recording. A file that was cut off is read up to the cut. Raises ConfigError, which names `option`,
        for one that cannot be used."""
        self.path, self._where = path, f"{option}={shown(Path(path))}"
        frames = read_frames(Path(path), option)
        try:
            first = next(frames, None)
            if first is None:
                raise ConfigError(f"{self._where}: it was cut off within its header, so there is nothing to replay")
            (self.header,) = _HEADER.decode(first)
            self.events: list[AnyEvent] = [event for frame in frames for event in _EVENTS.decode(frame)]
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self.fault(f"an entry is invalid ({error})") from None
        self.lives: list[Life] = []
        """Every sequence, in order of `Scheduler.add`."""
        self.placed: list[dict[int, Life]] = []
        """uid -> sequence, of each plan's rows and joins."""
        self._follow()
        if not self.lives:
            raise ConfigError(f"{self._where}: no request was recorded")

    def fault(self, reason: str) -> ConfigError:
        return ConfigError(f"{self._where}: it is damaged: {reason}")

    def _follow(self) -> None:
        """Check that the entries fit each other, and collect `lives`."""
        request: Arrived | None = None
        current: dict[int, Life] = {}
        launched: list[Planned] = []
        for event in self.events:
            if not all(math.isfinite(getattr(event, name, 0.0)) for name in _SECONDS):
                raise self.fault("a time is not finite")
            if isinstance(event, Arrived):
                request = event
                if len(request.prompt) % 4 or not request.prompt or min(self.ids(request.prompt)) < 0:
                    raise self.fault(f"request {request.uid} has no valid prompt")
            elif isinstance(event, Added):
                if request is None or ((old := current.get(event.uid)) is not None and old.ended is None):
                    raise self.fault(f"sequence {event.uid} does not belong to the request before it")
                parent = None if event.parent is None else current.get(event.parent)
                current[event.uid] = life = Life(len(self.lives), request, event, parent)
                self.lives.append(life)
            elif isinstance(event, Planned):
                self._plan(event, current)
                launched.append(event)
            elif isinstance(event, Resulted):
                plan = launched.pop(0) if launched else None
                if plan is None or plan.step != event.step:
                    raise self.fault(f"step {event.step} has a result and no plan before it")
                self._result(plan, event, self.placed[len(self.placed) - len(launched) - 1])
            elif isinstance(event, Ended):
                ending = current.get(event.uid)
                if ending is None or ending.ended is not None:
                    raise self.fault(f"sequence {event.uid} ends and had not begun")
                ending.ended = event

    def _plan(self, plan: Planned, current: Mapping[int, Life]) -> None:
        uids = {row.uid for row in plan.rows} | {join.uid for join in plan.joins}
        if missing := uids - current.keys():
            raise self.fault(f"step {plan.step} runs the unknown sequence {min(missing)}")
        self.placed.append({uid: current[uid] for uid in uids})
        for join in plan.joins:
            life = current[join.uid]
            if life.scheduled is None:
                life.scheduled, life.cached = plan.clock, join.computed
            life.preemptions = join.epoch

    def _result(self, plan: Planned, result: Resulted, placed: Mapping[int, Life]) -> None:
        rows = list(self.rows(result, len(plan.rows)))
        for row, (tokens, _) in zip(plan.rows, rows, strict=True):
            life = placed[row.uid]
            if life.ended is None and tokens and min(tokens) >= 0:
                life.tokens += tokens
                if life.first_token is None:
                    life.first_token = result.clock
            if life.request.pooling and row.bound >= len(life.request.prompt) // 4:
                life.first_token = result.clock

    def rows(self, result: Resulted, rows: int) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield (tokens, drafts verified) of each row."""
        counts, drafted = result.counts or [1] * rows, result.drafted or [0] * rows
        if len(result.tokens) % 4 or not len(counts) == len(drafted) == rows or sum(counts) * 4 != len(result.tokens):
            raise self.fault(f"the result of step {result.step} does not fit its plan of {rows} rows")
        ids, at = self.ids(result.tokens).tolist(), 0
        for count, drafts in zip(counts, drafted, strict=True):
            yield tuple(ids[at : at + count]), drafts
            at += count

    @staticmethod
    def ids(data: bytes) -> NDArray[np.int32]:
        return np.frombuffer(data, "<i4")

    # What a scheduler and an allocator are built from.

    @cached_property
    def limits(self) -> SchedulerLimits:
        try:
            return SchedulerLimits(**self.header.limits)
        except TypeError as error:
            raise self.fault(f"its limits are invalid ({error})") from None

    @cached_property
    def groups(self) -> tuple[KVGroup, ...]:
        import torch

        def plane(facts: Any) -> Plane:
            dtype = getattr(torch, facts.dtype, None)
            if not isinstance(dtype, torch.dtype):
                raise self.fault(f"a KV plane has the dtype {facts.dtype}")
            return Plane(facts.name, facts.shape, dtype)

        return tuple(
            KVGroup(g.id, g.layers, tuple(map(plane, g.planes)), g.kind, g.window, g.page_tokens)  # type: ignore[arg-type]
            for g in self.header.groups
        )

    def request(self, arrived: Arrived) -> Request:
        """Return a recorded request. A grammar whose text was not recorded is one of any text."""
        any_text = {"grammar": ANY_TEXT} if arrived.has_grammar else {}
        try:
            params = SamplingParams(**any_text | arrived.params)
        except ValueError as error:
            raise self.fault(f"request {arrived.uid} has invalid parameters ({error})") from None
        return Request(
            priority=arrived.priority,
            deadline=arrived.deadline,
            user=arrived.user,
            cache_salt=arrived.cache_salt,
            hints=arrived.hints,
            pooling=arrived.pooling,  # type: ignore[arg-type]
            adapter=arrived.adapter,
            uid=arrived.uid,
            prompt_ids=tuple(self.ids(arrived.prompt).tolist()),
            params=params,
            eos_ids=arrived.eos_ids,
            arrival=arrived.arrival,
        )

    # Figures.

    @cached_property
    def plans(self) -> Sequence[Planned]:
        return [event for event in self.events if isinstance(event, Planned)]

    @cached_property
    def results(self) -> Sequence[Resulted]:
        return [event for event in self.events if isinstance(event, Resulted)]

    @property
    def resets(self) -> int:
        return sum(isinstance(event, Emptied) for event in self.events)

    def spans(self) -> Iterator[tuple[int, Planned, Resulted, float, float]]:
        """Yield (index in `placed`, plan, result, start, end) of each finished step on the device. Without a measured
        device time it begins when the host submitted it or the preceding result arrived."""
        free = self.header.clock
        for i, (plan, result) in enumerate(zip(self.plans, self.results, strict=False)):
            began = max(free, plan.clock + plan.seconds)
            if result.device_seconds:
                began = max(free, result.clock - result.device_seconds)
            yield i, plan, result, began, result.clock
            free = result.clock
