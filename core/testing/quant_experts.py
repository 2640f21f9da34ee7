"""Part of the contract suite for quantizers: routed experts. Shapes: T tokens, K experts of a token, E experts, C
hidden channels, F channels of an expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from dovetail.core.interfaces import (
    SWIGLU,
    Activation,
    ExpertBias,
    GatedActivation,
    LinearMethod,
    ModelSpec,
    Quantizer,
    Routing,
)
from dovetail.core.interfaces.expert import PARTS
from dovetail.core.interfaces.tuning import Key, Tunable, make_key
from dovetail.core.layers import Experts, load_weights
from dovetail.core.layers.looped_experts import LoopedExperts, linear_shapes
from dovetail.core.ops import encode
from dovetail.core.testing.host_sync import NoHostSync
from dovetail.core.testing.model_driver import Alone, Lazy, build_context
from dovetail.core.testing.numeric import TOLERANCE, assert_near, poisoned_memory, same_bits

EXPERTS = 4
CLAMPED = GatedActivation(alpha=1.702, limit=1.0, offset=1.0)


def check_tunables(tunables: Sequence[Tunable], rows: int) -> None:
    """Check the form of the tunable operations for `rows` rows."""
    for one in tunables:
        assert one.op and one.rows == rows, f"a tunable for {rows} rows has op {one.op!r}, {one.rows} rows"
        facts = dict(one.key)
        plain = one.key == make_key(**facts) and all(isinstance(v, str | int | float) for v in facts.values())
        assert plain and one.nbytes > 0, f"{one.op}: key {one.key} is not from make_key, or nbytes is not set"


@dataclass(frozen=True)
class _Matrices:
    """float32 matrices of a layer's experts."""

    up: torch.Tensor
    """[E, 2F, C]: gate, then up."""
    down: torch.Tensor
    """[E, C, F]"""
    bias: ExpertBias

    def exact(
        self, x_TC: torch.Tensor, routing: Routing, activation: GatedActivation, bias: ExpertBias | None = None
    ) -> torch.Tensor:
        """Compute the sum in float64 on the host."""
        x_TC, up, down = x_TC.cpu().double(), self.up.double(), self.down.double()
        experts_TK, weights_TK = routing.experts_TK.cpu(), routing.weights_TK.cpu().double()
        total_TC = torch.zeros(x_TC.shape, dtype=torch.float64)
        for token, place in (experts_TK >= 0).nonzero().tolist():
            expert = int(experts_TK[token, place])
            up_2F = up[expert] @ x_TC[token]
            if bias is not None:
                up_2F = up_2F + bias.up[expert].cpu().double()
            y_C = down[expert] @ activation.reference(*up_2F.chunk(2))
            if bias is not None:
                y_C = y_C + bias.down[expert].cpu().double()
            total_TC[token] += weights_TK[token, place] * y_C
        return total_TC


def _with_added_channels(layer: Experts, bias: ExpertBias) -> ExpertBias:
    """Return the biases as a layer gives them (ExpertMethod.channels): zero for channels that the method adds."""
    own, stored = layer.shape.intermediate, layer.method.channels(layer.shape)
    before = layer.method.before(layer.shape)
    assert stored >= before + own, (
        f"the method stores {stored} channels of an expert; this rank has {own}, with {before} before them"
    )
    halves = [torch.nn.functional.pad(half, (before, stored - own - before)) for half in bias.up.chunk(2, dim=1)]
    return ExpertBias(torch.cat(halves, 1), bias.down)


class ExpertTests:
    """Tests that QuantizerContract inherits. It has the meaning and defaults of the settings."""

    device: str
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, tuple[int, ...]], ...]
    rows_independent: bool
    error: float

    def make(self) -> Quantizer:
        raise NotImplementedError

    def checkpoint(self, method: LinearMethod, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def _x(self, tokens: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        raise NotImplementedError

    def _weight(self, inp: int, out: int) -> torch.Tensor:
        raise NotImplementedError

    def _check(
        self, got: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype = torch.float32, factor: float = 1.0
    ) -> None:
        raise NotImplementedError

    def test_experts_give_the_weighted_sum(self) -> None:
        """Experts without a row, with one and with all; in a step of one token, too."""
        for dtype in self.dtypes:
            layer, matrices = self._experts(dtype)
            for rows in ([[1, 2]], [[1, 0], [0, 1], [1, 3], [1, -1], [-1, 1]], [[0, 1]] * 40):
                x_TC, routing = self._x(len(rows), layer.shape.hidden, dtype), self._routing(rows)
                got = self._apply(layer, x_TC, routing)
                assert (got.dtype, got.shape) == (dtype, x_TC.shape), "apply must return [T, C] in the model's dtype"
                self._check(got, matrices.exact(x_TC, routing, SWIGLU), dtype, factor=3.0)

    def test_padding_has_no_experts(self) -> None:
        """A token without experts gives zeros, whatever its state is, and changes no other token. (A scale of the whole
        batch spreads NaN.)"""
        layer, matrices = self._experts(torch.float32)
        x_TC, routing = self._x(3, layer.shape.hidden), self._routing([[2, 0], [-1, -1], [0, 3]])
        poisoned_TC = x_TC.clone()
        poisoned_TC[1] = float("nan") if self.rows_independent else 1.0
        got = self._apply(layer, poisoned_TC, routing)
        assert not got[1].any(), f"a token without experts must give zeros, got {got[1]}"
        self._check(got[::2], matrices.exact(x_TC, routing, SWIGLU)[::2], factor=3.0)

    def test_experts_have_biases_and_other_activations(self) -> None:
        layer, matrices = self._experts(torch.float32)
        hidden, channels = layer.shape.hidden, layer.shape.intermediate
        x_TC, routing = self._x(6, hidden) / 8, self._routing([[1, 0], [3, 1], [-1, 2]] * 2)
        bias = ExpertBias(self._x(EXPERTS, 2 * channels), self._x(EXPERTS, hidden))
        got = self._apply(layer, x_TC, routing, CLAMPED, _with_added_channels(layer, bias))
        self._check(got, matrices.exact(x_TC, routing, CLAMPED, bias), factor=3.0)

    def test_experts_of_two_ranks_add_up(self) -> None:
        """Each rank has half of the channels of every expert. Biases of the second product count once."""
        (first, matrices), (second, _) = (self._experts(torch.float32, rank, 2) for rank in range(2))
        x_TC, routing = self._x(5, first.shape.hidden), self._routing([[1, 0], [2, 3], [-1, -1], [0, 2], [3, 1]])
        one, other = (self._apply(layer, x_TC, routing, bias=layer.bias).double() for layer in (first, second))
        self._check(one + other, matrices.exact(x_TC, routing, SWIGLU, matrices.bias), factor=3.0)

    def test_experts_load_in_any_order(self) -> None:
        """Files are read by name: `down` before `gate`, and expert 10 before expert 2."""
        (first, _), (other, _) = self._experts(torch.float32), self._experts(torch.float32, backwards=True)
        x_TC, routing = self._x(5, first.shape.hidden), self._routing([[1, 0], [2, 3], [-1, 0], [0, 2], [3, 1]])
        results = [self._apply(layer, x_TC, routing) for layer in (first, other)]
        assert same_bits(*results), "the matrices of experts may load in any order, but the result depends on it"

    def test_rows_of_experts_are_independent(self) -> None:
        """A token's result does not depend on the other tokens, however large they are: but for sums in another order,
        by which a value between the products may be rounded the other way."""
        if not self.rows_independent:
            pytest.skip("rows_independent = False")
        for dtype in self.dtypes:
            layer, _ = self._experts(dtype)
            x_TC, routing = self._x(9, layer.shape.hidden, dtype), self._routing([[1, 0], [0, 1], [3, 1]] * 3)
            x_TC[1::2] *= 1000
            together = self._apply(layer, x_TC, routing)
            for row in range(len(x_TC)):
                one = Routing(routing.experts_TK[row : row + 1], routing.weights_TK[row : row + 1])
                alone = self._apply(layer, x_TC[row : row + 1], one)
                what = f"the experts of row {row} in a batch (set rows_independent = False if a batch shares one scale)"
                assert_near(together[row : row + 1], alone, max(2 * TOLERANCE[dtype], self.error / 2), what)

    def test_stacked_experts_can_be_copied(self) -> None:
        """Experts that exchange their entries exchange their results (ExpertMethod.stacked)."""
        layer, matrices = self._experts(torch.float32)
        if not layer.method.stacked:
            return
        sizes = {name: len(tensor) for name, tensor in layer.params.items()}
        assert set(sizes.values()) == {EXPERTS}, f"stacked tensors have an entry for each of {EXPERTS} experts: {sizes}"
        saved = [tensor.clone() for tensor in layer.stored(0)]
        for to, source in zip(layer.stored(0) + layer.stored(1), layer.stored(1) + saved, strict=True):
            to.copy_(source)
        x_TC, routing = self._x(3, layer.shape.hidden), self._routing([[0, 1], [2, 0], [1, -1]])
        exchanged = Routing(self._routing([[1, 0], [2, 1], [0, -1]]).experts_TK, routing.weights_TK)
        got = self._apply(layer, x_TC, routing)
        self._check(got, matrices.exact(x_TC, exchanged, SWIGLU), factor=3.0)

    def test_experts_do_not_wait_for_the_device(self) -> None:
        layer, _ = self._experts(self.dtypes[-1])
        x_TC, routing = self._x(5, layer.shape.hidden, self.dtypes[-1]), self._routing([[1, 0]] * 5)
        x = encode(x_TC, (layer.input,))[layer.input]
        with NoHostSync("apply of experts"):
            layer.method.apply(layer.params, x, routing)

    def test_tunables_of_experts_depend_on_shapes_only(self) -> None:
        """The tuner measures shapes of a model without weights; layers with weights must have the same keys."""
        layer, _ = self._experts(self.dtypes[-1])
        found = self._expert_points(layer, layer.params)
        try:
            meta = self._expert_points(layer, {name: value.to("meta") for name, value in layer.params.items()})
        except (RuntimeError, NotImplementedError) as error:
            raise AssertionError(f"tunables() must read shapes and dtypes only: {error}") from error
        assert meta == found, f"tunables() of experts on the meta device must be {found}, not {meta}"
        assert len(set(found)) == len(found), f"tunables() lists an operation twice: {found}"

    # Helpers

    def _expert_points(self, layer: Experts, params: dict[str, torch.Tensor]) -> list[tuple[str, Key, int]]:
        """Return what identifies the tunable operations of 1, 16 and 100 tokens of two experts."""
        points = []
        for rows in (1, 16, 100):
            tunables = layer.method.tunables(params, rows, 2)
            check_tunables(tunables, rows)
            points += [(one.op, one.key, rows) for one in tunables]
        return points

    def _routing(self, rows: Sequence[Sequence[int]]) -> Routing:
        experts_TK = torch.tensor(rows, dtype=torch.int32, device=self.device)
        return Routing(experts_TK, torch.rand(experts_TK.shape, device=self.device) + 0.1)

    def _apply(
        self,
        layer: Experts,
        x_TC: torch.Tensor,
        routing: Routing,
        activation: GatedActivation = SWIGLU,
        bias: ExpertBias | None = None,
    ) -> torch.Tensor:
        x: Activation = encode(x_TC, (layer.input,))[layer.input]
        with poisoned_memory():
            return layer.method.apply(layer.params, x, routing, activation, bias)

    def _experts(
        self, dtype: torch.dtype, rank: int = 0, size: int = 1, backwards: bool = False
    ) -> tuple[Experts, _Matrices]:
        """Return a layer of one rank and what it was loaded from, which is equal for all ranks. `backwards`: the last
        tensor is loaded first."""
        inputs = [inp for inp, _ in self.shapes]
        hidden, channels = max(inputs), 3 * min(inputs)
        if "_matrices" not in vars(self):
            ups = [self._weight(hidden, 2 * channels) * hidden**-0.5 for _ in range(EXPERTS)]
            downs = [self._weight(channels, hidden) * channels**-0.5 for _ in range(EXPERTS)]
            bias = ExpertBias(torch.randn(EXPERTS, 2 * channels) / 8, torch.randn(EXPERTS, hidden) / 8)
            vars(self)["_matrices"] = _Matrices(torch.stack(ups), torch.stack(downs), bias)
        matrices: _Matrices = vars(self)["_matrices"]
        collective = Alone(None)
        collective.rank, collective.size = rank, size
        spec, quantizer = ModelSpec("none", 1, 1, 1, 1, 1, 1, 1, 1, "float32"), self.make()
        build = build_context(spec, quantizer=quantizer, collective=collective, dtype=dtype, device=self.device)
        names = [(f"{expert}.gate", f"{expert}.up", f"{expert}.down") for expert in range(EXPERTS)]
        stored: dict[str, torch.Tensor] = {}
        with poisoned_memory():
            layer = Experts("layers.0.mlp.experts", names, build, hidden, channels, bias=True)
            for expert in range(EXPERTS):
                gate, up = matrices.up[expert].chunk(2)
                linears = self._linears(layer, quantizer, expert)
                for part, weight_OI in zip(PARTS, (gate, up, matrices.down[expert]), strict=True):
                    method = linears[part == "down"]
                    for name, tensor in self.checkpoint(method, weight_OI).items():
                        stored[f"{expert}.{part}.{name}"] = tensor
                biases = (*matrices.bias.up[expert].chunk(2), matrices.bias.down[expert])
                stored |= {f"{expert}.{part}.bias": bias for part, bias in zip(PARTS, biases, strict=True)}
            order = reversed(stored) if backwards else stored
            load_weights(layer.weights(), ((name, partial(Lazy, stored[name])) for name in order))
            layer.finish()
        return layer, matrices

    def _linears(self, layer: Experts, quantizer: Quantizer, expert: int) -> tuple[LinearMethod, LinearMethod]:
        """Return linear methods with the checkpoint tensors of an expert's matrices."""
        if isinstance(layer.method, LoopedExperts):
            return layer.method.methods[expert]
        up, down = linear_shapes(layer.shape, expert)
        path = f"layers.0.mlp.experts.{expert}"
        return quantizer.linear(f"{path}.gate_up", up), quantizer.linear(f"{path}.down", down)
