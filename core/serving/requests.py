"""Requests of front-ends in the engine: commands become sequences, and what steps bring becomes news."""

from __future__ import annotations

import time
from dataclasses import dataclass

from dovetail.core.engine.engine import Engine
from dovetail.core.engine.output import REASONS
from dovetail.core.engine.results import SequenceEvent
from dovetail.core.errors import RequestError
from dovetail.core.interfaces import FinishReason, SamplingParams, Sequence
from dovetail.core.serving.link import EngineEnd
from dovetail.core.serving.protocol import Add, Finish, News, write_logprobs


@dataclass(slots=True)
class _Running:
    """One request in the engine."""

    link: EngineEnd
    id: int
    sequences: list[Sequence]
    left: int
    """Samples that still run."""


class Requests:
    """News of a request gathers on the link that it came by."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running: dict[int, _Running] = {}
        """By the front-end's number."""
        self._by_uid: dict[int, _Running] = {}

    def add(self, link: EngineEnd, command: Add) -> None:
        clock = time.perf_counter()
        try:
            sequences = self._engine.add(
                command.prompt_ids,
                SamplingParams(**command.params),
                priority=command.priority,
                deadline=None if command.deadline is None else clock + command.deadline,
                user=command.user,
                cache_salt=command.cache_salt,
                hints=command.hints,
                pooling=command.pooling,
                adapter=command.adapter,
                number=command.id,
            )
        except (RequestError, TypeError, ValueError) as error:
            self._reject(link, command.id, str(error), getattr(error, "status", 400))
            return
        running = self._running[command.id] = _Running(link, command.id, sequences, len(sequences))
        for seq in sequences:
            self._by_uid[seq.uid] = running

    def abort(self, id: int) -> None:
        """The client is gone."""
        if running := self._running.pop(id, None):
            self._drop(running)

    def finish(self, command: Finish) -> None:
        if (running := self._running.get(command.id)) is not None:
            seq = running.sequences[command.sample]
            self._engine.finish(seq.uid, seq.prompt_len + command.tokens, FinishReason.STOP)
            self._ended(running, seq.uid)

    def abort_all(self, link: EngineEnd) -> None:
        """Its other end is gone, and with it whoever wanted them."""
        for running in [running for running in self._running.values() if running.link is link]:
            self.abort(running.id)

    def note(self, event: SequenceEvent) -> None:
        running = self._by_uid.get(event.uid)
        if running is None:
            return
        if event.reason is FinishReason.REJECTED:
            del self._running[running.id]
            self._drop(running)
            self._reject(running.link, running.id, event.detail, 400)
            return
        running.link.news.append(
            News(
                running.id,
                event.uid & 0xFF,
                event.tokens,
                REASONS[event.reason] if event.reason else None,
                event.hidden,
                write_logprobs(event.logprobs) if event.logprobs else [],
                write_logprobs(event.prompt_logprobs) if event.prompt_logprobs else [],
                running.sequences[0].cached,
                pooled=b"" if event.pooled_C is None else event.pooled_C.astype("<f4", copy=False).tobytes(),
            )
        )
        if event.reason is not None:
            self._ended(running, event.uid)

    def _reject(self, link: EngineEnd, id: int, detail: str, status: int) -> None:
        link.news.append(News(id, 0, (), REASONS[FinishReason.REJECTED], detail=detail, status=status))

    def _drop(self, running: _Running) -> None:
        for seq in running.sequences:
            if self._by_uid.pop(seq.uid, None) is not None:
                self._engine.abort(seq.uid)

    def _ended(self, running: _Running, uid: int) -> None:
        if self._by_uid.pop(uid, None) is None:
            return
        running.left -= 1
        if not running.left:
            self._running.pop(running.id, None)
