"""Slot ledger of the sender and every rank: it detects a diverged rank before that rank runs the next plan."""

from __future__ import annotations

import struct
import zlib
from operator import itemgetter

from dovetail.core.interfaces import LateInputs, RowFlag, StepPlan

_STEP_MIX = 0x9E3779B97F4A7C15
_MASK = 2**63 - 1


class SlotLedger:
    """Slots with their holders, and whether the newest plan lacks its late inputs. Sender and receivers keep one per
    lane and apply every plan. Invalid after `apply` raises for the contents of a plan: the run is over then."""

    def __init__(self) -> None:
        self.slots: dict[int, tuple[int, int]] = {}
        """slot -> (uid, epoch)"""
        self.waiting: StepPlan | None = None
        """The newest plan if it lacks its late inputs."""
        self._held = 0
        self._step = -1

    @property
    def digest(self) -> int:
        """Digest of the holders of all slots and of the last step: 63 bits, sent with each plan."""
        return self._held ^ (self._step * _STEP_MIX & _MASK)

    def verify(self, state: int, step: int) -> None:
        """Compare with the digest sent with the plan of `step`, before the plan is applied."""
        if state != self.digest:
            raise ValueError(
                f"before step {step} this rank's slots differ from the sender's (digest {self.digest:#x}, expected "
                f"{state:#x}): a plan was lost, repeated or misread after step {self._step}"
            )

    def apply(self, plan: StepPlan) -> None:
        """Apply leaves, then joins. Then every row and page must refer to a sequence that holds its slot. The previous
        plan must be complete. Raises ValueError for an invalid plan."""
        if self.waiting is not None:
            raise ValueError(f"step {plan.step} cannot begin: step {self.waiting.step} lacks its late inputs")
        if plan.step <= self._step:
            raise ValueError(f"step {plan.step} comes after step {self._step}: plans run in ascending order")
        for slot in plan.leaves:
            if slot not in self.slots:
                raise ValueError(f"step {plan.step}: slot {slot} leaves, but no sequence holds it")
            self._held ^= _holder(slot, *self.slots.pop(slot))
        for slot, uid, epoch, *_ in plan.joins:
            if slot in self.slots:
                raise ValueError(f"step {plan.step}: uid {uid} joins slot {slot}, which {self._who(slot)} holds")
            self.slots[slot] = uid, epoch
            self._held ^= _holder(slot, uid, epoch)
        self._check_rows(plan)
        for page in plan.pages:
            if page.slot not in self.slots:
                raise ValueError(f"step {plan.step}: {page} is for a slot that no sequence holds")
        for chunk in plan.catch_up:
            if chunk.slot not in self.slots:
                raise ValueError(f"step {plan.step}: {chunk} is for a slot that no sequence holds")
        self._step = plan.step
        self.waiting = plan if plan.late else None

    def complete(self, late: LateInputs) -> None:
        """Check that these late inputs belong to the newest plan, and complete it."""
        if self.waiting is None or self.waiting.step != late.step:
            now = "no step" if self.waiting is None else f"step {self.waiting.step}"
            raise ValueError(f"late inputs of step {late.step} arrived, but {now} waits for them")
        rows = self.waiting.rows
        for row, drafts in zip(late.rows, late.drafts or (0,) * len(late.rows), strict=True):
            if not (0 <= row < len(rows) and rows[row].flags & RowFlag.LATE):
                raise ValueError(f"step {late.step}: row {row} of {len(rows)} takes no late inputs")
            if drafts > rows[row].draft:
                raise ValueError(f"step {late.step}: row {row} has masks for {drafts} of {rows[row].draft} drafts")
        self.waiting = None

    def check_drafted(self) -> None:
        """Check that the newest plan waits for its late inputs, so that its drafts can be read."""
        if self.waiting is None:
            raise ValueError("no plan waits for late inputs, and drafts can be read only of one that does")

    def check_collect(self, pending: int) -> None:
        """Check, before waiting for the oldest of `pending` results, that it can arrive."""
        if not pending:
            raise ValueError("nothing to collect: every submitted plan's result was taken")
        if self.waiting is not None and pending == 1:
            raise ValueError(f"step {self.waiting.step} cannot be collected: it lacks its late inputs")

    def _check_rows(self, plan: StepPlan) -> None:
        # A valid plan is checked in C: a few microseconds for a full batch.
        named = list(map(_SLOT, plan.rows))
        holders = list(map(self.slots.get, named))
        if holders == list(map(_UID_EPOCH, plan.rows)) and len(set(named)) == len(named):
            return
        seen: set[int] = set()
        for row in plan.rows:
            if self.slots.get(row.slot) != (row.uid, row.epoch):
                raise ValueError(
                    f"step {plan.step}: a row is for uid {row.uid}, epoch {row.epoch} in slot {row.slot}, which "
                    f"{self._who(row.slot)} holds"
                )
            if row.slot in seen:
                raise ValueError(f"step {plan.step}: slot {row.slot} has two rows; a sequence has one row a step")
            seen.add(row.slot)

    def _who(self, slot: int) -> str:
        if slot not in self.slots:
            return "no sequence"
        uid, epoch = self.slots[slot]
        return f"uid {uid}, epoch {epoch}"


_SLOT = itemgetter(0)
_UID_EPOCH = itemgetter(1, 2)


def _holder(slot: int, uid: int, epoch: int) -> int:
    record = struct.pack("<3q", slot, uid, epoch)
    return (zlib.crc32(record) << 31 | zlib.crc32(record, 1) >> 1) & _MASK
