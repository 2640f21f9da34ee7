"""The sampling half of a step: logits at the sampled positions, processors, verification, new lengths, next drafts.

R rows that sample, W = 1 + most drafts, N = R * W logits rows, V vocabulary, S slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dovetail.core.engine.batch import Batch
from dovetail.core.engine.device_state import DeviceState
from dovetail.core.engine.sampler import SampleParams, probabilities, sample
from dovetail.core.engine.verify import Verdict, verify_match, verify_rejection
from dovetail.core.interfaces import LogitsContext, LogitsProcessor, Row, RowFlag


@dataclass(slots=True)
class Sampled:
    """Device tensors of a step's outcome."""

    tokens_RW: torch.Tensor
    accepted_R: torch.Tensor
    slots_R: torch.Tensor
    lengths_R: torch.Tensor
    """Exact lengths, the new tokens included."""
    logprobs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    """(of the token, best values, best ids): [R, W], [R, W, n], [R, W, n]."""


@dataclass(slots=True)
class Positions:
    """Where the step samples."""

    rows: list[Row]
    token_RW: torch.Tensor
    """Index into the step's tokens."""
    slots_R: torch.Tensor
    base_R: torch.Tensor
    """Tokens before the first one to be sampled: where it will stand."""
    count_R: torch.Tensor
    """Drafts actually standing there, 0 .. W-1."""


def _first_sampled(row: Row) -> int:
    """Of the row's tokens: a decode row samples after each, a chunk after its last."""
    return 0 if row.flags & RowFlag.DECODE else row.count - 1


def locate(batch: Batch, state: DeviceState) -> Positions:
    rows = [batch.rows[i] for i in batch.sampled]
    packed = state.upload(
        [(i, row.slot, _first_sampled(row), row.draft) for i, row in zip(batch.sampled, rows, strict=True)],  # type: ignore[arg-type]
        torch.int64,
    )
    index_R, slots_R, offset_R, draft_R = packed.unbind(1)
    first_R = batch.first_B[index_R] + offset_R
    step_W = torch.arange(batch.width, device=state.device)
    token_RW = first_R[:, None] + torch.minimum(step_W[None, :], draft_R[:, None])
    count_R = torch.minimum(state.drafts_S[slots_R], draft_R)
    return Positions(rows, token_RW, slots_R, batch.positions_T[first_R] + 1, count_R)


def sample_params(slots_N: torch.Tensor, rows: list[Row], state: DeviceState) -> SampleParams:
    params = [state.slots[row.slot].params for row in rows]
    return SampleParams(
        state.temperature_S[slots_N],
        state.top_k_S[slots_N],
        state.top_p_S[slots_N],
        state.min_p_S[slots_N],
        state.key_S[slots_N],
        random=any(p.temperature > 0 for p in params),
        filtered=any(p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0) for p in params),
    )


def sample_step(
    logits_NV: torch.Tensor, at: Positions, batch: Batch, state: DeviceState, processors: Mapping[str, LogitsProcessor]
) -> Sampled:
    """Draw and verify, then write the outcome into the device state: this is the next step's input."""
    rows, width = at.rows, batch.width
    slots_N = at.slots_R.repeat_interleave(width)
    step_W = torch.arange(width, device=state.device)
    position_RW = at.base_R[:, None] + step_W
    position_N = position_RW.reshape(-1)

    best = max((p for p in (state.slots[row.slot].params.logprobs for row in rows) if p is not None), default=-1)
    raw = logits_NV.log_softmax(-1) if best >= 0 else None

    wanted = {name for row in rows for name in state.slots[row.slot].processors}
    if wanted:
        ctx = LogitsContext(slots_N, position_N, state.tokens_SL, state.prompt_len_S, batch.max_len)
        for name, processor in processors.items():
            if name in wanted:
                logits_NV = processor.apply(logits_NV, ctx)

    params = sample_params(slots_N, rows, state)
    verdict = _verify(logits_NV, at, position_RW, params, batch, state)

    # Known tokens, computed KV and drafts move on; what lies past the accepted ones goes to the scratch row.
    inside = step_W <= verdict.accepted_R[:, None]
    rows_RW = torch.where(inside, at.slots_R[:, None], state.scratch)
    place_RW = torch.where(inside, position_RW, 0)
    state.tokens_SL[rows_RW, place_RW] = verdict.tokens_RW.int()
    state.computed_S[at.slots_R] = at.base_R + verdict.accepted_R
    state.drafts_S.index_fill_(0, at.slots_R, 0)  # `= 0` would copy the 0 from the host and wait

    logprobs = None
    if raw is not None:
        raw_RWV = raw.view(len(rows), width, -1)
        top = raw_RWV.topk(max(best, 1), dim=-1)
        logprobs = (raw_RWV.gather(-1, verdict.tokens_RW[..., None]).squeeze(-1), top.values, top.indices)
    return Sampled(verdict.tokens_RW, verdict.accepted_R, at.slots_R, at.base_R + verdict.accepted_R + 1, logprobs)


def _verify(
    logits_NV: torch.Tensor,
    at: Positions,
    position_RW: torch.Tensor,
    params: SampleParams,
    batch: Batch,
    state: DeviceState,
) -> Verdict:
    rows, width = position_RW.shape
    if width == 1:
        return Verdict(sample(logits_NV, position_RW.reshape(-1), params)[:, None], torch.zeros_like(at.count_R))
    draft_RK = state.tokens_SL[at.slots_R[:, None], position_RW[:, :-1]].long()
    if state.draft_probs_SKV is None or not params.random:
        target = sample(logits_NV, position_RW.reshape(-1), params).view(rows, width)
        return verify_match(target, draft_RK, at.count_R)
    p_RWV = probabilities(logits_NV, params).view(rows, width, -1)
    q_RKV = state.draft_probs_SKV[at.slots_R, : width - 1]
    return verify_rejection(p_RWV, q_RKV, draft_RK, at.count_R, state.key_S[at.slots_R], position_RW)


def advance_chunks(batch: Batch, state: DeviceState) -> None:
    """Chunks that do not sample only move the computed length."""
    chunks = [row for row in batch.rows if not row.flags & RowFlag.SAMPLE]
    if chunks:
        packed = state.upload([(row.slot, row.count) for row in chunks], torch.int64)  # type: ignore[arg-type]
        state.computed_S[packed[:, 0]] += packed[:, 1]
