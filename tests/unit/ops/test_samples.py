"""Inputs of captured draws: a ragged step's are those of rows that are padded to equal numbers of positions."""

from __future__ import annotations

import torch

from dovetail.core.ops.samples import SampleInputs, gather_samples_reference, take_tokens


def test_ragged_rows_have_the_positions_of_padded_ones() -> None:
    """Rows of 3, 1 and 2 tokens, and two of padding; the last token belongs to no row."""
    width, cpu = 3, torch.device("cpu")
    states_TC, positions_T = torch.randn(7, 4), torch.tensor([5, 6, 7, 0, 9, 10, 0])
    slots_T = torch.tensor([2, 2, 2, 0, 4, 4, 8])
    samples_R3 = torch.tensor([[0, 2, 2], [3, 0, 0], [4, 4, 1], [0, 8, 0], [0, 8, 0]])
    padded = SampleInputs.empty(5, width, 4, torch.float32, cpu)
    gather_samples_reference(states_TC, positions_T, samples_R3, padded)
    ragged = SampleInputs.empty_ragged(16, 9, width, 4, torch.float32, cpu).first(5, 7)
    take_tokens(states_TC, positions_T, slots_T, samples_R3, ragged)
    for name in ("slots_R", "base_R", "limit_R"):
        assert torch.equal(getattr(ragged, name), getattr(padded, name))
    limit_R1, step_W = samples_R3[:, 2:], torch.arange(width)
    real_RW = (step_W <= limit_R1) & (samples_R3[:, 1:2] != 8)
    for name in ("states_NC", "position_N", "slots_N"):
        mine, theirs = ragged.by_row(getattr(ragged, name)), padded.by_row(getattr(padded, name))
        assert torch.equal(mine[real_RW], theirs[real_RW]), name
    assert torch.equal(ragged.token_RW, samples_R3[:, :1] + torch.minimum(step_W, limit_R1))
