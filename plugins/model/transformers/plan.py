"""Tensor parallelism of a decoder of transformers, from the plan of its class (base_model_tp_plan)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dovetail.core.checkpoint import LazyTensor
    from dovetail.core.interfaces import Collective

Share = Literal["column", "row", "none"]

SHARED: dict[str, Share] = {"colwise": "column", "rowwise": "row"}
"""Styles that split a linear layer over ranks."""
PACKED = "packed_"
"""Prefix of the style of a tensor that holds two in succession, each of which is split."""
SUMMED = "moe_tp_experts"
"""Style of a module whose outputs are summed over ranks: each rank has a part of every expert."""
_SPLIT = {*SHARED, *(PACKED + style for style in SHARED)}
"""Styles that split a parameter that is no matrix of a linear layer, such as those of all experts."""
_WHOLE = {
    "colwise_gather_output",
    "rowwise_split_input",
    "replicated",
    "replicated_with_grad_allreduce",
    "embedding_rowwise",
    "mla_kv_a_proj",
    "local_params",
}
"""Styles after which every rank has the whole output. Such layers are computed whole on every rank."""


@dataclass(frozen=True)
class Cut:
    """How a parameter is split over ranks."""

    dim: int
    packed: bool
    """Whether the dimension holds two tensors in succession."""

    def shape(self, whole: torch.Size, ranks: int) -> tuple[int, ...]:
        """Return the shape of one rank's part."""
        return tuple(size // ranks if dim == self.dim else size for dim, size in enumerate(whole))

    def whole(self, part: torch.Size, ranks: int) -> tuple[int, ...]:
        """Return the shape of the parameter, from that of one rank's part."""
        return tuple(size * ranks if dim == self.dim else size for dim, size in enumerate(part))

    def take(self, lazy: LazyTensor, part: torch.Tensor, rank: int, ranks: int) -> None:
        """Copy the part of `rank`."""
        held = 1 + self.packed
        size = part.shape[self.dim] // held
        for index in range(held):
            start = (index * ranks + rank) * size
            chosen = tuple(slice(start, start + size) if dim == self.dim else slice(None) for dim in range(part.ndim))
            part.narrow(self.dim, index * size, size).copy_(lazy[chosen])


def _style(model: PreTrainedModel, path: str) -> str:
    return (model.tp_plan or {}).get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path), "")


def share_of(model: PreTrainedModel, path: str) -> Share:
    """Return the dimension in which the class's plan splits the linear layer at `path`."""
    return SHARED.get(_style(model, path), "none")


def cuts(model: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter, Cut]]:
    """Yield path, parameter and split of those that the class's plan splits by their own name."""
    for path, weight in model.named_parameters():
        style = _style(model, path)
        if style not in _SPLIT or isinstance(model.get_submodule(path.rpartition(".")[0]), nn.Linear):
            continue
        column = style.endswith("colwise")
        if column or weight.ndim > 1:
            dim = weight.ndim - (2 if column and weight.ndim > 1 else 1)
            yield path, weight, Cut(dim, style.startswith(PACKED))


def sum_experts(model: PreTrainedModel, collective: Collective) -> None:
    """Let modules with the style SUMMED return the sum over ranks."""
    for _, module in _summed(model):
        module.register_forward_hook(lambda owner, given, output: collective.all_reduce(output))


def _summed(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    return ((path, module) for path, module in model.named_modules() if _style(model, path) == SUMMED)


def shared_sizes(model: PreTrainedModel, heads: int, kv_heads: int) -> tuple[tuple[int, ...], str]:
    """Return the numbers of ranks that can share the model evenly, and the reason if that is only one."""
    styles = set((model.tp_plan or {}).values())
    if not styles & SHARED.keys():
        return (1,), "its class has no plan that splits its layers"
    if unknown := sorted(styles - _SPLIT - _WHOLE - {SUMMED}):
        return (1,), f"the plan of its class has the styles {', '.join(unknown)}, which are not supported"
    common, summed = gcd(heads, kv_heads), tuple(f"{path}." for path, _ in _summed(model))
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and (share := share_of(model, path)) != "none":
            common = gcd(common, module.out_features if share == "column" else module.in_features)
    for path, weight, cut in cuts(model):
        if weight.ndim > 1 and not path.startswith(summed):
            return (1,), f"the plan of its class splits {path}, and does not sum what it gives over ranks"
        common = gcd(common, weight.shape[cut.dim] // (1 + cut.packed))
    ranks = tuple(n for n in range(1, common + 1) if common % n == 0)
    return ranks, "" if len(ranks) > 1 else f"{heads} heads, {kv_heads} kv heads and its MLP have no common divisor"


def shrink(model: PreTrainedModel, ranks: int) -> None:
    """Give the parameters of a model on the meta device the shapes of one of `ranks` ranks."""
    for path, weight, cut in list(cuts(model)):
        owner, _, name = path.rpartition(".")
        part = torch.empty(cut.shape(weight.shape, ranks), dtype=weight.dtype, device="meta")
        model.get_submodule(owner).register_parameter(name, nn.Parameter(part, False))
    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear) or (share := share_of(model, path)) == "none":
            continue
        out, inp = module.weight.shape
        out, inp = (out // ranks, inp) if share == "column" else (out, inp // ranks)
        module.weight = nn.Parameter(torch.empty(out, inp, dtype=module.weight.dtype, device="meta"), False)
        if module.bias is not None and share == "column":
            module.bias = nn.Parameter(torch.empty(out, dtype=module.bias.dtype, device="meta"), False)
