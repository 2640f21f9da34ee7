"""Contract suite for logits processors. Subclass LogitsProcessorContract and override `make` and `active_params`.

Shapes: N logits rows, S slots, L history, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from itertools import zip_longest
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dovetail.core.interfaces import JoinBlob, LogitsContext, LogitsProcessor, Request, SamplingParams
from dovetail.core.parallel.encoding import decode_blob, encode_blob
from dovetail.core.testing.host_sync import NoHostSync

Row = tuple[int, list[int]]
"""(slot, history before the token to sample)"""


class LogitsProcessorContract:
    """Tests of dovetail.core.interfaces.LogitsProcessor. `make` and `active_params` must be overridden."""

    vocab = 24
    slots = 6
    """Number of slots. The engine's padding slot, which no request joins, is added."""
    width = 32
    """Columns of the token table."""
    prompt = (1, 5, 2, 9)
    """Prompt of every request."""
    eos = 2

    def make(self) -> LogitsProcessor:
        """Return a fresh processor. Every call must return an equal one."""
        raise NotImplementedError("return your processor: MyProcessor(MyConfig())")

    def active_params(self) -> SamplingParams:
        """Return parameters for which `wants` is true and `apply` changes the logits after any history."""
        raise NotImplementedError("return parameters that your processor wants: SamplingParams(...)")

    def larger_params(self) -> SamplingParams:
        """Return other such parameters that need more state, if its size depends on the request."""
        return self.active_params()

    def passive_params(self) -> SamplingParams | None:
        """Return parameters for which `wants` is false; None if it is true for every request."""
        return SamplingParams()

    # Drivers

    def request(self, params: SamplingParams, uid: int = 0) -> Request:
        return Request(uid, self.prompt, params, eos_ids=(self.eos,))

    def active(self) -> Request:
        return self.request(self.active_params(), 1)

    def larger(self) -> Request:
        return self.request(self.larger_params(), 2)

    def passive(self) -> Request:
        params = self.passive_params()
        if params is None:
            pytest.skip("passive_params() is None: every request wants the processor")
        return self.request(params, 3)

    def joined(self, *requests: Request | None) -> LogitsProcessor:
        """Return a processor whose slots 0, 1, ... are joined by these requests (None: an empty slot)."""
        processor = self.make()
        processor.allocate(self.slots + 1, self.vocab, torch.device("cpu"))
        for slot, request in enumerate(requests):
            if request is not None:
                processor.join(slot, request)
        return processor

    def history(self, outputs: int, seed: int = 0) -> list[int]:
        rng = random.Random(seed)
        return [*self.prompt, *(rng.randrange(self.vocab) for _ in range(outputs))]

    def logits(self, rows: int, seed: int = 0) -> torch.Tensor:
        """Return logits that include values which arithmetic may alter: -0.0, -inf, very small and very large ones."""
        logits_NV = 3 * torch.randn(rows, self.vocab, generator=torch.Generator().manual_seed(seed))
        logits_NV[:, 0] = -0.0
        logits_NV[:, -3:] = torch.tensor([float("-inf"), 1e-42, 1e30])
        return logits_NV

    def context(self, rows: Seq[Row], *, poison: int = 0, slack: int = 0) -> LogitsContext:
        """Build the context. Tokens past the histories depend on `poison`. Rows of a slot share a history."""
        generator = torch.Generator().manual_seed(poison)
        tokens_SL = torch.randint(self.vocab, (self.slots + 1, self.width), generator=generator, dtype=torch.int32)
        prompt_len_S = torch.zeros(self.slots + 1, dtype=torch.int64)
        for slot, history in sorted(rows, key=lambda row: len(row[1])):
            tokens_SL[slot, : len(history)] = torch.tensor(history, dtype=torch.int32)
            prompt_len_S[slot] = len(self.prompt)
        lengths = [len(history) for _, history in rows]
        return LogitsContext(
            slots_N=torch.tensor([slot for slot, _ in rows]),
            lengths_N=torch.tensor(lengths),
            tokens_SL=tokens_SL,
            prompt_len_S=prompt_len_S,
            max_length=max(lengths) + slack,
        )

    @torch.inference_mode()
    def apply(
        self,
        processor: LogitsProcessor,
        rows: Seq[Row],
        logits_NV: torch.Tensor | None = None,
        *,
        poison: int = 0,
        slack: int = 0,
    ) -> torch.Tensor:
        logits_NV = self.logits(len(rows)) if logits_NV is None else logits_NV
        return processor.apply(logits_NV.clone(), self.context(rows, poison=poison, slack=slack))

    # wants

    def test_wants_is_pure(self) -> None:
        """The host calls it when a request arrives, before allocate, and may call it any number of times."""
        processor, request = self.make(), self.active()
        answers = [processor.wants(request) for _ in range(3)]
        assert answers == [True] * 3, f"wants(active_params()) must return True at every call, got {answers}"
        assert request == self.active(), "wants must not change the request"
        rows = [(0, self.history(3))]
        expected = self.apply(self.joined(self.active()), rows)
        asked = self.joined(self.active())
        asked.wants(self.larger())
        if self.passive_params() is not None:
            assert not any(asked.wants(self.passive()) for _ in range(3)), "wants(passive_params()) must return False"
        _assert_close(self.apply(asked, rows), expected, "wants must not change the result of apply")

    def test_it_changes_the_logits_of_requests_that_want_it(self) -> None:
        for make in (self.active, self.larger):
            rows = [(0, self.history(3)), (0, self.history(4))]
            changed = not _same_bits(self.apply(self.joined(make()), rows), self.logits(2))
            assert changed, f"apply changed no logits of a request with {make.__name__}_params()"

    # Requests

    def test_it_accepts_what_it_serves(self) -> None:
        """validate accepts these requests and one without parameters, before allocate and any number of times."""
        processor = self.make()
        passive = () if self.passive_params() is None else (self.passive(),)
        for request in (self.active(), self.larger(), *passive):
            for _ in range(2):
                answer = processor.validate(request, self.vocab)  # type: ignore[func-returns-value]
                assert answer is None, f"validate must raise RequestError or return None, got {answer!r}"
        if processor.params is not None:
            processor.parameters(self.request(SamplingParams()))

    def test_requests_reach_other_processes_whole(self) -> None:
        """Requests are sent to ranks as JSON; the processor must work with the decoded request."""
        rows = [(0, self.history(3)), (1, self.history(4))]
        there = [self._sent(request) for request in (self.active(), self.larger())]
        assert all(self.make().wants(request) for request in there), "wants is False for a request decoded from JSON"
        expected = self.apply(self.joined(self.active(), self.larger()), rows)
        _assert_close(self.apply(self.joined(*there), rows), expected, "apply for requests decoded from JSON")

    @staticmethod
    def _sent(request: Request) -> Request:
        return decode_blob(encode_blob(0, 0, JoinBlob(request.prompt_ids, request, 0)))[2].request

    # Output

    def test_shape_dtype_and_device_stay(self) -> None:
        given = self.logits(3)
        out = self.apply(self.joined(self.active()), [(0, self.history(n)) for n in (1, 2, 3)])
        same = (out.shape, out.dtype, out.device) == (given.shape, given.dtype, given.device)
        assert same, "apply must keep the shape, dtype and device of the logits"

    def test_rows_that_do_not_want_it_come_out_bit_equal(self) -> None:
        """This holds in a batch with or without rows that want it, and in empty slots (padding uses one)."""
        processor = self.joined(self.active(), self.passive(), self.larger(), self.passive())
        rows = [(slot, self.history(slot)) for slot in (1, 0, 3, 2, self.slots, self.slots - 1)]
        logits_NV = self.logits(len(rows))
        untouched = [0, 2, 4, 5]
        out = self.apply(processor, rows, logits_NV)
        assert _same_bits(out[untouched], logits_NV[untouched]), _first_change(logits_NV[untouched], out[untouched])
        out = self.apply(processor, [rows[i] for i in untouched], logits_NV[untouched])
        assert _same_bits(out, logits_NV[untouched]), _first_change(logits_NV[untouched], out)

    def test_a_row_depends_on_its_own_slot_alone(self) -> None:
        """A row's result is independent of the rest of the batch and of its order."""
        processor = self.joined(self.active(), self.larger(), self.active(), self.larger())
        rows = [(slot, self.history(5 - slot, seed=slot)) for slot in (2, 0, 3, 1)]
        logits_NV = self.logits(4)
        together = self.apply(processor, rows, logits_NV)
        for i, row in enumerate(rows):
            alone = self.apply(processor, [row], logits_NV[i : i + 1])
            _assert_close(together[i : i + 1], alone, f"row {i} in a batch, compared with the row alone")
        backwards = self.apply(processor, rows[::-1], logits_NV.flip(0))
        _assert_close(backwards.flip(0), together, "rows in reverse order")

    def test_all_slots_are_equivalent(self) -> None:
        expected = self.apply(self.joined(self.active()), [(0, self.history(4))])
        for slot in range(self.slots):
            found = self.apply(self.joined(*[None] * slot, self.active()), [(slot, self.history(4))])
            _assert_close(found, expected, f"slot {slot}, compared with slot 0")

    # Inputs

    def test_history_is_read_up_to_lengths(self) -> None:
        """Later tokens are rejected drafts or stale. The host's bound may be loose."""
        rows = [(0, self.history(3)), (1, self.history(7, seed=1)), (2, self.history(0))]
        processor = self.joined(self.active(), self.larger(), self.active())
        expected = self.apply(processor, rows)
        for poison in (1, 2):
            found = self.apply(processor, rows, poison=poison)
            _assert_close(found, expected, "the result must not depend on tokens past lengths_N or of other slots")
        loose = self.apply(processor, rows, slack=self.width - max(len(history) for _, history in rows))
        _assert_close(loose, expected, "the result must not depend on max_length")

    def test_drafts_ahead_of_a_position_count(self) -> None:
        """Rows of one slot at successive lengths, as in verification, equal those of separate steps."""
        whole = self.history(8)
        processor = self.joined(self.active(), self.larger())
        rows = [(slot, whole[:length]) for slot in (0, 1) for length in range(len(self.prompt) + 1, len(whole) + 1)]
        logits_NV = self.logits(len(rows))
        together = self.apply(processor, rows, logits_NV)
        for i, row in enumerate(rows):
            alone = self.apply(processor, [row], logits_NV[i : i + 1])
            _assert_close(together[i : i + 1], alone, f"{len(row[1])} tokens, verified with others or alone")

    def test_its_context_is_left_as_it_is(self) -> None:
        processor = self.joined(self.active())
        ctx = self.context([(0, self.history(3)), (0, self.history(4))])
        before = [t.clone() for t in (ctx.slots_N, ctx.lengths_N, ctx.tokens_SL, ctx.prompt_len_S)]
        with torch.inference_mode():
            processor.apply(self.logits(2), ctx)
        after = (ctx.slots_N, ctx.lengths_N, ctx.tokens_SL, ctx.prompt_len_S)
        assert all(map(torch.equal, before, after)), "apply must not change its LogitsContext"

    def test_apply_does_not_wait_for_the_device(self) -> None:
        processor = self.joined(self.active(), self.larger())
        ctx = self.context([(0, self.history(3)), (1, self.history(4))])
        logits_NV = self.logits(2)
        with torch.inference_mode(), NoHostSync("apply"):
            processor.apply(logits_NV, ctx)

    def test_a_graph_of_apply_stays_valid(self) -> None:
        """A replay repeats the operations of the capture on the same memory, after any joins."""
        processor = self.joined(self.active())
        if not processor.graph_safe:
            pytest.skip("graph_safe = False")
        rows = [(0, self.history(3)), (1, self.history(4))]
        ctx, logits_NV = self.context(rows), self.logits(2)
        captured = self._operations(processor, logits_NV, ctx)
        for slot, request in ((1, self.active()), (0, self.larger()), (2, self.larger())):
            processor.join(slot, request)
        for now, then in zip_longest(self._operations(processor, logits_NV, ctx), captured):
            assert now == then, (
                "a graph_safe processor must launch the same operations on the same memory after joins, since a CUDA "
                f"graph repeats them (write into state tensors, do not replace them): {then} became {now}"
            )

    @staticmethod
    def _operations(processor: LogitsProcessor, logits_NV: torch.Tensor, ctx: LogitsContext) -> list[Operation]:
        given = logits_NV.clone()
        with torch.inference_mode():
            processor.apply(given.clone(), ctx)  # The first call may create state.
            with _Operations(given) as recorded:
                processor.apply(given, ctx)
        return recorded.operations

    # State

    def test_a_slot_keeps_nothing_of_its_last_sequence(self) -> None:
        rows = [(0, self.history(3))]
        expected = self.apply(self.joined(self.active()), rows)
        reused = self.joined(self.larger())
        self.apply(reused, rows)
        reused.join(0, self.active())
        _assert_close(self.apply(reused, rows), expected, "the former request of the slot must not show")
        reused.join(0, self.passive())
        out = self.apply(reused, rows)
        change = "" if _same_bits(out, self.logits(1)) else _first_change(self.logits(1), out)
        assert not change, f"a join must reset the slot, but its former request still shows: {change}"
        reused.join(0, self.active())
        _assert_close(self.apply(reused, rows), expected, "a request that wants it, after one that does not")

    def test_joins_of_other_slots_change_nothing(self) -> None:
        """A join must not affect other slots, even if the state has to grow."""
        rows = [(0, self.history(3))]
        processor = self.joined(self.active())
        expected = self.apply(processor, rows)
        others = [self.active(), self.larger(), *([self.passive()] if self.passive_params() is not None else [])]
        for slot in range(1, self.slots):
            processor.join(slot, others[slot % len(others)])
            _assert_close(self.apply(processor, rows), expected, f"a join of slot {slot} changed slot 0")

    def test_joins_may_come_at_any_time(self) -> None:
        """Joins come before or between steps, in any order of slots. Only the last join of a slot counts."""
        rows = [(slot, self.history(4, seed=slot)) for slot in range(3)]
        expected = self.apply(self.joined(self.active(), self.larger(), self.active()), rows)
        late = self.joined()
        for slot, request in ((2, self.larger()), (1, self.larger()), (2, self.active()), (0, self.active())):
            late.join(slot, request)
            self.apply(late, [(slot, self.history(1))])
        _assert_close(self.apply(late, rows), expected, "the result must not depend on the order of joins and steps")

    def test_apply_keeps_nothing(self) -> None:
        """Rejected drafts undo steps and preemption repeats them, so apply must depend on its context alone."""
        processor = self.joined(self.active(), self.larger())
        for outputs in (2, 5, 3, 5, 0, 3):
            rows = [(slot, self.history(outputs)) for slot in (0, 1)]
            fresh = self.apply(self.joined(self.active(), self.larger()), rows)
            _assert_close(self.apply(processor, rows), fresh, f"{outputs} outputs, after steps with other lengths")


Operation = tuple[str, list[tuple[int, ...]], list[object]]
"""Name, shapes of the outputs, and arguments: the address of state, the shape of other tensors, or the value."""


class _Operations(TorchDispatchMode):
    """Records operations. Tensors in `given`, and those made meanwhile, may be elsewhere in another call."""

    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self._made = [given]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = {tensor.untyped_storage().data_ptr() for tensor in self._made}
        leaves = tree_leaves((args, kwargs or {}))
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        arguments = [self._named(leaf, made) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.operations.append((str(func), [tuple(tensor.shape) for tensor in outputs], arguments))
        state = {leaf.untyped_storage().data_ptr() for leaf in leaves if isinstance(leaf, torch.Tensor)} - made
        self._made += [tensor for tensor in outputs if tensor.untyped_storage().data_ptr() not in state]
        return out

    @staticmethod
    def _named(tensor: torch.Tensor, made: set[int]) -> object:
        address = tensor.untyped_storage().data_ptr()
        return tuple(tensor.shape) if address in made else address


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def _first_change(before: torch.Tensor, after: torch.Tensor) -> str:
    changed = (before.view(torch.int32) != after.contiguous().view(torch.int32)).nonzero()
    row, token = changed[0].tolist()
    return f"row {row}, token {token}: {before[row, token]} became {after[row, token]} ({len(changed)} logits changed)"


def _assert_close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    near = torch.allclose(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert near, f"{what}: expected {expected}, got {found}"
