"""The contract suite of logits processors. Subclass LogitsProcessorContract and override `make` and `active_params`.

Shapes: N logits rows, S slots, L history, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest
import torch

from dovetail.core.interfaces import JoinBlob, LogitsContext, LogitsProcessor, Request, SamplingParams
from dovetail.core.parallel.encoding import decode_blob, encode_blob
from dovetail.core.testing.host_sync import NoHostSync

Row = tuple[int, list[int]]
"""(slot, history before the token to be sampled)"""


class LogitsProcessorContract:
    """Every sentence of dovetail.core.interfaces.LogitsProcessor. `make` and `active_params` must be overridden."""

    vocab = 24
    slots = 6
    """One more is allocated, as the engine does for padding; nobody joins it."""
    width = 32
    """Of the token table."""
    prompt = (1, 5, 2, 9)
    """Of every request."""
    eos = 2

    def make(self) -> LogitsProcessor:
        """A fresh processor; every call gives an equal one."""
        raise NotImplementedError("return your processor: MyProcessor(MyConfig())")

    def active_params(self) -> SamplingParams:
        """Parameters of a request that wants it, and whose logits it changes after any history of this suite."""
        raise NotImplementedError("return parameters that your processor wants: SamplingParams(...)")

    def larger_params(self) -> SamplingParams:
        """Others that it wants, which need more room in its state where that depends on the request."""
        return self.active_params()

    def passive_params(self) -> SamplingParams | None:
        """Parameters of a request that does not want it; None where every request does."""
        return SamplingParams()

    # Drivers.

    def request(self, params: SamplingParams, uid: int = 0) -> Request:
        return Request(uid, self.prompt, params, eos_ids=(self.eos,))

    def active(self) -> Request:
        return self.request(self.active_params(), 1)

    def larger(self) -> Request:
        return self.request(self.larger_params(), 2)

    def passive(self) -> Request:
        params = self.passive_params()
        if params is None:
            pytest.skip("every request wants it")
        return self.request(params, 3)

    def joined(self, *requests: Request | None) -> LogitsProcessor:
        """A processor whose slots 0, 1, ... are taken by these requests (None: nobody)."""
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
        """With values that arithmetic likes to change on the way: -0.0, infinities, very small and large ones."""
        logits_NV = 3 * torch.randn(rows, self.vocab, generator=torch.Generator().manual_seed(seed))
        logits_NV[:, 0] = -0.0
        logits_NV[:, -3:] = torch.tensor([float("-inf"), 1e-42, 1e30])
        return logits_NV

    def context(self, rows: Seq[Row], *, poison: int = 0, slack: int = 0) -> LogitsContext:
        """Everything past the histories is filled with tokens made from `poison`. Rows of a slot share a history."""
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

    # Who wants it.

    def test_wants_is_pure(self) -> None:
        """It is asked on the host when a request arrives: before allocate, and as often as anybody likes."""
        processor, request = self.make(), self.active()
        assert [processor.wants(request) for _ in range(3)] == [True] * 3, "active_params() must be wanted, each time"
        assert request == self.active(), "wants changed the request"
        rows = [(0, self.history(3))]
        expected = self.apply(self.joined(self.active()), rows)
        asked = self.joined(self.active())
        asked.wants(self.larger())
        if self.passive_params() is not None:
            assert not any(asked.wants(self.passive()) for _ in range(3)), "passive_params() must not be wanted"
        _assert_close(self.apply(asked, rows), expected, "wants changed what apply does")

    def test_it_changes_the_logits_of_who_wants_it(self) -> None:
        for make in (self.active, self.larger):
            rows = [(0, self.history(3)), (0, self.history(4))]
            assert not _same_bits(self.apply(self.joined(make()), rows), self.logits(2)), "nothing was changed"

    # What a request says.

    def test_it_accepts_what_it_serves(self) -> None:
        """Also a request that sets nothing; asked before `allocate`, and as often as anybody likes."""
        processor = self.make()
        passive = () if self.passive_params() is None else (self.passive(),)
        for request in (self.active(), self.larger(), *passive):
            for _ in range(2):
                answer = processor.validate(request, self.vocab)  # type: ignore[func-returns-value]
                assert answer is None, "validate raises, or says nothing"
        if processor.params is not None:
            processor.parameters(self.request(SamplingParams()))

    def test_requests_reach_other_processes_whole(self) -> None:
        """What it reads of a request is there on every rank: the request travels as JSON."""
        rows = [(0, self.history(3)), (1, self.history(4))]
        there = [self._sent(request) for request in (self.active(), self.larger())]
        assert all(self.make().wants(request) for request in there), "it is not wanted after the request travelled"
        expected = self.apply(self.joined(self.active(), self.larger()), rows)
        _assert_close(self.apply(self.joined(*there), rows), expected, "the request says something else on a rank")

    @staticmethod
    def _sent(request: Request) -> Request:
        return decode_blob(encode_blob(0, 0, JoinBlob(request.prompt_ids, request, 0)))[2].request

    # What comes out.

    def test_shape_dtype_and_device_stay(self) -> None:
        logits_NV = self.logits(3)
        out = self.apply(self.joined(self.active()), [(0, self.history(n)) for n in (1, 2, 3)])
        assert (out.shape, out.dtype, out.device) == (logits_NV.shape, logits_NV.dtype, logits_NV.device)

    def test_rows_that_do_not_want_it_come_out_bit_equal(self) -> None:
        """Beside rows that do, alone, and in slots that nobody has joined (padding uses one)."""
        processor = self.joined(self.active(), self.passive(), self.larger(), self.passive())
        rows = [(slot, self.history(slot)) for slot in (1, 0, 3, 2, self.slots, self.slots - 1)]
        logits_NV = self.logits(len(rows))
        untouched = [0, 2, 4, 5]
        out = self.apply(processor, rows, logits_NV)
        assert _same_bits(out[untouched], logits_NV[untouched]), _first_change(logits_NV[untouched], out[untouched])
        out = self.apply(processor, [rows[i] for i in untouched], logits_NV[untouched])
        assert _same_bits(out, logits_NV[untouched]), _first_change(logits_NV[untouched], out)

    def test_a_row_depends_on_its_own_slot_alone(self) -> None:
        """Not on the rest of the batch or its order."""
        processor = self.joined(self.active(), self.larger(), self.active(), self.larger())
        rows = [(slot, self.history(5 - slot, seed=slot)) for slot in (2, 0, 3, 1)]
        logits_NV = self.logits(4)
        together = self.apply(processor, rows, logits_NV)
        for i, row in enumerate(rows):
            alone = self.apply(processor, [row], logits_NV[i : i + 1])
            _assert_close(together[i : i + 1], alone, f"row {i} differs alone and in a batch")
        backwards = self.apply(processor, rows[::-1], logits_NV.flip(0))
        _assert_close(backwards.flip(0), together, "the order of rows changed them")

    def test_every_slot_is_as_good_as_another(self) -> None:
        expected = self.apply(self.joined(self.active()), [(0, self.history(4))])
        for slot in range(self.slots):
            processor = self.joined(*[None] * slot, self.active())
            _assert_close(
                self.apply(processor, [(slot, self.history(4))]), expected, f"slot {slot} differs from slot 0"
            )

    # What it reads.

    def test_history_is_read_up_to_lengths(self) -> None:
        """Past it stand rejected drafts and what the slot held before. The host's bound may be loose."""
        rows = [(0, self.history(3)), (1, self.history(7, seed=1)), (2, self.history(0))]
        processor = self.joined(self.active(), self.larger(), self.active())
        expected = self.apply(processor, rows)
        for poison in (1, 2):
            found = self.apply(processor, rows, poison=poison)
            _assert_close(found, expected, "the result depends on tokens past lengths_N, or of other slots")
        loose = self.apply(processor, rows, slack=self.width - max(len(history) for _, history in rows))
        _assert_close(loose, expected, "the result depends on max_length")

    def test_drafts_ahead_of_a_position_count(self) -> None:
        """Rows of one slot at successive lengths, as in verification, are what each would be one step at a time."""
        whole = self.history(8)
        processor = self.joined(self.active(), self.larger())
        rows = [(slot, whole[:length]) for slot in (0, 1) for length in range(len(self.prompt) + 1, len(whole) + 1)]
        logits_NV = self.logits(len(rows))
        together = self.apply(processor, rows, logits_NV)
        for i, row in enumerate(rows):
            alone = self.apply(processor, [row], logits_NV[i : i + 1])
            _assert_close(
                together[i : i + 1], alone, f"after {len(row[1])} tokens, drafts ahead or not, the row differs"
            )

    def test_its_context_is_left_as_it_is(self) -> None:
        processor = self.joined(self.active())
        ctx = self.context([(0, self.history(3)), (0, self.history(4))])
        before = [t.clone() for t in (ctx.slots_N, ctx.lengths_N, ctx.tokens_SL, ctx.prompt_len_S)]
        with torch.inference_mode():
            processor.apply(self.logits(2), ctx)
        after = (ctx.slots_N, ctx.lengths_N, ctx.tokens_SL, ctx.prompt_len_S)
        assert all(map(torch.equal, before, after)), "it wrote into its context"

    def test_apply_does_not_wait_for_the_device(self) -> None:
        processor = self.joined(self.active(), self.larger())
        if not processor.graph_safe:
            pytest.skip("graph_safe is False")
        ctx = self.context([(0, self.history(3)), (1, self.history(4))])
        logits_NV = self.logits(2)
        with torch.inference_mode(), NoHostSync("apply of a graph_safe processor"):
            processor.apply(logits_NV, ctx)

    # What it keeps.

    def test_a_slot_keeps_nothing_of_its_last_sequence(self) -> None:
        rows = [(0, self.history(3))]
        reused = self.joined(self.larger())
        self.apply(reused, rows)
        reused.join(0, self.active())
        _assert_close(
            self.apply(reused, rows), self.apply(self.joined(self.active()), rows), "the former request still shows"
        )
        reused.join(0, self.passive())
        out = self.apply(reused, rows)
        assert _same_bits(out, self.logits(1)), f"the former request still shows: {_first_change(self.logits(1), out)}"
        reused.join(0, self.active())
        _assert_close(self.apply(reused, rows), self.apply(self.joined(self.active()), rows), "it did not come back")

    def test_joins_of_other_slots_change_nothing(self) -> None:
        """Also when their requests need more room than there was."""
        rows = [(0, self.history(3))]
        processor = self.joined(self.active())
        expected = self.apply(processor, rows)
        others = [self.active(), self.larger(), *([self.passive()] if self.passive_params() is not None else [])]
        for slot in range(1, self.slots):
            processor.join(slot, others[slot % len(others)])
            _assert_close(self.apply(processor, rows), expected, f"a join of slot {slot} changed slot 0")

    def test_joins_may_come_at_any_time(self) -> None:
        """Before or between steps, in any order of slots: only the last join of a slot counts."""
        rows = [(slot, self.history(4, seed=slot)) for slot in range(3)]
        expected = self.apply(self.joined(self.active(), self.larger(), self.active()), rows)
        late = self.joined()
        for slot, request in ((2, self.larger()), (1, self.larger()), (2, self.active()), (0, self.active())):
            late.join(slot, request)
            self.apply(late, [(slot, self.history(1))])
        _assert_close(self.apply(late, rows), expected, "the order of joins and steps shows")

    def test_apply_keeps_nothing(self) -> None:
        """Steps are undone by rejected drafts and done again after preemption: the context says all one must know."""
        processor = self.joined(self.active(), self.larger())
        for outputs in (2, 5, 3, 5, 0, 3):
            rows = [(slot, self.history(outputs)) for slot in (0, 1)]
            fresh = self.apply(self.joined(self.active(), self.larger()), rows)
            _assert_close(
                self.apply(processor, rows), fresh, f"after other steps, {outputs} outputs give another result"
            )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def _first_change(before: torch.Tensor, after: torch.Tensor) -> str:
    changed = (before.view(torch.int32) != after.contiguous().view(torch.int32)).nonzero()
    row, token = changed[0].tolist()
    return f"row {row}, token {token}: {before[row, token]} became {after[row, token]} ({len(changed)} logits changed)"


def _assert_close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True), f"{what}: {found}, not {expected}"
