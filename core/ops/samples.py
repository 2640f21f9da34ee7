"""Inputs of a step's sampling part: the states, positions and slots of the tokens that a step samples after. R rows, W
positions of a row, N positions of all rows, T tokens of the step, C channels."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SampleInputs:
    """Inputs of a step's sampling part, for R rows of W positions: N = R * W. int64 unless stated otherwise."""

    states_NC: torch.Tensor
    """Hidden states, in the model's dtype."""
    position_N: torch.Tensor
    """Number of tokens before the one to be drawn."""
    slots_N: torch.Tensor
    slots_R: torch.Tensor
    base_R: torch.Tensor
    """position_N of each row's first position."""
    limit_R: torch.Tensor
    """Maximum number of drafts to verify."""
    token_RW: torch.Tensor | None = None
    """Index of each row's positions into N, for rows with unlike numbers of positions; None = all rows have W."""

    @classmethod
    def empty(cls, rows: int, width: int, channels: int, dtype: torch.dtype, device: torch.device) -> SampleInputs:
        states_NC = torch.zeros(rows * width, channels, dtype=dtype, device=device)
        per_position = torch.zeros(2, rows * width, dtype=torch.int64, device=device)
        return cls(states_NC, *per_position, *torch.zeros(3, rows, dtype=torch.int64, device=device))

    @classmethod
    def empty_ragged(
        cls, tokens: int, rows: int, width: int, channels: int, dtype: torch.dtype, device: torch.device
    ) -> SampleInputs:
        """Return inputs for `tokens` positions of up to `rows` rows, which have at most `width` each."""
        states_NC = torch.zeros(tokens, channels, dtype=dtype, device=device)
        position_N, slots_N = torch.zeros(2, tokens, dtype=torch.int64, device=device)
        slots_R, base_R, limit_R = torch.zeros(3, rows, dtype=torch.int64, device=device)
        token_RW = torch.zeros(rows, width, dtype=torch.int64, device=device)
        return cls(states_NC, position_N, slots_N, slots_R, base_R, limit_R, token_RW)

    def by_row(self, values_N: torch.Tensor) -> torch.Tensor:
        """Return [R, W, ...]. Positions past a ragged row's last one repeat it."""
        if self.token_RW is not None:
            return values_N[self.token_RW]
        return values_N.unflatten(0, (len(self.slots_R), -1))

    def first(self, rows: int, tokens: int = 0) -> SampleInputs:
        """Return views of the first rows. `tokens`: positions of ragged rows."""
        many = tokens or rows * (len(self.slots_N) // len(self.slots_R))
        return SampleInputs(
            self.states_NC[:many],
            self.position_N[:many],
            self.slots_N[:many],
            self.slots_R[:rows],
            self.base_R[:rows],
            self.limit_R[:rows],
            None if self.token_RW is None else self.token_RW[:rows],
        )


def take_tokens(
    states_TC: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    samples_R3: torch.Tensor,
    into: SampleInputs,
) -> None:
    """Fill ragged inputs for a step that samples after each of its T tokens, for rows as in `gather_samples`."""
    assert into.token_RW is not None
    first_R, slots_R, limit_R = samples_R3.unbind(1)
    into.states_NC.copy_(states_TC)
    torch.add(positions_T, 1, out=into.position_N)
    into.slots_N.copy_(slots_T)
    into.slots_R.copy_(slots_R)
    into.limit_R.copy_(limit_R)
    into.base_R.copy_(into.position_N[first_R])
    step_W = torch.arange(into.token_RW.shape[1], device=states_TC.device)
    into.token_RW.copy_(first_R[:, None] + torch.minimum(step_W, limit_R[:, None]))


def gather_samples(
    states_TC: torch.Tensor, positions_T: torch.Tensor, samples_R3: torch.Tensor, into: SampleInputs
) -> None:
    """Fill `into` for rows of (first sampled token, slot, maximum number of drafts). Positions past a row's drafts
    repeat its last draft. Token indices are clamped to the step's tokens."""
    if states_TC.is_cuda:
        from dovetail.core.ops.kernels.step import gather_samples_triton

        gather_samples_triton(states_TC, positions_T, samples_R3, into)
    else:
        gather_samples_reference(states_TC, positions_T, samples_R3, into)


def gather_samples_reference(
    states_TC: torch.Tensor, positions_T: torch.Tensor, samples_R3: torch.Tensor, into: SampleInputs
) -> None:
    last = len(states_TC) - 1
    first_R, slots_R, limit_R = samples_R3.unbind(1)
    width = len(into.slots_N) // len(into.slots_R)
    step_W = torch.arange(width, device=states_TC.device)
    token_RW = (first_R[:, None] + torch.minimum(step_W, limit_R[:, None])).clamp(0, last)
    base_R = positions_T[first_R.clamp(0, last)] + 1
    into.states_NC.copy_(states_TC[token_RW.reshape(-1)])
    into.position_N.copy_(positions_T[token_RW.reshape(-1)] + 1)
    into.slots_N.copy_(slots_R.repeat_interleave(width))
    for kept, found in ((into.slots_R, slots_R), (into.base_R, base_R), (into.limit_R, limit_R)):
        kept.copy_(found)
