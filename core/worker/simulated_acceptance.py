"""Acceptance of drafts by a seeded coin, for measurements with weights that predict nothing. R rows, W positions of a
row, K = W - 1."""

from __future__ import annotations

import torch

from dovetail.core.ops.random import Purpose, uniform
from dovetail.core.worker.device_state import DeviceState


def simulate(
    tokens_RW: torch.Tensor, slots_R: torch.Tensor, base_R: torch.Tensor, state: DeviceState, vocab: int
) -> torch.Tensor:
    """Return tokens that agree with as many drafts as the coins accept: the draft where the coin accepts it, another
    token where not. Without simulation these are the drawn tokens. A draw of -1 (NaN) stays."""
    if state.simulated_K is None or tokens_RW.shape[1] == 1:
        return tokens_RW
    given = tokens_RW, slots_R, base_R, state.tokens_SL, state.key_S, state.simulated_K, vocab
    if tokens_RW.is_cuda:
        from dovetail.core.ops.kernels.step import simulate_triton

        # A hundred small kernels would take 0.15 ms of a step that is measured.
        return simulate_triton(*given)
    return simulate_reference(*given)


def simulate_reference(
    tokens_RW: torch.Tensor,
    slots_R: torch.Tensor,
    base_R: torch.Tensor,
    tokens_SL: torch.Tensor,
    key_S: torch.Tensor,
    rate_K: torch.Tensor,
    vocab: int,
) -> torch.Tensor:
    """Return the tokens of `simulate`. `rate_K`: rate of acceptance of each position."""
    rows, width = tokens_RW.shape
    step_K = torch.arange(width - 1, device=tokens_RW.device)
    position_RK = base_R[:, None] + step_K
    draft_RK = tokens_SL[slots_R[:, None], position_RK].long()
    key_RK = key_S[slots_R][:, None].expand(rows, width - 1)
    coin_RK = uniform(key_RK.reshape(-1), position_RK.reshape(-1), Purpose.SIMULATED, 1).view(rows, width - 1)
    own_RK = tokens_RW[:, :-1]
    other_RK = torch.where(own_RK == draft_RK, (draft_RK + 1) % vocab, own_RK)
    agreed_RK = torch.where(coin_RK < rate_K[: width - 1], draft_RK, other_RK)
    return torch.cat((torch.where(own_RK < 0, own_RK, agreed_RK), tokens_RW[:, -1:]), 1)
