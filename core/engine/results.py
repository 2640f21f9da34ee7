"""Turns the result of a step into events of its sequences: new tokens, and where and why an output ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dovetail.core.engine.grammars import Ended, Grammars
from dovetail.core.engine.pooling import add_chunk
from dovetail.core.engine.tracked import Tracked
from dovetail.core.interfaces import FinishReason, RowResult, StepPlan, StepResult, TokenLogprobs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_new = tuple.__new__

NOT_FINITE = "the model's logits are NaN or infinite, so no token could be sampled"


class SequenceEvent(NamedTuple):
    """New tokens of one sequence after a step, or its end."""

    uid: int
    tokens: tuple[int, ...]
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    reason: FinishReason | None = None
    detail: str = ""
    """Why a rejected sequence was rejected."""
    pooled_C: NDArray[np.float32] | None = None
    """Embedding of the prompt, not normalized; the sequence ends with it."""
    hidden: bool = False
    """The last token ended the output and is not part of its text."""
    status: int = 400
    """HTTP status of a rejection."""


def ended_event(ended: Ended) -> SequenceEvent:
    """Event of a sequence that its grammar ended."""
    return SequenceEvent(ended.uid, (), reason=ended.reason, detail=ended.detail)


class Results:
    """Appends results to the engine's sequences and reports which of them have ended."""

    def __init__(self, tracked: Mapping[int, Tracked], grammars: Grammars | None) -> None:
        """`tracked`: the engine's sequences by uid, as they come and go."""
        self._tracked, self._grammars = tracked, grammars

    def take(
        self, plan: StepPlan, result: StepResult
    ) -> tuple[list[SequenceEvent], list[tuple[int, int, FinishReason]]]:
        """Append the tokens of a step. Return its events, and (uid, tokens to keep, reason) of sequences that ended."""
        events: list[SequenceEvent] = []
        ended: list[tuple[int, int, FinishReason]] = []
        find, no_grammars = self._tracked.get, self._grammars is None or not self._grammars.running
        for row in result.rows:
            _, uid, _, tokens, logprobs, prompt_logprobs, _, _ = row
            tracked = find(uid)
            if tracked is None:
                continue
            seq = tracked.seq
            known = seq.tokens
            if (
                tokens
                and tokens[-1] >= 0
                and not prompt_logprobs
                and (no_grammars or tracked.grammar is None)
                and seq.request.stop_ids.isdisjoint(tokens)
                and len(known) + len(tokens) < seq.limit
            ):
                # Nearly every row: the sequence goes on. The same as `_extend` without a call per row.
                known += tokens
                events.append(_new(SequenceEvent, (uid, tokens, logprobs, (), None, "", None, False, 400)))
                continue
            if tokens or prompt_logprobs:
                event = self._extend(tracked, row)
            elif row.pooled_C is not None and ((pooled_C := add_chunk(tracked, plan.rows[row.row], row)) is not None):
                event = SequenceEvent(uid, (), reason=FinishReason.STOP, pooled_C=pooled_C)
            else:
                continue
            events.append(event)
            if event.status == 500:
                ended.append((uid, 0, FinishReason.REJECTED))
            elif event.reason is not None:
                ended.append((uid, seq.known_len - len(row.tokens) + len(event.tokens), event.reason))
        return events, ended

    def _extend(self, tracked: Tracked, row: RowResult) -> SequenceEvent:
        """Append a row's tokens. The event has those up to the sequence's end; `Engine.finish` drops the rest."""
        seq = tracked.seq
        if row.tokens and row.tokens[-1] < 0:
            return SequenceEvent(seq.uid, (), reason=FinishReason.REJECTED, detail=NOT_FINITE, status=500)
        request, tokens, limit = seq.request, row.tokens, seq.limit
        stop_ids, grammar = request.stop_ids, request.params.grammar
        length = len(seq.tokens)
        reason, detail, kept, logprobs = None, "", tokens, row.logprobs
        for token in tokens:
            length += 1
            if token in stop_ids and length > len(request.prompt_ids) + request.params.min_tokens:
                reason = FinishReason.STOP
            elif grammar is not None and (over := self._grammars.advance(tracked, token)) is not None:
                reason, detail = over.reason, over.detail
            elif length >= limit:
                reason = FinishReason.LENGTH
            if reason is not None:
                kept = tokens[: length - len(seq.tokens)]
                logprobs = logprobs[: len(kept)]
                break
        seq.tokens += tokens
        if tokens and reason is None and grammar is not None:
            self._grammars.follow(tracked)
        hidden = reason is FinishReason.STOP and kept[-1] in stop_ids and not request.params.include_stop
        prompt_logprobs = self._new_prompt_logprobs(tracked, row) if row.prompt_logprobs else ()
        return SequenceEvent(seq.uid, kept, logprobs, prompt_logprobs, reason, detail, hidden=hidden)

    @staticmethod
    def _new_prompt_logprobs(tracked: Tracked, row: RowResult) -> Sequence[TokenLogprobs]:
        """Return the logprobs of positions that no earlier event has reported."""
        epoch, position, reported = tracked.prompt_logprobs or (row.epoch, 0, 0)
        if epoch != row.epoch:
            position = 0
        new = row.prompt_logprobs[max(reported - position, 0) :]
        position += len(row.prompt_logprobs)
        tracked.prompt_logprobs = row.epoch, position, max(reported, position)
        return new
