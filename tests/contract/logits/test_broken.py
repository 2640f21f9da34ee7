"""Logits processors with one fault each; the suite must reject them."""

from __future__ import annotations

from functools import partial

import torch

from dovetail.core.compose import Config
from dovetail.core.errors import RequestError
from dovetail.core.interfaces import LogitsContext, LogitsProcessor, Request, SamplingParams
from dovetail.core.testing.logits import LogitsProcessorContract
from dovetail.core.testing.suite import failures

from ..faults import each, rejects, suite, variant


class Charge(LogitsProcessor):
    """Correct: lowers every logit by the request's presence penalty for each output token, and more at its stop
    tokens."""

    stops_SM: torch.Tensor

    def allocate(self, slots: int, vocab: int, device: torch.device) -> None:
        self.charge_S = torch.zeros(slots, device=device)
        self.stops_SM = torch.zeros(slots, 1, dtype=torch.int64, device=device)
        self.extra_SM = torch.full((slots, 1), -0.0, device=device)

    def wants(self, request: Request) -> bool:
        return request.params.presence_penalty != 0

    def join(self, slot: int, request: Request) -> None:
        stops = request.params.stop_token_ids if self.wants(request) else ()
        grow = len(stops) - self.stops_SM.shape[1]
        if grow > 0:
            self.grow(grow)
        self.charge_S[slot] = request.params.presence_penalty
        self.stops_SM[slot] = 0
        self.extra_SM[slot] = -0.0
        self.stops_SM[slot, : len(stops)] = torch.tensor(stops, dtype=torch.int64)
        self.extra_SM[slot, : len(stops)] = -1.0

    def grow(self, columns: int) -> None:
        self.stops_SM = torch.nn.functional.pad(self.stops_SM, (0, columns))
        self.extra_SM = torch.nn.functional.pad(self.extra_SM, (0, columns), value=-0.0)

    def counted(self, ctx: LogitsContext) -> torch.Tensor:
        """Count the history tokens above 9 in each row, which depends on the tokens, not only on their number."""
        known_NL = torch.arange(ctx.max_length) < ctx.lengths_N[:, None]
        return ((ctx.tokens_SL[ctx.slots_N, : ctx.max_length] > 9) & known_NL).sum(-1) + 1

    def apply(self, logits_NV: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        out = logits_NV - (self.charge_S[ctx.slots_N] * self.counted(ctx))[:, None]
        return out.scatter_add(1, self.stops_SM[ctx.slots_N], self.extra_SM[ctx.slots_N])


fault = partial(variant, Charge)


class WantsOnce(Charge):
    asked = 0

    def wants(self, request: Request) -> bool:
        self.asked += 1
        return super().wants(request) and self.asked < 3


class HasOneStateForAll(Charge):
    def join(self, slot: int, request: Request) -> None:
        super().join(slot, request)
        if self.wants(request):
            self.charge_S[self.charge_S != 0] = request.params.presence_penalty


class PrefersLowSlots(Charge):
    def allocate(self, slots: int, vocab: int, device: torch.device) -> None:
        super().allocate(slots, vocab, device)
        self.share_S = torch.where(torch.arange(slots) < 3, 1, 2)

    def counted(self, ctx: LogitsContext) -> torch.Tensor:
        return super().counted(ctx) * self.share_S[ctx.slots_N]


class IgnoresDrafts(Charge):
    """Uses each slot's shortest row for all of its rows."""

    def counted(self, ctx: LogitsContext) -> torch.Tensor:
        counted_N = super().counted(ctx)
        least_S = torch.full((len(self.charge_S),), 99).scatter_reduce(0, ctx.slots_N, counted_N, "amin")
        return least_S[ctx.slots_N]


class WritesItsContext(Charge):
    def apply(self, logits_NV: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        out = super().apply(logits_NV, ctx)
        ctx.lengths_N += 1
        return out


class WaitsForTheDevice(Charge):
    def apply(self, logits_NV: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        charged = (self.charge_S[ctx.slots_N] != 0).nonzero().squeeze(1)
        logits_NV[charged] = super().apply(logits_NV, ctx)[charged]
        return logits_NV


class IgnoresWhoDoesNotWant(Charge):
    def join(self, slot: int, request: Request) -> None:
        if self.wants(request):
            super().join(slot, request)


class ForgetsWhenItGrows(Charge):
    def grow(self, columns: int) -> None:
        super().grow(columns)
        self.charge_S.zero_()


class ReplacesItsState(Charge):
    graph_safe = True


class BranchesOnTheHost(Charge):
    """Takes another way once several requests need it."""

    graph_safe = True
    wanted = 0

    def allocate(self, slots: int, vocab: int, device: torch.device) -> None:
        super().allocate(slots, vocab, device)
        self.grow(3)

    def join(self, slot: int, request: Request) -> None:
        super().join(slot, request)
        self.wanted += self.wants(request)

    def counted(self, ctx: LogitsContext) -> torch.Tensor:
        return super().counted(ctx) * 2 if self.wanted > 2 else super().counted(ctx) + super().counted(ctx)


class CountsSteps(Charge):
    """Counts steps itself instead of reading the history."""

    def allocate(self, slots: int, vocab: int, device: torch.device) -> None:
        super().allocate(slots, vocab, device)
        self.steps_S = torch.zeros(slots, dtype=torch.int64)

    def join(self, slot: int, request: Request) -> None:
        super().join(slot, request)
        self.steps_S[slot] = 0

    def counted(self, ctx: LogitsContext) -> torch.Tensor:
        self.steps_S[ctx.slots_N] += 1
        return self.steps_S[ctx.slots_N]


class JoinsOnce(Charge):
    """Accepts no join after the first step."""

    def join(self, slot: int, request: Request) -> None:
        if not hasattr(self, "closed"):
            super().join(slot, request)

    def apply(self, logits_NV: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        self.closed = True
        return super().apply(logits_NV, ctx)


class RefusesItsOwn(Charge):
    def validate(self, request: Request, vocab: int) -> None:
        if request.params.presence_penalty < 0:
            raise RequestError("presence_penalty: no bonus here")


class ChargesPaddingToo(Charge):
    def allocate(self, slots: int, vocab: int, device: torch.device) -> None:
        super().allocate(slots, vocab, device)
        self.charge_S.fill_(1.0)


class KnowsRequestsByIdentity(Charge):
    def join(self, slot: int, request: Request) -> None:
        super().join(slot, request)
        if request.prompt_ids is not LogitsProcessorContract.prompt:
            self.charge_S[slot] = 0


class Rate(Config):
    rate: float


BROKEN: dict[str, list[type[Charge]]] = {
    "test_wants_is_pure": [
        WantsOnce,
        fault("WantsAll", wants=lambda self, request: True),
        fault("NeedsStateToWant", wants=lambda self, request: Charge.wants(self, request) and len(self.charge_S) > 0),
    ],
    "test_it_changes_the_logits_of_requests_that_want_it": [
        fault("DoesNothing", apply=lambda self, logits_NV, ctx: logits_NV)
    ],
    "test_rows_that_do_not_want_it_come_out_bit_equal": [
        fault("TouchesEveryone", apply=lambda self, *args: Charge.apply(self, *args) + 0.0),
        ChargesPaddingToo,
    ],
    "test_shape_dtype_and_device_stay": [
        fault("HalvesTheBits", apply=lambda self, *args: Charge.apply(self, *args).half())
    ],
    "test_a_row_depends_on_its_own_slot_alone": [
        fault("MixesRows", counted=lambda self, ctx: Charge.counted(self, ctx).max().expand(len(ctx.slots_N)))
    ],
    "test_joins_of_other_slots_change_nothing": [HasOneStateForAll, ForgetsWhenItGrows],
    "test_all_slots_are_equivalent": [PrefersLowSlots],
    "test_history_is_read_up_to_lengths": [
        fault("ReadsAhead", counted=lambda self, ctx: (ctx.tokens_SL[ctx.slots_N] > 9).sum(-1) + 1),
        fault("ReadsTheBound", counted=lambda self, ctx: Charge.counted(self, ctx) + ctx.max_length),
    ],
    "test_drafts_ahead_of_a_position_count": [IgnoresDrafts],
    "test_its_context_is_left_as_it_is": [WritesItsContext],
    "test_apply_does_not_wait_for_the_device": [WaitsForTheDevice],
    "test_a_graph_of_apply_stays_valid": [ReplacesItsState, BranchesOnTheHost],
    "test_a_slot_keeps_nothing_of_its_last_sequence": [IgnoresWhoDoesNotWant],
    "test_apply_keeps_nothing": [CountsSteps],
    "test_joins_may_come_at_any_time": [JoinsOnce],
    "test_it_accepts_what_it_serves": [
        RefusesItsOwn,
        fault("AnswersInsteadOfRaising", validate=lambda self, request, vocab: request.params.presence_penalty < 0),
        fault("MustBeGivenParameters", params=Rate),
    ],
    "test_requests_reach_other_processes_whole": [KnowsRequestsByIdentity],
}


def suite_of(processor: type[Charge]) -> LogitsProcessorContract:
    return suite(
        LogitsProcessorContract,
        make=lambda self: processor(None),
        active_params=lambda self: SamplingParams(presence_penalty=0.5),
        larger_params=lambda self: SamplingParams(presence_penalty=-1.5, stop_token_ids=(3, 4, 5, 6)),
    )


@each(BROKEN)
def test_the_suite_rejects(broken: type[Charge], test: str) -> None:
    assert rejects(suite_of(broken), test)


def test_the_unbroken_one_passes() -> None:
    assert failures(suite_of(Charge)) == {}
