"""Layers that launch the same kernels. To find what there is to compile, one of each kind need run."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from numbers import Number

import torch

from dovetail.core.interfaces import AttentionLayer, ExpertMethod, ExpertShape, LinearMethod, LinearShape
from dovetail.core.layers.experts import Experts
from dovetail.core.layers.linear import Linear


def kind_of(attention: AttentionLayer, linears: Iterable[Linear], experts: Experts | None = None) -> Hashable:
    """Return a value that is equal for layers of one class whose attention, linear layers and experts launch the same
    kernels: they differ in the content of tensors, in names and in indices at most."""
    alike = replace(attention, index=0, local=0, k_scale=0.0, v_scale=0.0, sinks=None)
    tensors = attention.k_scale, attention.v_scale, attention.sinks
    routed = None if experts is None else (_facts(experts.method), _facts(experts.params), experts.activation)
    return alike, tuple(map(_facts, tensors)), tuple(_linear(one) for one in linears), routed


def _linear(linear: Linear) -> Hashable:
    """Everything but names: shapes, the method with its numbers and formats, and the parameters' types."""
    return _facts(linear.shape), _facts(linear.method), _facts(linear.params), linear.has_bias


def _facts(value: object) -> Hashable:
    """Return what selects a kernel: a tensor's type, a number or a format itself, the class of most other objects."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape)
    if isinstance(value, tuple | list):
        return tuple(map(_facts, value))
    if isinstance(value, Mapping):
        return tuple((name, _facts(one)) for name, one in sorted(value.items()))
    if isinstance(value, LinearShape):
        return replace(value, names=(), shares={})
    if isinstance(value, ExpertShape):
        return replace(value, names=(), shares={}, ids=(), paths=())
    if isinstance(value, LinearMethod | ExpertMethod):
        return type(value), _facts(vars(value))
    plain = value is None or isinstance(value, Number | torch.dtype)
    # Records such as ActFormat and WeightFormat compare by value.
    return value if plain or (is_dataclass(value) and _hashable(value)) else type(value)


def _hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def one_of_each(kinds: Sequence[Hashable], kept: Iterable[int] = ()) -> list[int]:
    """Return the indices of layers that together launch what all do, in order. How a layer begins depends on the one
    before it, so each pair of neighbours that occurs is there. `kept`: indices of layers that stay in any case."""
    found, seen = set(kept), set()
    for index, pair in enumerate(zip([None, *kinds], kinds, strict=False)):
        if pair not in seen:
            seen.add(pair)
            found |= {max(index - 1, 0), index}
    return sorted(found)
