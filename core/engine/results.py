"""A step's result becomes news of its sequences: what came, where an output ends, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from dovetail.core.engine.grammars import Ended, Grammars
from dovetail.core.engine.pooling import Pooler
from dovetail.core.interfaces import FinishReason, RowResult, Sequence, StepPlan, StepResult, TokenLogprobs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_new = tuple.__new__


class SequenceEvent(NamedTuple):
    """News of one sequence after a step."""

    uid: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    reason: FinishReason | None = None
    detail: str = ""
    """Why a rejected sequence was rejected."""
    pooled_C: NDArray[np.float32] | None = None
    """Of a prompt that is embedded; it ends with it."""
    hidden: bool = False
    """The last token ended the output and is no part of its text."""


def ended_event(ended: Ended) -> SequenceEvent:
    """Of a sequence that its grammar ended."""
    return SequenceEvent(ended.uid, (), reason=ended.reason, detail=ended.detail)


class Results:
    """Writes `tokens` of sequences. Belongs to the engine, which ends those that it says have ended."""

    def __init__(self, sequences: Mapping[int, Sequence], grammars: Grammars | None, pooler: Pooler) -> None:
        """`sequences`: those the engine has, by uid, as they come and go."""
        self._sequences, self._grammars, self._pooler = sequences, grammars, pooler
        self._prompt_logprobs: dict[int, tuple[int, int, int]] = {}
        """uid -> (epoch, prompt positions reported in it, positions ever reported): a preempted prompt is fed again."""

    def take(
        self, plan: StepPlan, result: StepResult
    ) -> tuple[list[SequenceEvent], list[tuple[int, int, FinishReason]]]:
        """Append what came. The news, and who has ended: uid, tokens to keep, reason."""
        events: list[SequenceEvent] = []
        ended: list[tuple[int, int, FinishReason]] = []
        sequence, grammars = self._sequences.get, self._grammars or ()
        for row in result.rows:
            _, uid, _, tokens, logprobs, prompt_logprobs, _ = row
            seq = sequence(uid)
            if seq is None:
                continue
            known = seq.tokens
            if (
                tokens
                and not prompt_logprobs
                and uid not in grammars
                and seq.request.stop_ids.isdisjoint(tokens)
                and len(known) + len(tokens) < seq.limit
            ):
                # It goes on, as nearly all do: as `_extend`, without a Python frame for each row.
                known += tokens
                events.append(_new(SequenceEvent, (uid, tokens, logprobs, (), None, "", None, False)))
                continue
            if tokens or prompt_logprobs:
                event = self._extend(seq, row)
            elif row.pooled_C is not None and (
                (pooled_C := self._pooler.add(seq, plan.rows[row.row], row)) is not None
            ):
                event = SequenceEvent(seq.uid, (), reason=FinishReason.STOP, pooled_C=pooled_C)
            else:
                continue
            events.append(event)
            if event.reason is not None:
                ended.append((seq.uid, seq.known_len - len(row.tokens) + len(event.tokens), event.reason))
        return events, ended

    def forget(self, uid: int) -> None:
        """The sequence is over. Idempotent."""
        self._prompt_logprobs.pop(uid, None)

    def _extend(self, seq: Sequence, row: RowResult) -> SequenceEvent:
        """Append what came; the event shows what stands up to the first token that ends the sequence (`Engine.finish`
        drops the rest)."""
        request, tokens, limit = seq.request, row.tokens, seq.limit
        stop_ids, grammar = request.stop_ids, request.params.grammar
        length = len(seq.tokens)
        reason, detail, kept, logprobs = None, "", tokens, row.logprobs
        for token in tokens:
            length += 1
            if token in stop_ids and length > len(request.prompt_ids) + request.params.min_tokens:
                reason = FinishReason.STOP
            elif grammar is not None and (over := self._grammars.advance(seq.uid, token)) is not None:
                reason, detail = over.reason, over.detail
            elif length >= limit:
                reason = FinishReason.LENGTH
            if reason is not None:
                kept = tokens[: length - len(seq.tokens)]
                logprobs = logprobs[: len(kept)]
                break
        seq.tokens += tokens
        hidden = reason is FinishReason.STOP and kept[-1] in stop_ids and not request.params.include_stop
        prompt_logprobs = self._new_prompt_logprobs(row) if row.prompt_logprobs else ()
        return SequenceEvent(seq.uid, kept, logprobs, prompt_logprobs, reason, detail, hidden=hidden)

    def _new_prompt_logprobs(self, row: RowResult) -> tuple[TokenLogprobs, ...]:
        epoch, position, reported = self._prompt_logprobs.get(row.uid, (row.epoch, 0, 0))
        if epoch != row.epoch:
            position = 0
        new = row.prompt_logprobs[max(reported - position, 0) :]
        position += len(row.prompt_logprobs)
        self._prompt_logprobs[row.uid] = (row.epoch, position, max(reported, position))
        return new
