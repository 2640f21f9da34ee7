"""Results of steps on their way to the host: copied while later steps run, read in step order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING

import torch

from dovetail.core.interfaces import LogprobColumns, Model, RowResult, StepResult
from dovetail.core.ops.logprobs import best_logprobs
from dovetail.core.worker import prompt_logits
from dovetail.core.worker.batch import Rows
from dovetail.core.worker.device_state import DeviceState
from dovetail.core.worker.sampling import SampledRows
from dovetail.core.worker.slots import Slots

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_new = tuple.__new__


@dataclass(slots=True)
class _Pending:
    """The result of a plan that was launched and not collected yet."""

    step: int
    rows: Rows
    logprobs_wanted: dict[int, int]
    sampled: list[torch.Tensor]
    """Columns of tokens, drafts verified and drafts accepted; then log-probabilities if some row wants them. Steps with
    one token per row have no column of drafts verified."""
    prompt: dict[int, list[torch.Tensor]]
    pooled: tuple[list[int], torch.Tensor] | None
    began: Mark
    done: Mark
    drafted: Mark | None
    forwarded: Mark | None
    loads: tuple[float, float] | None


class ResultCopies:
    def __init__(self, device: torch.device) -> None:
        self.clock = StepClock(device)
        self._cuda = device.type == "cuda"
        self._pending: deque[_Pending] = deque()

    def send(
        self,
        step: int,
        began: Mark,
        rows: Rows,
        logprobs_wanted: dict[int, int],
        sampled: SampledRows | None,
        prompt: dict[int, list[torch.Tensor]],
        pooled: tuple[list[int], torch.Tensor] | None,
        *,
        drafted: Mark | None = None,
        forwarded: Mark | None = None,
        loads: tuple[float, float] | None = None,
    ) -> None:
        """Enqueue the copies of a step's results after all work launched so far. `logprobs_wanted` is the number that
        each row wants; its keys, those of `prompt` and the list in `pooled` are indices into `rows`. `drafted`,
        `forwarded`: ends of the drafter's work and of the layers. `loads`: StepResult.expert_loads."""
        tensors: list[torch.Tensor] = []
        if sampled is not None:
            verified = [sampled.drafted_R[:, None]] if sampled.tokens_RW.shape[1] > 1 else []
            columns = torch.cat((sampled.tokens_RW, *verified, sampled.accepted_R[:, None]), 1)
            tensors = [columns, *(sampled.logprobs or ())]
        self._pending.append(
            _Pending(
                step=step,
                rows=rows,
                logprobs_wanted=logprobs_wanted,
                sampled=[self._to_host(t) for t in tensors],
                prompt={row: [self._to_host(t) for t in found] for row, found in prompt.items()},
                pooled=(pooled[0], self._to_host(pooled[1])) if pooled else None,
                began=began,
                done=self.clock.mark(),
                drafted=drafted,
                forwarded=forwarded,
                loads=loads,
            )
        )

    def collect(self) -> StepResult:
        """Return the oldest plan's result. Waits for its copy, not for later plans."""
        pending = self._pending.popleft()
        if isinstance(pending.done, torch.cuda.Event):
            pending.done.synchronize()
        rows, sampled = pending.rows, pending.rows.sampled
        tokens: list[tuple[int, ...]] = []
        drafted: list[int] = []
        logprobs: dict[int, LogprobColumns] = {}
        if sampled:
            token_columns, *more = pending.sampled
            tokens = _accepted(token_columns.numpy())
            drafted = token_columns[:, -2].tolist() if token_columns.shape[1] > 2 else [0] * len(tokens)
            if more:
                packed, width = _packed(*more), more[0].shape[1]
                for r, row in enumerate(sampled):
                    if (wanted := pending.logprobs_wanted.get(row)) is not None:
                        first = r * width
                        logprobs[row] = LogprobColumns(packed, range(first, first + len(tokens[r])), wanted)
        if len(sampled) < len(rows):
            by_row = dict(zip(sampled, tokens, strict=True))
            tokens = [by_row.get(row, ()) for row in range(len(rows))]
            drafted_by_row = dict(zip(sampled, drafted, strict=True))
            drafted = [drafted_by_row.get(row, 0) for row in range(len(rows))]
        prompt = {
            row: LogprobColumns(_packed(*found), range(len(found[0])), found[1].shape[1])
            for row, found in pending.prompt.items()
        }
        pooled = dict(zip(pending.pooled[0], pending.pooled[1].numpy(), strict=True)) if pending.pooled else {}
        every = range(len(rows))
        details = (map(found.get, every, repeat(())) for found in (logprobs, prompt))
        fields = every, rows.uids, rows.epochs, tokens, *details, map(pooled.get, every), drafted
        # Without a Python frame for each row.
        results = tuple(map(_new, repeat(RowResult), zip(*fields, strict=False)))
        began, done = pending.began, pending.done
        draft = 0.0 if pending.drafted is None else _seconds(began, pending.drafted)
        draw = 0.0 if pending.forwarded is None else _seconds(pending.forwarded, done)
        return StepResult(pending.step, results, *self.clock.read(began, done), draft, draw, pending.loads)

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._cuda:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)


def _accepted(columns: NDArray[np.int64]) -> list[tuple[int, ...]]:
    """The last column is the number of accepted drafts; each row yields that many tokens plus one."""
    if columns.shape[1] == 2 and not columns[:, 1].any():
        return list(zip(columns[:, 0].tolist(), strict=True))
    return [tuple(values[: values[-1] + 1]) for values in columns.tolist()]


def prompt_logprobs(
    rows: Rows, starts: Seq[int], states_TC: torch.Tensor, state: DeviceState, slots: Slots, model: Model, most: int
) -> dict[int, list[torch.Tensor]]:
    """Return log-probabilities by row that wants them, for each prompt token fed with a successor in the prompt. Every
    rank must call: logits are gathered from all. `most`: rows of logits at a time, to limit memory."""
    found: dict[int, list[torch.Tensor]] = {}
    if slots.prompt_logprobs.isdisjoint(rows.slots):
        return found
    for i, (slot, fed, bound, first) in enumerate(zip(rows.slots, rows.counts, rows.bounds, starts, strict=False)):
        info = slots[slot]
        wanted = info.params.prompt_logprobs
        start = bound - fed
        count = min(fed, len(info.blob.request.prompt_ids) - 1 - start)
        if wanted is not None and count > 0:
            following = state.tokens_SL[slot, start + 1 : start + 1 + count].long()
            states = states_TC[first : first + count]
            best: list[list[torch.Tensor]] = []
            for states_NC, chosen_N in zip(states.split(most), following.split(most), strict=True):
                logits_NV = model.logits(states_NC)
                prompt_logits.send(info.blob.request.prompt_ids, start + len(best) * most, logits_NV)
                best.append(_best(logits_NV, chosen_N, wanted))
            found[i] = [torch.cat(parts) for parts in zip(*best, strict=True)]
    return found


def _best(logits_NV: torch.Tensor, chosen_N: torch.Tensor, wanted: int) -> list[torch.Tensor]:
    """Return log-probabilities of the chosen tokens, and those of the most likely tokens with their ids."""
    top = best_logprobs(logits_NV, max(wanted, 1))
    chosen_N1 = logits_NV.gather(1, chosen_N[:, None]).float() - top.total_N[:, None]
    return [chosen_N1, top.values_Nn[:, :wanted], top.ids_Nn[:, :wanted]]


def _packed(chosen: torch.Tensor, values: torch.Tensor, ids: torch.Tensor) -> NDArray[np.int32]:
    """Return log-probabilities of N tokens, and values and ids of the n most likely ones [N, n], as the array of
    LogprobColumns. It is a copy: the tensors are in pinned memory, which the next steps need."""
    count, most = chosen.numel(), values.shape[-1]
    columns = chosen.view(torch.int32).reshape(count, 1), values.view(torch.int32).reshape(count, most), ids.int()
    return torch.cat((*columns[:2], columns[2].reshape(count, most)), 1).numpy()


Mark = float | torch.cuda.Event
"""A point in time on the device."""


class StepClock:
    """Measures steps with events between the kernels on CUDA, otherwise with the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._last: Mark | None = None
        """End of the step read last."""

    def mark(self) -> Mark:
        """Return the point in time when the device finishes the work enqueued so far."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self, began: Mark, done: Mark) -> tuple[float, float]:
        """Return the seconds between the two marks of a step, and the idle seconds between the end of the previous step
        and the first mark. Steps are read in order, each after its marks have passed."""
        last, self._last = self._last, done
        return _seconds(began, done), 0.0 if last is None else max(_seconds(last, began), 0.0)


def _seconds(first: Mark, second: Mark) -> float:
    if isinstance(first, torch.cuda.Event):
        assert isinstance(second, torch.cuda.Event)
        return float(first.elapsed_time(second)) * 1e-3
    assert isinstance(second, float)
    return second - first


def pooled_states(
    rows: Rows, starts: Seq[int], states_TC: torch.Tensor, slots: Slots
) -> tuple[list[int], torch.Tensor] | None:
    """Indices of rows with a RowResult.pooled_C, and the states in float32. `starts`: index of rows' first tokens."""
    if slots.pooling.isdisjoint(rows.slots):
        return None
    places, found = [], []
    for i, slot in enumerate(rows.slots):
        if slot not in slots.pooling:
            continue
        request, end = slots[slot].blob.request, starts[i] + rows.counts[i]
        if request.pooling == "mean":
            found.append(states_TC[starts[i] : end].sum(0, dtype=torch.float32))
        elif rows.bounds[i] == len(request.prompt_ids):
            found.append(states_TC[end - 1].float())
        else:
            continue
        places.append(i)
    return (places, torch.stack(found)) if found else None
