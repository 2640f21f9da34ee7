"""Contract suite for quantizers (Quantizer and LinearMethod). Authors subclass:

class TestMine(QuantizerContract):
    error = 0.03

    def make(self):
        return MyQuantizer(MyConfig())

Shapes: T tokens, I input, O output, C columns, G scale groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from dovetail.core.errors import CapabilityError
from dovetail.core.interfaces import (
    BuildContext,
    LinearMethod,
    LinearShape,
    ModelSpec,
    Quantizer,
)
from dovetail.core.interfaces.tensor_record import PLAIN_WEIGHT
from dovetail.core.interfaces.tuning import Key
from dovetail.core.layers import ColumnParallel, Linear, RowParallel, load_weights
from dovetail.core.ops import encode
from dovetail.core.testing.host_sync import NoHostSync
from dovetail.core.testing.loaded_layer import Loaded, exact_product, load_part
from dovetail.core.testing.model_driver import Alone, Lazy, build_context
from dovetail.core.testing.numeric import TOLERANCE, assert_near, fresh, poisoned_memory, same_bits, seed_note
from dovetail.core.testing.quant_experts import ExpertTests, check_tunables
from dovetail.core.testing.quant_formats import FormatTests

__all__ = ["QuantizerContract"]

PATH = "layers.0.mlp.gate_up"
ODD = ((1, 1), (7, 5), (33, 17), (60, 64), (64, 60), (96, 20))
"""(inp, out) that a format may refuse."""


class QuantizerContract(FormatTests, ExpertTests):
    """Tests of dovetail.core.interfaces.quant. Weights and inputs are normally distributed, exact results float64."""

    device = "cpu"
    """Device to test on, for instance "cuda"."""
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    """Model dtypes to test."""
    error = 1e-6
    """Maximum of ||y - exact|| / ||exact||. The rounding error of the model's dtype is added."""
    shapes: tuple[tuple[int, tuple[int, ...]], ...] = ((64, (96,)), (256, (64, 64)), (128, (96, 32, 64)))
    """(inp, output rows of each merged part) that the format supports, also when halved over two ranks."""
    rows_independent = True
    """Whether a token's result is independent of the other tokens. False: the whole batch shares one scale."""
    seed: int | None = None
    """Random seed; None = a fresh one for each test. A failure names the seed to set here."""

    def make(self) -> Quantizer:
        """Return a fresh quantizer. The only method to override."""
        raise NotImplementedError("return your quantizer: MyQuantizer(MyConfig())")

    def checkpoint(self, method: LinearMethod, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the checkpoint tensors of one part by the names of method.tensors. Override for other formats."""
        assert method.tensors == (PLAIN_WEIGHT,), f"override checkpoint(): the method reads {method.tensors}"
        return {"weight": weight_OI}

    # Life cycle of a layer

    def test_create_gives_tensors_on_the_device(self) -> None:
        method, shape = self._method(64, (96,))
        params = method.create(shape, torch.device(self.device))
        tensors = params and all(isinstance(value, torch.Tensor) for value in params.values())
        assert tensors, f"create must return the layer's tensors by name, got {params}"
        devices = {value.device.type for value in params.values()}
        assert devices == {torch.device(self.device).type}, f"create must allocate on {self.device}, not on {devices}"

    def test_product_is_near_the_exact_one(self) -> None:
        for dtype in dict.fromkeys((torch.float32, *self.dtypes)):
            for inp, parts in self.shapes:
                layer = self._layer(inp, parts, dtype)
                for tokens in (1, 5, 9, 33):
                    x_TI = self._x(tokens, inp, dtype)
                    self._check(layer.apply(x_TI), layer.exact(x_TI), dtype)

    def test_scales_may_be_left_to_the_consumer(self) -> None:
        for dtype in self.dtypes:
            for tokens in (3, 130):
                layer, x_TI = self._layer(256, (64,), dtype), self._x(tokens, 256, dtype)
                for scale, shape in zip(layer.partial_scale(x_TI), ((tokens, 1), (64,)), strict=False):
                    plain = scale.dtype == torch.float32 and tuple(scale.shape) == shape and scale.is_contiguous()
                    assert plain, f"a scale of partial() must be contiguous float32 of shape {shape}, got {scale}"
                assert_near(layer.partial(x_TI), layer.apply(x_TI), 2 * TOLERANCE[dtype], "partial() times its scales")

    def test_bias_is_added_once(self) -> None:
        for dtype in self.dtypes:
            layer, bias_O = self._layer(64, (96,), dtype), 100 * self._x(1, 96, dtype)[0]
            for tokens in (1, 5, 33, 130):
                x_TI = self._x(tokens, 64, dtype)
                expected = layer.apply(x_TI).double() + bias_O.double()
                what = f"the matmul of {tokens} tokens with a bias"
                assert_near(layer.apply(x_TI, bias_O), expected, 2 * TOLERANCE[dtype], what)

    def test_output_has_the_models_dtype(self) -> None:
        for dtype in self.dtypes:
            for bias in (None, self._x(1, 96, dtype)[0]):
                y_TO = self._layer(64, (96,), dtype).apply(self._x(5, 64, dtype), bias)
                assert (y_TO.dtype, tuple(y_TO.shape)) == (dtype, (5, 96)), "apply must return [T, O] in model dtype"

    def test_parts_go_where_they_belong(self) -> None:
        """Each part of a merged layer is compared separately, so that a small part weighs as much as a large one."""
        inp, parts = max(self.shapes, key=lambda shape: len(shape[1]))
        layer, x_TI = self._layer(inp, parts), self._x(17, inp)
        got, exact, at = layer.apply(x_TI), layer.exact(x_TI), 0
        for size in parts:
            self._check(got[:, at : at + size], exact[:, at : at + size])
            at += size

    def test_parts_load_in_any_order(self) -> None:
        inp, parts = max(self.shapes, key=lambda shape: len(shape[1]))
        weight_OI, x_TI = self._weight(inp, sum(parts)), self._x(5, inp)
        orders = (range(len(parts)), reversed(range(len(parts))), [*range(1, len(parts)), 0])
        first, *others = (self._layer(inp, parts, weight=weight_OI, order=order).apply(x_TI) for order in orders)
        for other in others:
            assert same_bits(first, other), "parts may load in any order, but the result depends on it"

    def test_load_keeps_no_part(self) -> None:
        """A checkpoint tensor is a view of a file or a buffer that is reused for the next part."""
        weight_OI, x_TI = self._weight(64, 96), self._x(5, 64)
        layer = self._layer(64, (64, 32), weight=weight_OI.clone())
        self._check(layer.apply(x_TI), exact_product(x_TI, weight_OI))

    def test_checkpoint_may_have_another_dtype(self) -> None:
        for stored in (torch.bfloat16, torch.float16, torch.float32):
            weight_OI = self._weight(64, 96).to(stored)
            for dtype in self.dtypes:
                layer, x_TI = self._layer(64, (96,), dtype, weight=weight_OI), self._x(5, 64, dtype)
                self._check(layer.apply(x_TI), layer.exact(x_TI), dtype)

    def test_the_layer_owns_the_tensors(self) -> None:
        """apply must read the `params` it is given: equal values at other addresses give equal results."""
        layer, x_TI = self._layer(64, (96,)), self._x(5, 64)
        expected = layer.apply(x_TI)
        moved = {name: value.clone() for name, value in layer.params.items()}
        for value in layer.params.values():
            # Not a view as bytes: outputs or other dimensions may be next to each other in memory.
            bits = torch.full((*value.shape, value.itemsize), 255, dtype=torch.uint8, device=value.device)
            value.copy_(bits.view(value.dtype)[..., 0])
        assert same_bits(replace(layer, params=moved).apply(x_TI), expected), "apply read tensors other than `params`"
        other = self._layer(64, (96,))
        swapped = replace(layer, params=other.params).apply(x_TI)
        same = same_bits(swapped, other.apply(x_TI))
        assert same, "apply with the params of another layer gave another result: it read a weight kept on the method"

    def test_apply_does_not_wait_for_the_device(self) -> None:
        for dtype in self.dtypes:
            layer, bias_O = self._layer(64, (96,), dtype), self._x(1, 96, dtype)[0]
            x = encode(self._x(5, 64, dtype), (layer.method.input,))[layer.method.input]
            with NoHostSync("apply"):
                layer.method.apply(layer.params, x, bias_O)

    def test_layers_do_not_share_state(self) -> None:
        quantizer = self.make()
        shapes = [(64, (96,)), (64, (96,)), *self.shapes]
        layers = [
            self._layer(inp, parts, quantizer=quantizer, path=f"layers.{i}.mlp.gate_up")
            for i, (inp, parts) in enumerate(shapes)
        ]
        for layer in layers:
            x_TI = self._x(5, layer.weight.shape[1])
            self._check(layer.apply(x_TI), layer.exact(x_TI))

    def test_apply_changes_nothing(self) -> None:
        layer, bias_O = self._layer(64, (96,)), self._x(1, 96)[0]
        x = encode(self._x(5, 64), (layer.method.input,))[layer.method.input]
        given = {"values": x.values, "bias": bias_O, **layer.params}
        if x.scale is not None:
            given["scale"] = x.scale
        before = {name: value.clone() for name, value in given.items()}
        first = layer.method.apply(layer.params, x, bias_O).clone()
        for name, value in given.items():
            assert same_bits(value, before[name]), f"apply must not change its inputs, but it changed {name}"
        assert same_bits(layer.method.apply(layer.params, x, bias_O), first), "a second equal call gave another result"

    # Rows

    def test_rows_are_independent(self) -> None:
        """A token's result does not depend on the other tokens, however large they are."""
        if not self.rows_independent:
            pytest.skip("rows_independent = False")
        for dtype in self.dtypes:
            layer, x_TI = self._layer(256, (64, 64), dtype), self._x(9, 256, dtype)
            x_TI[1::2] *= 1000
            together = layer.apply(x_TI)
            for row in range(len(x_TI)):
                alone = layer.apply(x_TI[row : row + 1])
                what = f"row {row} in a batch (set rows_independent = False if a batch shares one scale)"
                assert_near(together[row : row + 1], alone, 2 * TOLERANCE[dtype], what)
            self._check(together[::2], layer.exact(x_TI)[::2], dtype)

    def test_a_row_of_zeros_gives_the_bias(self) -> None:
        layer, bias_O = self._layer(64, (96,)), self._x(1, 96)[0]
        x_TI = self._x(3, 64)
        x_TI[1] = 0
        got = layer.apply(x_TI, bias_O)
        assert got.isfinite().all(), "a row of zeros in the input made the output infinite or NaN"
        assert_near(got[1:2], bias_O[None], 1e-5, "the result of a row of zeros")

    def test_groups_of_zeros_and_rows_of_zeros_in_the_weight(self) -> None:
        """A group of channels may be zero in a row that is not, in the input as in the weight."""
        for inp, parts in self.shapes:
            x_TI, weight_OI = self._x(4, inp), self._weight(inp, sum(parts))
            x_TI[1, : inp // 2] = 0
            x_TI[2, inp // 2 :] = 0
            weight_OI[1, : inp // 2] = 0
            weight_OI[2, inp // 2 :] = 0
            weight_OI[3] = 0
            layer = self._layer(inp, parts, weight=weight_OI)
            got = layer.apply(x_TI)
            assert got.isfinite().all(), "a group of zeros made the output infinite or NaN"
            for row in range(len(x_TI)):
                self._check(got[row : row + 1], layer.exact(x_TI)[row : row + 1], factor=2.0)

    def test_the_last_group_of_channels_may_be_partial(self) -> None:
        """688 input channels, as in the bundled model, are no whole number of groups of 32 or more."""
        inp, large = 688, slice(-16, None)
        for where in ("input", "weight"):
            x_TI, weight_OI = self._x(9, inp), self._weight(inp, 64)
            # Without rare extremes, which determine the error of a scale per row: INT8 exceeded the bound by chance.
            columns = (x_TI if where == "input" else weight_OI)[:, large]
            columns.copy_(20 * columns.clamp(-1.5, 1.5))
            try:
                layer = self._layer(inp, (64,), weight=weight_OI)
            except CapabilityError:
                pytest.skip(f"the format refuses {inp} input channels")
            self._check(layer.apply(x_TI), layer.exact(x_TI), factor=2.0)

    # Shards

    def test_column_shards_are_slices(self) -> None:
        """Each rank holds some output rows of every part. Concatenated they are the whole layer."""
        for inp, parts in self.shapes:
            weight_OI, bias_O, x_TI = self._weight(inp, sum(parts)), self._x(1, sum(parts))[0], self._x(9, inp)
            exact = exact_product(x_TI, weight_OI, bias_O)
            names = tuple(f"part{i}" for i in range(len(parts)))
            by_rank = []
            for rank in range(2):
                layer = ColumnParallel(PATH, names, self._build(rank, 2), inp, parts, bias=True)
                self._load(layer, parts, weight_OI, bias_O)
                y_TO = layer(encode(x_TI, (layer.input,)))
                by_rank.append(y_TO.split([size // 2 for size in parts], dim=1))
            for part, (left, right) in enumerate(zip(*by_rank, strict=True)):
                start = sum(parts[:part])
                self._check(torch.cat((left, right), dim=1), exact[:, start : start + parts[part]])

    def test_row_shards_add_up(self) -> None:
        """Each rank holds some input columns and encodes its own part of the input."""
        for inp, parts in self.shapes:
            out = sum(parts)
            weight_OI, bias_O, x_TI = self._weight(inp, out), self._x(1, out)[0], self._x(9, inp)
            total = torch.zeros(9, out, dtype=torch.float64, device=self.device)
            for rank, x_rank in enumerate(x_TI.chunk(2, dim=1)):
                layer = RowParallel("layers.0.mlp.down", "part0", self._build(rank, 2), inp, out, bias=True)
                self._load(layer, (out,), weight_OI, bias_O)
                total += layer(encode(x_rank.contiguous(), (layer.input,))).values.double()
            self._check(total, exact_product(x_TI, weight_OI, bias_O))

    def test_odd_shapes_are_held_or_refused(self) -> None:
        """A shape is either refused with a CapabilityError that names the layer, or computed correctly."""
        for inp, out in ODD:
            try:
                layer = self._layer(inp, (out,))
            except CapabilityError as refused:
                assert PATH in str(refused), f"the error that refuses {inp} x {out} must name {PATH}: {refused}"
                continue
            x_TI = self._x(33, inp)
            if out > 1:
                self._check(layer.apply(x_TI), layer.exact(x_TI), factor=2.0)
            else:
                assert tuple(layer.apply(x_TI).shape) == (33, 1), "apply must return [T, O]"

    def test_tunables_depend_on_shapes_only(self) -> None:
        """The tuner measures shapes of a model without weights; layers with weights must have the same keys."""
        for inp, parts in self.shapes:
            loaded = self._layer(inp, parts, self.dtypes[-1])
            found = self._points(loaded.method, loaded.params)
            method, shape = self._method(inp, parts, self.dtypes[-1])
            try:
                meta = self._points(method, method.create(shape, torch.device("meta")))
            except (RuntimeError, NotImplementedError) as error:
                raise AssertionError(f"tunables() must read shapes and dtypes only: {error}") from error
            assert meta == found, f"tunables() of a layer on the meta device must be {found}, not {meta}"
            assert len(set(found)) == len(found), f"tunables() lists an operation twice: {found}"

    def test_layers_of_other_shapes_are_tuned_apart(self) -> None:
        seen: dict[tuple[str, Key, int], tuple[int, int]] = {}
        for inp, parts in ((64, (96,)), (128, (96,)), (64, (192,))):
            layer = self._layer(inp, parts, self.dtypes[-1])
            for point in self._points(layer.method, layer.params):
                first = seen.setdefault(point, (inp, sum(parts)))
                assert first == (inp, sum(parts)), f"{point} is the key of {first} and of {(inp, sum(parts))}"

    def _points(self, method: LinearMethod, params: dict[str, torch.Tensor]) -> list[tuple[str, Key, int]]:
        """Return what identifies the tunable operations, and check their form."""
        points = []
        for rows, defers in product((1, 16, 100), (False, True)):
            tunables = method.tunables(params, rows, defers=defers)
            check_tunables(tunables, rows)
            points += [(one.op, one.key, rows) for one in tunables if not defers]
        return points

    def test_kv_scales_are_positive(self) -> None:
        quantizer = self.make()
        for number in range(3):
            scales = quantizer.kv_scales(number)
            valid = len(scales) == 2 and all(0 < scale < float("inf") for scale in scales)
            assert valid, f"kv_scales must return two positive finite numbers, got {scales}"

    # Helpers

    def _method(
        self, inp: int, parts: Sequence[int], dtype: torch.dtype = torch.float32, path: str = PATH
    ) -> tuple[LinearMethod, LinearShape]:
        shape = LinearShape(inp, sum(parts), tuple(parts), dtype=dtype)
        return self.make().linear(path, shape), shape

    def _layer(
        self,
        inp: int,
        parts: Sequence[int],
        dtype: torch.dtype = torch.float32,
        *,
        weight: torch.Tensor | None = None,
        order: Iterable[int] | None = None,
        quantizer: Quantizer | None = None,
        path: str = PATH,
    ) -> Loaded:
        """Create, load each part and finish, as the core's layers do."""
        shape = LinearShape(inp, sum(parts), tuple(parts), dtype=dtype)
        method = (quantizer or self.make()).linear(path, shape)
        weight_OI = self._weight(inp, sum(parts)).to(dtype) if weight is None else weight
        with poisoned_memory():
            params = method.create(shape, torch.device(self.device))
            for part in range(len(parts)) if order is None else order:
                rows = slice(sum(parts[:part]), sum(parts[: part + 1]))
                load_part(method, params, rows, inp, self.checkpoint(method, weight_OI[rows]))
            method.finish(params)
        return Loaded(method, params, weight_OI)

    def _load(self, layer: Linear, parts: Sequence[int], weight_OI: torch.Tensor, bias_O: torch.Tensor) -> None:
        """Load one rank's layer from the full matrices."""
        stored: dict[str, torch.Tensor] = {}
        for part, size in enumerate(parts):
            rows = slice(sum(parts[:part]), sum(parts[:part]) + size)
            tensors = {**self.checkpoint(layer.method, weight_OI[rows]), "bias": bias_O[rows]}
            stored |= {f"part{part}.{name}": tensor for name, tensor in tensors.items()}
        with poisoned_memory():
            load_weights(layer.weights(), ((name, partial(Lazy, tensor)) for name, tensor in stored.items()))
            layer.finish()

    def _build(self, rank: int, size: int) -> BuildContext:
        collective = Alone(None)
        collective.rank, collective.size = rank, size
        spec = ModelSpec("none", 1, 1, 1, 1, 1, 1, 1, 1, "float32")
        return build_context(spec, quantizer=self.make(), collective=collective, device=self.device)

    def _x(self, tokens: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        fresh(self)
        return torch.randn(tokens, columns).to(dtype).to(self.device)

    def _weight(self, inp: int, out: int) -> torch.Tensor:
        fresh(self)
        return torch.randn(out, inp) * torch.rand(out, 1)

    def _check(
        self, got: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype = torch.float32, factor: float = 1.0
    ) -> None:
        got, exact = got.double().cpu(), exact.double().cpu()
        assert got.shape == exact.shape, f"shape {tuple(got.shape)}, expected {tuple(exact.shape)}"
        error, most = float((got - exact).norm() / exact.norm()), factor * self.error + TOLERANCE[dtype]
        assert error <= most, (
            f"relative error of the matmul is {error:.2e}, more than {most:.2e}: the suite's attribute `error` is "
            f"{self.error:g}; set it to that of the format ({seed_note()})"
        )
