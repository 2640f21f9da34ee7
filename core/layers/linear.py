"""Linear layers under tensor parallelism (Megatron-LM, Shoeybi et al. 2019). A column-parallel layer holds some output
rows of each of its parts, a row-parallel one some input columns. The quantizer's LinearMethod stores and
multiplies the weight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from dovetail.core.checkpoint import LazyTensor
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import PLAIN, ActFormat, Activation, BuildContext, Bundle, LinearShape, Partial
from dovetail.core.interfaces.model import can_share_heads
from dovetail.core.interfaces.tensor_record import TensorRecord
from dovetail.core.interfaces.tuning import Tunable
from dovetail.core.layers.share import Wanted, below, check_records, fewer_ranks, shares_of, stored_of
from dovetail.core.layers.weights import Taker, Weight, WeightSet
from dovetail.core.ops.formats import with_sums


@dataclass(frozen=True, slots=True)
class Part:
    """This rank's output rows of one checkpoint matrix, as one part of a merged layer."""

    name: str
    """Checkpoint prefix, for instance "model.layers.0.self_attn.q_proj". Several parts may have the same one."""
    rows: int
    """Rows of the whole matrix."""
    start: int
    stop: int
    order: torch.Tensor | None = None
    """The layer's rows in order, relative to start; None = all rows up to stop in checkpoint order."""

    @property
    def size(self) -> int:
        return self.stop - self.start if self.order is None else len(self.order)

    @classmethod
    def of(cls, name: str, rows: int, wanted: torch.Tensor) -> Part:
        """Part with the given rows of the matrix, in the given order."""
        start, stop = int(wanted.min()), int(wanted.max()) + 1
        whole = len(wanted) == stop - start and bool((wanted.diff() == 1).all())
        return cls(name, rows, start, stop, None if whole else wanted - start)


class Linear:
    """Some output rows and input columns of one or several stacked matrices."""

    def __init__(
        self,
        path: str,
        build: BuildContext,
        parts: tuple[Part, ...],
        inp: int,
        columns: slice | None = None,
        shard: Literal["column", "row", "none"] = "none",
        bias: bool = False,
    ) -> None:
        """`inp`: whole input width. `columns`: this rank's input columns (None = all)."""
        self.path, self.parts, self.inp, self.columns = path, parts, inp, columns or slice(0, inp)
        self.shape = LinearShape(
            inp=self.columns.stop - self.columns.start,
            out=sum(part.size for part in parts),
            parts=tuple(part.size for part in parts),
            shard=shard,
            dtype=build.dtype,
            names=tuple(part.name for part in parts),
            shares=fewer_ranks(build),
            whole_inp=inp,
            first_inp=self.columns.start,
        )
        self.method = build.quantizer.linear(path, self.shape)
        self.params = self.method.create(self.shape, build.device)
        self.has_bias = bias
        self.bias = torch.empty(self.shape.out, dtype=build.dtype, device=build.device) if bias else None
        self.adapters = build.adapters
        self._adapter = None if build.adapters is None else build.adapters.attach(self)
        build.tuned.append(self.tunables)

    def tunables(self, rows: int) -> Sequence[Tunable]:
        return self.method.tunables(self.params, rows)

    @property
    def input(self) -> ActFormat:
        """Input format of the matmul, with the sums that it can use."""
        return with_sums(self.method.input, self.method.sums)

    @property
    def inputs(self) -> tuple[ActFormat, ...]:
        """All input formats, for the producer's `emit`. Adapters read the plain one in steps that have adapters."""
        return (self.input, PLAIN) if self._adapting and self.input is not PLAIN else (self.input,)

    @property
    def _adapting(self) -> bool:
        """Whether some row of the step has an adapter."""
        return self.adapters is not None and self.adapters.slots_T is not None

    def __call__(self, x: Bundle) -> torch.Tensor:
        return self._product(x, self.bias)

    def _given(self, x: Bundle) -> Activation:
        """Return the matmul's input in the format that its method names, with the sums for it."""
        given = x[self.input]
        return given if given.format is self.method.input else replace(given, format=self.method.input)

    def _product(self, x: Bundle, bias: torch.Tensor | None) -> torch.Tensor:
        y_TO = self.method.apply(self.params, self._given(x), bias)
        if self._adapting:
            self._adapter.apply(x[PLAIN].values, y_TO, self.adapters.slots_T)
        return y_TO

    def weights(self) -> Iterator[Taker]:
        for source, rows in {part.name: part.rows for part in self.parts}.items():
            records = self._records(source)
            yield WeightSet(
                stored_of(source, records, rows, self.inp),
                partial(check_records, records, source, outputs=rows, inputs=self.inp),
                partial(self._take, source),
            )
            if self.has_bias:
                yield Weight(f"{source}.bias", partial(self._take_bias, source), (rows,), "zeros")

    def finish(self) -> None:
        self.method.finish(self.params)

    # LinearSite.

    @property
    def whole(self) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of each part's whole matrix."""
        return tuple((part.rows, self.inp) for part in self.parts)

    def output_share(self, part: int, tensor: LazyTensor) -> torch.Tensor:
        """This rank's rows, in the layer's order, of a tensor with one row per output of the part's whole matrix."""
        rows = self.parts[part]
        return _ordered(tensor[rows.start : rows.stop], rows)

    def input_share(self, tensor: LazyTensor) -> torch.Tensor:
        """This rank's columns of a tensor with one column per input."""
        return tensor[:, self.columns]

    def _of(self, source: str) -> Iterator[tuple[Part, slice]]:
        """Yield the parts that one checkpoint matrix fills, with their rows in this layer."""
        at = 0
        for part in self.parts:
            if part.name == source:
                yield part, slice(at, at + part.size)
            at += part.size

    def _records(self, source: str) -> list[TensorRecord]:
        records = self.method.tensors_of(source)
        return [record for record in records if not (self.has_bias and record.name == "bias")]

    def _take(self, source: str, tensors: Mapping[str, LazyTensor]) -> None:
        """Load this rank's share of one checkpoint matrix."""
        inputs = Wanted(self.inp, self.columns.start, self.columns.stop)
        for part, to in self._of(source):
            outputs = Wanted(part.rows, part.start, part.stop, part.order)
            with below(source):
                share = shares_of(source, self._records(source), tensors, outputs, inputs)
                self.method.load(self.params, to, share)

    def _take_bias(self, source: str, lazy: LazyTensor) -> None:
        for part, to in self._of(source):
            self.bias[to].copy_(_ordered(lazy[part.start : part.stop], part))


class ColumnParallel(Linear):
    """Linear layer with output rows split over ranks. Several matrices with one input are merged into one matmul."""

    def __init__(
        self,
        path: str,
        names: tuple[str, ...],
        build: BuildContext,
        inp: int,
        outs: tuple[int, ...],
        bias: bool = False,
    ) -> None:
        """`names`: a matrix each, or repeatedly the name of one that holds several, in succession (Phi-3)."""
        parts = []
        for index, (name, out) in enumerate(zip(names, outs, strict=True)):
            rows = [size for other, size in zip(names, outs, strict=True) if other == name]
            first = sum(rows[: names[:index].count(name)])
            start, stop = split_channels(name, out, build)
            parts.append(Part(name, sum(rows), first + start, first + stop))
        super().__init__(path, build, tuple(parts), inp, shard="column", bias=bias)


class QKVParallel(Linear):
    """q|k|v of attention, split by heads. With fewer kv heads than ranks, adjacent ranks hold the same kv head."""

    def __init__(
        self,
        path: str,
        names: tuple[str, ...],
        build: BuildContext,
        inp: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        bias: bool = False,
        interleaved: int = 0,
    ) -> None:
        """`names`: three matrices, three times the name of one that holds all queries, then all keys, then all values
        (Phi-3), or one that holds each kv head's queries, then its key, then its value (Falcon).

        `interleaved`: number of leading dimensions of a head that the checkpoint rotates as adjacent pairs. Their rows
        are reordered to halves in q and k, the only layout that kernels support. This changes no q.k.
        """
        rank, size = build.collective.rank, build.collective.size
        self.heads, self.kv_heads = local_heads(heads, kv_heads, size)
        q_H = torch.arange(rank * self.heads, (rank + 1) * self.heads)
        kv_K = torch.arange(self.kv_heads) + rank * kv_heads // size
        dims_D = torch.arange(head_dim)
        pairs_D = torch.cat((dims_D[0:interleaved:2], dims_D[1:interleaved:2], dims_D[interleaved:]))
        if len(names) == 1:
            queries = heads // kv_heads
            group = queries + 2
            places = (q_H // queries * group + q_H % queries, kv_K * group + queries, kv_K * group + queries + 1)
            names, counts = names * 3, (kv_heads * group,) * 3
        elif len(set(names)) == 1:
            places, counts = (q_H, heads + kv_K, heads + kv_heads + kv_K), (heads + 2 * kv_heads,) * 3
        else:
            places, counts = (q_H, kv_K, kv_K), (heads, kv_heads, kv_heads)
        parts = tuple(
            Part.of(name, count * head_dim, (place[:, None] * head_dim + order_D).flatten())
            for name, count, place, order_D in zip(names, counts, places, (pairs_D, pairs_D, dims_D), strict=True)
        )
        super().__init__(path, build, parts, inp, shard="column", bias=bias)


class RowParallel(Linear):
    """Linear layer with input columns split over ranks. Its output is a Partial, summed at the next boundary."""

    def __init__(
        self,
        path: str,
        name: str,
        build: BuildContext,
        inp: int,
        out: int,
        bias: bool = False,
        defers: bool = False,
    ) -> None:
        """`defers`: the norm at the next boundary applies the matmul's scales (Partial.scale)."""
        rank, size = build.collective.rank, build.collective.size
        columns = slice(*split_channels(name, inp, build))
        super().__init__(path, build, (Part(name, out, 0, out),), inp, columns, shard="row", bias=bias)
        self.adds_bias = rank == 0
        self.defers = defers and size == 1 and not bias

    def tunables(self, rows: int) -> Sequence[Tunable]:
        return self.method.tunables(self.params, rows, defers=self.defers)

    def __call__(self, x: Bundle) -> Partial:  # type: ignore[override]
        """Multiply. Only rank 0 adds the bias, since the sum over ranks would otherwise count it once per rank."""
        if self.defers and not self._adapting:
            return self.method.partial(self.params, self._given(x))
        return Partial(self._product(x, self.bias if self.adds_bias else None))


def local_heads(heads: int, kv_heads: int, size: int) -> tuple[int, int]:
    """Return the number of query and kv heads of one rank. Raise ConfigError if they do not divide."""
    if not can_share_heads(heads, kv_heads, size):
        options = [n for n in range(1, heads + 1) if can_share_heads(heads, kv_heads, n)]
        raise ConfigError(
            f"engine.tp={size} does not divide {heads} query heads and {kv_heads} kv heads. {_set_to(options)}"
        )
    return heads // size, max(1, kv_heads // size)


def _set_to(ranks: Iterable[int]) -> str:
    return f"Set engine.tp to one of {', '.join(map(str, ranks))}"


def split_channels(name: str, total: int, build: BuildContext) -> tuple[int, int]:
    """Return this rank's range of `total` channels. Raise ConfigError if they do not divide. `name`: the matrix."""
    rank, each = build.collective.rank, share_of_channels(name, total, build, build.collective.size)
    return rank * each, (rank + 1) * each


def share_of_channels(name: str, total: int, build: BuildContext, parts: int, ranks: int | None = None) -> int:
    """Return the channels of each of `parts` ranks that share a matrix. Raise ConfigError if they do not divide.
    `ranks`: number of ranks that have experts; None = those of the model."""
    if total % parts:
        size, options = ranks or build.collective.size, [n for n in build.spec.shares() if total % n == 0]
        if parts == size:
            raise ConfigError(f"engine.tp={size} does not divide the {total} channels of {name}. {_set_to(options)}")
        groups = [n for n in range(1, size + 1) if size % n == 0 and total % (size // n) == 0]
        raise ConfigError(
            f"engine.ep={size // parts} leaves {parts} of {size} ranks for the {total} channels of {name}, "
            f"which they do not divide. Set engine.ep to one of {', '.join(map(str, groups))}"
        )
    return total // parts


def _ordered(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """Return rows in the layer's order."""
    return tensor if part.order is None else tensor[part.order]
