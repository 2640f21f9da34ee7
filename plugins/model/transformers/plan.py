"""Tensor parallelism of a decoder of transformers, from the plan of its class (base_model_tp_plan)."""

from __future__ import annotations

import re
from math import gcd
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Share = Literal["column", "row", "none"]

SHARED: dict[str, Share] = {"colwise": "column", "rowwise": "row"}
"""Styles that split a linear layer over ranks."""
_WHOLE = {
    "colwise_gather_output",
    "rowwise_split_input",
    "replicated",
    "replicated_with_grad_allreduce",
    "embedding_rowwise",
}
"""Styles after which every rank has the whole output. Such layers are computed whole on every rank."""


def share_of(model: PreTrainedModel, path: str) -> Share:
    """Return the dimension in which the class's plan splits the linear layer at `path`."""
    pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
    return SHARED.get((model.tp_plan or {}).get(pattern, ""), "none")


def shared_sizes(model: PreTrainedModel, heads: int, kv_heads: int) -> tuple[tuple[int, ...], str]:
    """Return the numbers of ranks that can share the model evenly, and the reason if that is only one."""
    styles = set((model.tp_plan or {}).values())
    if not styles & SHARED.keys():
        return (1,), "its class has no plan that splits its layers"
    if unknown := sorted(styles - SHARED.keys() - _WHOLE):
        return (1,), f"the plan of its class has the styles {', '.join(unknown)}, which are not supported"
    common = gcd(heads, kv_heads)
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and (share := share_of(model, path)) != "none":
            common = gcd(common, module.out_features if share == "column" else module.in_features)
    ranks = tuple(n for n in range(1, common + 1) if common % n == 0)
    return ranks, "" if len(ranks) > 1 else f"{heads} heads, {kv_heads} kv heads and its MLP have no common divisor"


def shrink(model: PreTrainedModel, ranks: int) -> None:
    """Give the linear layers of a model on the meta device the shapes of one of `ranks` ranks."""
    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear) or (share := share_of(model, path)) == "none":
            continue
        out, inp = module.weight.shape
        out, inp = (out // ranks, inp) if share == "column" else (out, inp // ranks)
        module.weight = nn.Parameter(torch.empty(out, inp, dtype=module.weight.dtype, device="meta"), False)
        if module.bias is not None:
            module.bias = nn.Parameter(torch.empty(out, dtype=module.bias.dtype, device="meta"), False)
