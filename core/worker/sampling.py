"""The sampling half of a step: logits at the sampled positions, processors, verification, new lengths. R rows that
sample, W = 1 + most drafts, N = R * W logits rows, V vocabulary, S slots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from dovetail.core.interfaces import Collective, LateInputs, LogitsContext, LogitsProcessor, Model, Verify
from dovetail.core.interfaces.plan import LATE
from dovetail.core.ops import apply_bitmask
from dovetail.core.ops.logprobs import BestLogprobs, best_logprobs, logprobs_of
from dovetail.core.ops.step import Accepted, commit
from dovetail.core.worker.batch import Batch, Rows
from dovetail.core.worker.device_state import DeviceState
from dovetail.core.worker.row_sections import SamplePositions
from dovetail.core.worker.sampler import (
    SampleParams,
    probabilities,
    sample,
    sample_over_ranks,
    verify_rejection,
    verify_rejection_tree,
    verify_typical,
)
from dovetail.core.worker.simulated_acceptance import simulate
from dovetail.core.worker.slots import Slots
from dovetail.core.worker.verification import Keep, VerifiedDraws, process_trees, verify_draws


@dataclass(slots=True)
class SampledRows:
    """Device tensors that the sampling half of a step returns, for results and drafting."""

    tokens_RW: torch.Tensor
    """-1 = some logit is NaN or +inf (`draw`)."""
    accepted_R: torch.Tensor
    """Drafts accepted; -1 = the row samples nothing in this step."""
    slots_R: torch.Tensor
    lengths_R: torch.Tensor
    """Exact lengths, including the new tokens."""
    drafted_R: torch.Tensor
    """Drafts verified."""
    logprobs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    """(of the token, best values, best ids): [R, W], [R, W, n], [R, W, n]."""


@dataclass(slots=True)
class Masks:
    """Late inputs of a step. M positions that have a mask, Y rows with such positions, X rows whose masks are
    missing."""

    bits_MW: torch.Tensor
    """int32, as in LateInputs."""
    rows_M: torch.Tensor
    """Index into the N rows of logits."""
    masked_Y: torch.Tensor
    """Index into the R rows that sample."""
    limit_Y: torch.Tensor
    """Drafts to verify of these rows."""
    lacking_X: torch.Tensor | None
    """Index into the R rows that sample."""


def upload_masks(late: LateInputs, rows: Rows, device: torch.device) -> Masks:
    """Send the masks with one copy."""
    given = set(late.rows)
    place = {row: r for r, row in enumerate(rows.sampled)}
    limits = late.drafts or (0,) * len(late.rows)
    rows_of = [place[row] for row in late.rows]
    masked = [r * rows.width + w for r, drafts in zip(rows_of, limits, strict=True) for w in range(1 + drafts)]
    lacking = [r for row, r in place.items() if rows.flags[row] & LATE and row not in given]
    bits = late.masks_MW.view(np.int32)
    sizes = bits.size, len(masked), len(rows_of), len(limits), len(lacking)
    host = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    host.numpy()[: bits.size] = bits.reshape(-1)
    host.numpy()[bits.size :] = [*masked, *rows_of, *limits, *lacking]
    sent, *indices = host.to(device, non_blocking=True).split(sizes)
    rows_M, masked_Y, limit_Y, lacking_X = (index.long() for index in indices)
    return Masks(sent.view(bits.shape), rows_M, masked_Y, limit_Y, lacking_X if lacking else None)


def sit_out(lacking_X: torch.Tensor, at: SamplePositions, state: DeviceState) -> None:
    """Make these rows padding that samples nothing and changes no state; their last token counts as not computed."""
    state.computed_S[at.slots_R[lacking_X]] = at.base_R[lacking_X] - 1
    at.slots_R.index_fill_(0, lacking_X, state.scratch)


def sample_step(
    model: Model,
    states_NC: torch.Tensor,
    at: SamplePositions,
    batch: Batch,
    state: DeviceState,
    slots: Slots,
    processors: Mapping[str, LogitsProcessor],
    keep: Keep,
    masks: Masks | None = None,
    verify: Verify = "draws",
) -> SampledRows:
    """Draw and verify, then write tokens and lengths into the device state, where the next step reads them."""
    sampled_slots, width = batch.rows.sampled_slots, batch.rows.width
    rows = len(sampled_slots)
    infos = [slots[slot] for slot in sampled_slots]
    slots_N = at.slots_R.repeat_interleave(width)
    position_RW, position_N = at.position_RW, at.position_RW.reshape(-1)

    best = slots.most_logprobs(sampled_slots)
    wanted = {name for info in infos for name in info.processors}
    random, filtered = (not kind.isdisjoint(sampled_slots) for kind in (slots.random, slots.filtered))
    params = SampleParams.of(state, slots_N, random=random, filtered=filtered)
    by_draws = width == 1 or verify == "draws" or not params.random
    if best is None and masks is None and not wanted and not params.filtered and by_draws:
        tokens_RW = sample_over_ranks(model, states_NC, position_N, params).view(rows, width)
        tokens_RW = simulate(tokens_RW, at.slots_R, at.base_R, state, model.build.spec.vocab)
        return sampled_rows(verify_draws(tokens_RW, at, state, keep), at.slots_R)

    logits_NV = model.logits(states_NC)
    # Log-probabilities are those before masks and processors.
    raw_NV, top = logits_NV, None
    if best is not None:
        top = best_logprobs(logits_NV, max(best, 1), state.logprobs_S[slots_N])
    if masks is not None:
        at.limit_R[masks.masked_Y] = masks.limit_Y
        apply_bitmask(logits_NV, masks.bits_MW, masks.rows_M)

    if wanted:
        some = [processor for name, processor in processors.items() if name in wanted]
        if width > 1 and state.trees is not None:
            token_RW = torch.arange(rows * width, device=state.device).view(rows, width)
            apply = partial(apply_all, some)
            logits_NV = process_trees(logits_NV, token_RW, position_N, at, state, batch.rows.max_len, apply)
        else:
            ctx = LogitsContext(slots_N, position_N, state.tokens_SL, state.prompt_len_S, batch.rows.max_len)
            logits_NV = process(logits_NV, some, ctx, keep=top is not None)

    if masks is not None and masks.lacking_X is not None:
        sit_out(masks.lacking_X, at, state)
    if by_draws:
        drawn_RW = sample(logits_NV, position_N, params).view(rows, width)
        if masks is None:  # Drafts that a mask forbids cannot be accepted.
            drawn_RW = simulate(drawn_RW, at.slots_R, at.base_R, state, model.build.spec.vocab)
        verified = verify_draws(drawn_RW, at, state, keep)
    elif state.trees is not None:
        drawn_RW = _draw_by_rejection(logits_NV, at, position_RW, params, state, model.build.collective)
        verified = verify_draws(drawn_RW, at, state, keep)
    else:
        drawn_RW, accepted = _verify(logits_NV, at, position_RW, params, state, verify, model.build.collective)
        verified = VerifiedDraws(drawn_RW, accepted, None)
    if masks is not None and masks.lacking_X is not None:
        verified.accepted.accepted_R.index_fill_(0, masks.lacking_X, -1)

    # Masks leave the logits of tokens that can be drawn as they are.
    logprobs = None
    if top is not None:
        chosen_N, values_Nn, ids_Nn = token_logprobs(raw_NV, drawn_RW.reshape(-1), top)
        by_row = chosen_N.view(rows, width), values_Nn.view(rows, width, -1), ids_Nn.view(rows, width, -1)
        chosen, values, ids = map(verified.along, by_row)
        logprobs = chosen, values, ids
    return sampled_rows(verified, at.slots_R, logprobs)


def sampled_rows(
    verified: VerifiedDraws,
    slots_R: torch.Tensor,
    logprobs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> SampledRows:
    found = verified.accepted
    return SampledRows(verified.tokens_RW, found.accepted_R, slots_R, found.lengths_R, found.drafted_R, logprobs)


def process(
    logits_NV: torch.Tensor, processors: Iterable[LogitsProcessor], ctx: LogitsContext, *, keep: bool
) -> torch.Tensor:
    """Return what the processors make of the logits, in float32. Unless `keep`, they may overwrite `logits_NV`."""
    return apply_all(processors, logits_NV.to(torch.float32, copy=keep), ctx)


def apply_all(processors: Iterable[LogitsProcessor], logits_NV: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
    for processor in processors:
        logits_NV = processor.apply(logits_NV, ctx)
    return logits_NV


def token_logprobs(
    logits_NV: torch.Tensor, tokens_N: torch.Tensor, top: BestLogprobs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (of the token, best values, best ids): [N], [N, n], [N, n]. `logits_NV` are those of the model, to which
    `top` belongs."""
    return logprobs_of(logits_NV, tokens_N, top.total_N), top.values_Nn, top.ids_Nn


def warm_up_processors(processors: Mapping[str, LogitsProcessor], state: DeviceState, vocab: int) -> None:
    """Apply each processor to a row of the scratch slot, so that its kernels get compiled."""
    slots_N = torch.tensor([state.scratch], device=state.device)
    ctx = LogitsContext(slots_N, torch.ones_like(slots_N), state.tokens_SL, state.prompt_len_S, 1)
    for processor in processors.values():
        processor.apply(torch.zeros(1, vocab, device=state.device), ctx)


def _verify(
    logits_NV: torch.Tensor,
    at: SamplePositions,
    position_RW: torch.Tensor,
    params: SampleParams,
    state: DeviceState,
    verify: Verify,
    collective: Collective,
) -> tuple[torch.Tensor, Accepted]:
    """Verify by rejection or typical acceptance, on all ranks as on rank 0: the distributions of drafts may differ
    between ranks. Return tokens [R, W] and what was accepted of them; both are already in the device state."""
    rows, width = position_RW.shape
    draft_RK = state.tokens_SL[at.slots_R[:, None], position_RW[:, :-1]].long()
    count_R = torch.minimum(state.drafts_S[at.slots_R], at.limit_R)
    p_RWV = probabilities(logits_NV, params).view(rows, width, -1)
    if verify == "rejection":
        q_RKV = state.draft_probs_SKV[at.slots_R, : width - 1]
        verified = verify_rejection(p_RWV, q_RKV, draft_RK, count_R, state.key_S[at.slots_R], position_RW)
    else:
        own_RW = sample(logits_NV, position_RW.reshape(-1), params).view(rows, width)
        verified = verify_typical(p_RWV, own_RW, draft_RK, count_R)
    lengths = state.tokens_SL, state.computed_S, state.drafts_S
    found_RN = collective.broadcast(torch.cat((verified.tokens_RW, verified.accepted_R[:, None]), 1))
    tokens_RW, accepted_R = found_RN[:, :-1].contiguous(), found_RN[:, -1].contiguous()
    commit(tokens_RW, accepted_R, at.slots_R, at.base_R, *lengths)
    return tokens_RW, Accepted(accepted_R, at.base_R + accepted_R + 1, count_R)


def _draw_by_rejection(
    logits_NV: torch.Tensor,
    at: SamplePositions,
    position_RW: torch.Tensor,
    params: SampleParams,
    state: DeviceState,
    collective: Collective,
) -> torch.Tensor:
    """Return the draws with which trees are verified by rejection, [R, W], on all ranks those of rank 0."""
    assert state.trees is not None
    rows, width = position_RW.shape
    slots_R1, step_K = at.slots_R[:, None], torch.arange(width - 1, device=state.device)
    vocab = logits_NV.shape[-1]
    draft_RK = state.tokens_SL[slots_R1, at.base_R[:, None] + step_K].long().clamp(0, vocab - 1)
    trees = state.trees.parents_SK[slots_R1, step_K], state.drawn_SK[slots_R1, step_K]
    count_R = torch.minimum(state.drafts_S[at.slots_R], at.limit_R)
    p_RWV = probabilities(logits_NV, params).view(rows, width, -1)
    own_RW = sample(logits_NV, position_RW.reshape(-1), params).view(rows, width)
    q_RKV = state.draft_probs_SKV[at.slots_R]
    rows_and_keys = count_R, state.key_S[at.slots_R], position_RW
    return collective.broadcast(verify_rejection_tree(p_RWV, q_RKV, own_RW, draft_RK, *trees, *rows_and_keys))
