"""Contract suite for placements of routed experts. Subclass ExpertsContract in a test module and override `make`.

Ranks are threads of this process. Shapes: T tokens, S rows of a rank's share, K experts of a token, E experts, C hidden
channels, F channels of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from dovetail.core.arithmetic import ceil_div
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import (
    PLAIN,
    SWIGLU,
    ActFormat,
    Activation,
    Collective,
    ExpertBias,
    ExpertMethod,
    ExpertPart,
    ExpertPlacement,
    ExpertShape,
    GatedActivation,
    LinearMethod,
    LinearShape,
    ModelSpec,
    Partial,
    Quantizer,
    Routing,
)
from dovetail.core.interfaces.expert import PARTS
from dovetail.core.layers import Experts, load_weights
from dovetail.core.layers.expert_slots import layouts_of, rebalanced_by
from dovetail.core.ops import encode
from dovetail.core.testing.host_sync import NoHostSync
from dovetail.core.testing.model_driver import Alone, Lazy, build_context
from dovetail.core.testing.numeric import poisoned_memory
from dovetail.core.testing.rank_threads import on_threads
from dovetail.core.testing.reference import build
from dovetail.core.worker.expert_moves import ExpertBalancer

EXPERTS, HIDDEN, CHANNELS, GROUP = 8, 16, 8, 8

_Input = tuple[torch.Tensor, Routing, torch.Tensor]
"""States of a step's tokens, their routing, and the exact sums."""


class ExpertsContract:
    """Tests of the rules of dovetail.core.interfaces.ExpertPlacement. Only `make` must be overridden."""

    layouts: tuple[tuple[int, int], ...] = ((1, 1), (2, 2), (4, 2))
    """(ranks, expert ranks) to test. A placement that does not spread experts is tested with one expert rank."""

    def make(self) -> ExpertPlacement:
        """Return a fresh, unbound placement."""
        raise NotImplementedError("return your placement: MyPlacement(MyConfig())")

    # Layouts

    def test_every_expert_has_a_slot(self) -> None:
        """Two placements agree, since each rank computes all layouts by itself."""
        for _, size in self._layouts():
            for experts in (EXPERTS, 2 * EXPERTS):
                found = layouts_of(self.make(), experts, size)
                assert found == layouts_of(self.make(), experts, size), "equal calls of layout must give equal layouts"

    # Sums

    def test_sums_are_those_of_one_rank(self) -> None:
        """For any routing and number of tokens, with and without weights that add up to 1."""
        for tokens in (1, 3, 8, 13):
            generator = torch.Generator().manual_seed(tokens)
            experts_TK = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :3]
            self._check(experts_TK, f"{tokens} tokens")

    def test_nothing_is_dropped_when_all_tokens_have_the_same_experts(self) -> None:
        for expert in (0, EXPERTS - 1):
            other = (expert + 1) % EXPERTS
            self._check(torch.tensor([[expert, other, -1]]).repeat(12, 1), f"all tokens have expert {expert}")

    def test_tokens_without_experts_give_zeros(self) -> None:
        """Their states may be NaN, which must not reach other tokens."""
        experts_TK = torch.tensor([[-1, -1], [5, 2], [-1, -1], [0, -1], [7, 1], [-1, -1], [3, 6]])
        self._check(experts_TK, "tokens without experts", poisoned=(0, 2, 5))
        self._check(torch.full((5, 2), -1), "no token has experts", poisoned=range(5))

    def test_scales_go_with_their_rows(self) -> None:
        """Quantizers choose the format of the rows: here with scales of groups of channels, in order of columns."""
        for tokens in (1, 4, 9):
            experts_TK = (torch.arange(3 * tokens).view(tokens, 3) * 5) % EXPERTS
            self._check(experts_TK, f"{tokens} rows with scales", quantizer=_ScaledRows(None))

    def test_biases_count_once(self) -> None:
        self._check(torch.tensor([[1, 4], [6, 0], [2, -1], [7, 3], [5, 1]]), "with biases", bias=True)

    def test_steps_of_other_sizes_leave_nothing_behind(self) -> None:
        """A call keeps no rows of the one before."""
        large = torch.arange(3 * EXPERTS).view(-1, 2) % EXPERTS
        self._check(large, "a large step", (large, large[:1], large[:5]))

    def test_it_does_not_wait_for_the_device(self) -> None:
        """With one rank, where no transport waits, if the placement serves one."""
        placement = self.make()
        try:
            placement.layout(EXPERTS, 0, 1)
        except ConfigError:
            return
        layer = self._layer(placement, Alone(None), 1, False)
        x, routing = torch.randn(5, HIDDEN), Routing(torch.tensor([[1, 0]] * 5, dtype=torch.int32), torch.ones(5, 2))
        given = encode(x, (layer.input,))
        with NoHostSync("dispatch or combine"):
            sent = layer.dispatch(given, routing)
            layer.combine(layer.multiply(sent), sent)

    # Moves

    def test_balanced_layouts_have_every_expert(self) -> None:
        """In as many slots, and not twice on a rank. Two placements agree, since each rank balances by itself."""
        for _, size in self._moving_layouts():
            layouts = layouts_of(self.make(), EXPERTS, size)
            for loads in (range(EXPERTS), [100, *[1] * (EXPERTS - 1)], [0] * EXPERTS):
                found = rebalanced_by(self.make(), list(loads), layouts)
                again = rebalanced_by(self.make(), list(loads), layouts)
                assert found == again, "equal calls of balance must give equal layouts"

    def test_moves_change_no_sum(self) -> None:
        """Experts that only one rank has get most tokens, then others do."""
        for ranks, size in self._moving_layouts():
            first, *others = layouts_of(self.make(), EXPERTS, size)
            alone = [expert for expert in first if not any(expert in layout for layout in others)]
            if not alone:
                continue
            one, other = alone[0], alone[-1]
            hot, later = [[one, -1], [other, -1], [6, 1]], [[7, 2], [-1, 7], [one, 3]]
            inputs = [self._input(torch.tensor(rows).repeat(3, 1)) for rows in (*[hot] * 4, *[later] * 3)]
            found = on_threads(ranks, partial(self._run_moving, size=size, inputs=inputs))
            self._compare([sums for sums, _ in found], inputs, f"{ranks} ranks (engine.ep={size}), experts move")
            layouts = [each for _, each in found]
            assert all(each == layouts[0] for each in layouts), "ranks have different layouts after equal moves"
            assert len(set(layouts[0])) > 1, f"no expert moved, though the loads change: {layouts[0][0]}"

    # Helpers

    def _moving_layouts(self) -> list[tuple[int, int]]:
        """Return those in which moves change loads: each expert rank has several slots, and as many as the others."""
        placement, found = self.make(), []
        for ranks, size in self._layouts():
            slots = {len(placement.layout(EXPERTS, rank, size)) for rank in range(size)}
            if size > 1 and len(slots) == 1 and slots != {1}:
                found.append((ranks, size))
        return found

    def _run_moving(
        self, collective: Collective, size: int, inputs: Sequence[_Input]
    ) -> tuple[list[torch.Tensor], list[tuple[tuple[int, ...], ...]]]:
        """Return the sums of each step on one rank, and the layouts in it."""
        placement = self.make()
        placement.rebalance = 1
        layer = self._layer(placement, collective, size, bias=True)
        balancer, layouts = ExpertBalancer(placement, [layer], depth=0), []

        def before() -> None:
            balancer.before_step()
            layouts.append(layer.slots.layouts)

        return self._sums(placement, layer, inputs, before), layouts

    def _layouts(self) -> list[tuple[int, int]]:
        if self.make().spreads:
            return list(self.layouts)
        return [(ranks, 1) for ranks in dict.fromkeys(ranks for ranks, _ in self.layouts)]

    def _check(
        self,
        experts_TK: torch.Tensor,
        what: str,
        steps: Sequence[torch.Tensor] = (),
        poisoned: Sequence[int] = (),
        bias: bool = False,
        quantizer: Quantizer | None = None,
    ) -> None:
        """Compare the sums with float64 ones, on each layout. `steps`: routings of consecutive steps of one layer."""
        inputs = [self._input(step, poisoned, bias) for step in steps or (experts_TK,)]
        for ranks, size in self._layouts():
            found = on_threads(ranks, partial(self._run, size=size, inputs=inputs, bias=bias, quantizer=quantizer))
            self._compare(found, inputs, f"{what}: {ranks} ranks (engine.ep={size})")

    def _input(self, experts_TK: torch.Tensor, poisoned: Sequence[int] = (), bias: bool = True) -> _Input:
        generator = torch.Generator().manual_seed(7)
        x_TC = torch.randn(len(experts_TK), HIDDEN, generator=generator)
        routing = Routing(experts_TK.int(), torch.rand(experts_TK.shape, generator=generator) + 0.1)
        exact_TC = _exact(x_TC, routing, bias)
        x_TC[list(poisoned)] = float("nan")
        return x_TC, routing, exact_TC

    def _compare(self, found: Sequence[Sequence[torch.Tensor]], inputs: Sequence[_Input], what: str) -> None:
        """Compare each rank's sums of each step with the exact ones."""
        for rank, sums in enumerate(found):
            for step, (got_TC, (_, _, exact_TC)) in enumerate(zip(sums, inputs, strict=True)):
                where = f"{what}: step {step} of rank {rank}"
                assert got_TC.shape == exact_TC.shape, f"{where} has shape {tuple(got_TC.shape)}"
                near = torch.allclose(got_TC.double(), exact_TC, rtol=1e-4, atol=1e-5)
                assert near, f"{where}: expected {exact_TC}, got {got_TC}"

    def _run(
        self, collective: Collective, size: int, inputs: Sequence[_Input], bias: bool, quantizer: Quantizer | None
    ) -> list[torch.Tensor]:
        """Return the sums for all tokens of each step, on one rank."""
        placement = self.make()
        return self._sums(placement, self._layer(placement, collective, size, bias, quantizer), inputs)

    def _sums(
        self,
        placement: ExpertPlacement,
        layer: Experts,
        inputs: Sequence[_Input],
        before: Callable[[], None] = lambda: None,
    ) -> list[torch.Tensor]:
        """Run the steps; `before` is called before each."""
        collective, found = placement.ranks, []
        for x_TC, routing, _ in inputs:
            before()
            tokens, own = len(x_TC), placement.rows == "own"
            if own:
                x_TC, routing = _share(x_TC, routing, collective)
            given = encode(x_TC.clone(), (layer.input,))
            with torch.inference_mode(), poisoned_memory():
                sent = layer.dispatch(given, routing)
                rows = layer.combine(layer.multiply(sent), sent)
            if isinstance(rows, Partial):
                assert not own, "combine of a placement of own rows must return their sums, not a Partial"
                found.append(collective.all_reduce(rows.values))
            elif own:
                found.append(collective.all_gather(rows.reshape(1, -1)).view(-1, HIDDEN)[:tokens])
            else:
                found.append(rows)
        return found

    def _layer(
        self,
        placement: ExpertPlacement,
        collective: Collective,
        size: int,
        bias: bool,
        quantizer: Quantizer | None = None,
    ) -> Experts:
        placement.bind(collective, size)
        spec = ModelSpec("none", 1, 1, 1, 1, 1, 1, 1, 1, "float32")
        build = build_context(spec, collective=collective, placement=placement, quantizer=quantizer)
        names = [(f"{e}.gate", f"{e}.up", f"{e}.down") for e in range(EXPERTS)]
        with poisoned_memory():
            layer = Experts("layers.0.mlp.experts", names, build, HIDDEN, CHANNELS, bias=bias)
            tensors = {
                f"{e}.{part}.{name}": tensor
                for e in range(EXPERTS)
                for part, pair in zip(PARTS, _matrices(e), strict=True)
                for name, tensor in zip(("weight", "bias"), pair, strict=True)
                if f"{e}.{part}" not in layer.elsewhere and (bias or name == "weight")
            }
            load_weights(layer.weights(), ((name, partial(Lazy, tensor)) for name, tensor in tensors.items()))
            layer.finish()
        return layer


def _in_groups(x_TC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide by a power of two for each group, which is exact, and another one for each row."""
    groups_TGC = x_TC.unflatten(1, (-1, GROUP))
    scale_TG = (4 * groups_TGC[..., 0]).round().clamp(-8, 8).exp2()
    return (groups_TGC / scale_TG[..., None]).flatten(1), scale_TG


SCALED = ActFormat("scaled", torch.float32, group=GROUP, scale_layout="column", reference=_in_groups)


class _ScaledMethod(ExpertMethod):
    """Plain experts of rows with scales."""

    input = SCALED

    def __init__(self, plain: ExpertMethod) -> None:
        self.plain = plain

    def create(self, shape: ExpertShape, device: torch.device) -> dict[str, torch.Tensor]:
        return self.plain.create(shape, device)

    def load(
        self, params: dict[str, torch.Tensor], expert: int, part: ExpertPart, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        self.plain.load(params, expert, part, tensors)

    def finish(self, params: dict[str, torch.Tensor]) -> None:
        self.plain.finish(params)

    def apply(
        self,
        params: dict[str, torch.Tensor],
        x: Activation,
        routing: Routing,
        activation: GatedActivation = SWIGLU,
        bias: ExpertBias | None = None,
    ) -> torch.Tensor:
        rows, groups = len(x.values), x.values.shape[1] // GROUP
        assert x.format is SCALED, f"dispatch must keep the format of its rows, got {x.format.name}"
        found = None if x.scale is None else tuple(x.scale.shape)
        assert x.scale is not None and found == (rows, groups), (
            f"dispatch must move scales with their rows: {rows} rows have scales of shape {found}, not {(rows, groups)}"
        )
        assert x.scale.t().is_contiguous(), "dispatch must keep the order of scales (ActFormat.scale_layout)"
        values = x.values.unflatten(1, (-1, GROUP)) * x.scale[..., None]
        return self.plain.apply(params, Activation(PLAIN, values.flatten(1)), routing, activation, bias)


class _ScaledRows(Quantizer):
    """Plain weights; rows have a scale for each group of channels."""

    def linear(self, path: str, shape: LinearShape) -> LinearMethod:
        method: LinearMethod = build("quant", "none").linear(path, shape)
        return method

    def experts(self, path: str, shape: ExpertShape) -> ExpertMethod:
        return _ScaledMethod(build("quant", "none").experts(path, shape))


def _matrices(expert: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (weight, bias) of an expert's gate, up and down."""
    generator = torch.Generator().manual_seed(100 + expert)
    sides = ((CHANNELS, HIDDEN), (CHANNELS, HIDDEN), (HIDDEN, CHANNELS))
    return [(torch.randn(side, generator=generator) / 2, torch.randn(side[0], generator=generator)) for side in sides]


def _exact(x_TC: torch.Tensor, routing: Routing, bias: bool) -> torch.Tensor:
    """Compute the sums in float64 from the whole experts."""
    sums_TC = torch.zeros(x_TC.shape, dtype=torch.float64)
    for token, place in (routing.experts_TK >= 0).nonzero().tolist():
        pairs = _matrices(int(routing.experts_TK[token, place]))
        gate, up, down = [(weight.double(), other.double() * bias) for weight, other in pairs]
        x_C = x_TC[token].double()
        y_F = SWIGLU.reference(gate[0] @ x_C + gate[1], up[0] @ x_C + up[1])
        sums_TC[token] += routing.weights_TK[token, place].double() * (down[0] @ y_F + down[1])
    return sums_TC


def _share(x_TC: torch.Tensor, routing: Routing, collective: Collective) -> tuple[torch.Tensor, Routing]:
    """Return this rank's rows; those past the last token are padding."""
    rows = ceil_div(len(x_TC), collective.size)
    more, own = rows * collective.size - len(x_TC), slice(collective.rank * rows, (collective.rank + 1) * rows)
    experts_TK = F.pad(routing.experts_TK, (0, 0, 0, more), value=-1)
    weights_TK = F.pad(routing.weights_TK, (0, 0, 0, more))
    return F.pad(x_TC, (0, 0, 0, more))[own], Routing(experts_TK[own], weights_TK[own])
