"""Drafts of rows whose masks depend on them, on their way to the host while the layers run. R rows, K drafts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dovetail.core.interfaces.plan import LATE
from dovetail.core.worker.batch import Rows
from dovetail.core.worker.device_state import DeviceState


@dataclass(slots=True)
class DraftCopies:
    """Copy of the drafts that a step verifies in its LATE rows."""

    rows: list[int]
    """Index of each row in the plan."""
    most: list[int]
    """Most drafts of each row."""
    counted: torch.Tensor
    """Number of drafts, then the drafts: int32 [R, 1 + K], on the host once `done` has passed."""
    done: torch.cuda.Event | None

    @classmethod
    def of(cls, rows: Rows, state: DeviceState) -> DraftCopies:
        """Enqueue the copy, after the work that drafts."""
        listed = [
            i for i, (flags, draft) in enumerate(zip(rows.flags, rows.drafts, strict=True)) if flags & LATE and draft
        ]
        on_device = state.device.type == "cuda"
        slots = torch.tensor([rows.slots[i] for i in listed], dtype=torch.int64, pin_memory=on_device)
        slots_R = slots.to(state.device, non_blocking=True)
        step_K = torch.arange(rows.width - 1, device=state.device)
        tokens_RK = state.tokens_SL[slots_R[:, None], state.computed_S[slots_R][:, None] + 1 + step_K]
        counted = torch.cat((state.drafts_S[slots_R][:, None].int(), tokens_RK), 1)
        done = None
        if on_device:
            host = torch.empty(counted.shape, dtype=counted.dtype, pin_memory=True)
            counted, done = host.copy_(counted, non_blocking=True), torch.cuda.Event()
            done.record()
        return cls(listed, [rows.drafts[i] for i in listed], counted, done)

    def read(self) -> Mapping[int, tuple[int, ...]]:
        """Return the drafts by index of the row. Waits for the copy."""
        if self.done is not None:
            self.done.synchronize()
        each = zip(self.rows, self.most, self.counted.tolist(), strict=True)
        return {row: tuple(tokens[: min(count, most)]) for row, most, (count, *tokens) in each}
