"""Tensors of a checkpoint under the names and shapes of a transformers model."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from dovetail.core.checkpoint import LazyTensor
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces.checkpoint import TensorHeader
from dovetail.core.layers.weights import header_dtype
from dovetail.plugins.model.transformers.library import error_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Opener = Callable[[], LazyTensor]
Source = Iterable[tuple[str, Opener]]
"""Pairs as Model.load takes them."""


def renamed(
    model: PreTrainedModel,
    source: Source,
    wanted: Collection[str],
    transposed: Collection[str],
    build: Callable[[], PreTrainedModel],
) -> Source:
    """Yield the tensors under the names of `wanted`, as transformers renames those of older checkpoints and of models
    that were saved without a head, and merges those of experts. Tensors that the class ignores are left out.

    `transposed`: names of matrices that the checkpoint stores as [inputs, outputs]. `build`: returns the library's
    whole model on the meta device, whose shapes some conversions read; `model` has other modules."""
    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    merged: dict[str, Merged] = {}
    prefix = f"{model.base_model_prefix}."
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    tied = model.all_tied_weights_keys

    def unused(name: str) -> bool:
        return name in tied or name.endswith(".inv_freq") or any(pattern.search(name) for pattern in ignored)

    for name, opener in source:
        found, pattern = rename_source_key(name, renamings, converters)
        if found not in wanted:
            found = next((each for each in (prefix + found, found.removeprefix(prefix)) if each in wanted), found)
        if pattern is not None and found in wanted:
            converter = next(one for one in converters if pattern in one.source_patterns)
            merged.setdefault(found, Merged(build, found, converter)).parts.append((name, pattern, opener))
        elif found in wanted or not unused(found):
            yield found, partial(_transposed, opener) if found in transposed else opener
    for first in merged.values():
        yield from first.openers()


class Merged:
    """Tensors that the library makes of others, such as all experts of a layer."""

    def __init__(self, build: Callable[[], PreTrainedModel], name: str, converter: WeightConverter) -> None:
        self.build, self.name, self.converter = build, name, converter
        self.parts: list[tuple[str, str, Opener]] = []
        """(name, matching pattern of the converter, opener) of each tensor in the checkpoint."""

    def openers(self) -> Iterator[tuple[str, Opener]]:
        first, *others = self.converter.target_patterns
        for target in (first, *others):
            name = self.name.replace(first, target)
            yield name, partial(self.opened, name)

    def opened(self, name: str) -> LazyTensor:
        converter, model = copy.deepcopy(self.converter), self.build()
        for source, pattern, opener in sorted(self.parts, key=lambda part: dot_natural_key(part[0])):
            converter.add_tensor(self.name, source, pattern, partial(_read, opener))
        try:
            whole: torch.Tensor = converter.convert(self.name, model=model, config=model.config)[name]
        except Exception as error:  # Converters fail in their own ways for tensors of other shapes or numbers.
            raise ConfigError(
                f"model=transformers does not run {type(model).__name__} with this checkpoint: the library cannot "
                f"convert it to {name} ({error_text(error)})"
            ) from error
        return Whole(whole, self.parts[0][2]())


def _read(opener: Opener) -> torch.Tensor:
    whole: torch.Tensor = opener()[...]
    return whole


def _transposed(opener: Opener) -> LazyTensor:
    return Transposed(opener())


class Whole:
    """LazyTensor in memory."""

    def __init__(self, tensor: torch.Tensor, origin: LazyTensor) -> None:
        """`origin`: one of the checkpoint's tensors that it was made of."""
        self._tensor, self.origin = tensor, origin

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._tensor[index]


class Transposed:
    """LazyTensor of a transposed matrix."""

    def __init__(self, tensor: LazyTensor) -> None:
        self.origin = tensor

    def get_shape(self) -> list[int]:
        return list(self.origin.get_shape())[::-1]

    def __getitem__(self, index: Any) -> torch.Tensor:
        if isinstance(index, tuple) and len(index) == 2:
            return self.origin[index[::-1]].t()
        return self.origin[...].t()[index]


class Unread:
    """LazyTensor of a header. What is read of it has no memory."""

    def __init__(self, name: str, header: TensorHeader) -> None:
        self.name, self.header = name, header

    def get_shape(self) -> list[int]:
        return list(self.header.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        dtype = header_dtype(self.name, self.header)
        return torch.empty(self.header.shape, dtype=dtype, device="meta")[index]


def unread(headers: Mapping[str, TensorHeader]) -> Source:
    """Return headers as `renamed` takes tensors."""
    return ((name, partial(Unread, name, header)) for name, header in headers.items())


def headers_of(source: Source) -> dict[str, TensorHeader]:
    """Return the headers of tensors that `renamed` makes of Unread ones, each with a file that has a part of it."""
    found = {}
    for name, opener in source:
        lazy: Any = opener()
        first: Unread = lazy if isinstance(lazy, Unread) else lazy.origin
        found[name] = replace(first.header, shape=tuple(lazy.get_shape()))
    return found
