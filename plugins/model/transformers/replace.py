"""Replaces modules of a transformers model on the meta device by this engine's layers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from dovetail.core.interfaces import BuildContext
from dovetail.core.layers import (
    ColumnParallel,
    Linear,
    LMHead,
    RMSNorm,
    RowParallel,
    Taker,
    VocabParallelEmbedding,
    VocabTable,
)
from dovetail.core.layers.linear import Part
from dovetail.plugins.model.transformers.modules import (
    EmbeddingModule,
    HeadModule,
    LinearModule,
    NormModule,
    computes_rms_norm,
    eps_of,
)
from dovetail.plugins.model.transformers.plan import share_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def is_linear(module: nn.Module) -> bool:
    """Whether this is a plain matrix. Subclasses may compute something else."""
    return type(module) in (nn.Linear, Conv1D)


def matrix_shapes(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of every plain matrix, by path."""
    shapes = {}
    for path, module in model.named_modules():
        if is_linear(module):
            rows, columns = module.weight.shape
            shapes[path] = (columns, rows) if isinstance(module, Conv1D) else (rows, columns)
    return shapes


class Replacement:
    """This engine's layers in a model. Each method replaces modules of one type."""

    def __init__(self, model: PreTrainedModel, build: BuildContext, blocks: str) -> None:
        """`blocks`: path of the list of layers."""
        self.model, self.build, self.blocks = model, build, blocks
        self.head = model.get_output_embeddings()
        self.linears: list[Linear] = []
        self.norms: list[RMSNorm] = []
        self.tables: list[VocabTable | LMHead] = []
        self.transposed: set[str] = set()
        """Weights that the checkpoint stores as [inputs, outputs]."""
        self.kept: dict[str, int] = {}
        """Class of norms that stay the library's -> their number."""

    def takers(self) -> Iterator[Taker]:
        for layer in (*self.tables, *self.norms, *self.linears):
            yield from layer.weights()

    def replace_tables(self) -> None:
        """Replace token embedding and output embedding, unless they do more than look up and multiply."""
        model, build = self.model, self.build
        embedding, head = model.get_input_embeddings(), self.head
        paths = {id(module): path for path, module in model.named_modules()}
        tied, plain = head.weight is embedding.weight, type(embedding) is nn.Embedding
        multiplies = type(head) is nn.Linear and (plain or not tied)
        table = None
        if plain:
            path, (vocab, channels) = paths[id(embedding)], embedding.weight.shape
            table = VocabTable(path, build, vocab, channels, logits=tied and multiplies)
            self.tables.append(table)
            model.set_submodule(path, EmbeddingModule(VocabParallelEmbedding(table)))
        if multiplies:
            path, (vocab, channels) = paths[id(head)], head.weight.shape
            if not tied:
                table = VocabTable(path, build, vocab, channels, lookup=False, logits=True)
                self.tables.append(table)
            layer = LMHead(table, build, None if head.bias is None else f"{path}.bias")
            self.tables.append(layer)
            model.set_submodule(path, HeadModule(layer))

    def replace_linears(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        """`shapes`: (outputs, inputs) of the whole matrices, by path."""
        for path, module in list(self.model.named_modules()):
            if not is_linear(module) or module is self.head or self._is_router(path):
                continue
            out, inp = shapes[path]
            name, bias = self._short(path), module.bias is not None
            share = "none" if isinstance(module, Conv1D) else share_of(self.model, path)
            linear: Linear
            if share == "column":
                linear = ColumnParallel(name, (path,), self.build, inp, (out,), bias=bias)
            elif share == "row":
                linear = RowParallel(name, path, self.build, inp, out, bias=bias)
            else:
                linear = Linear(name, self.build, (Part(path, out, 0, out),), inp, bias=bias)
            if isinstance(module, Conv1D):
                self.transposed.add(f"{path}.weight")
            self.linears.append(linear)
            self.model.set_submodule(path, LinearModule(linear, self.build.collective))

    def replace_norms(self) -> None:
        """Replace RMSNorms. A check on random input finds them; their classes have many names."""
        checked: dict[tuple[type, torch.Size, float | None], bool] = {}
        for path, module in list(self.model.named_modules()):
            weight, eps = getattr(module, "weight", None), eps_of(module)
            if not isinstance(weight, torch.Tensor) or weight.ndim != 1 or isinstance(module, nn.LayerNorm):
                continue
            key = (type(module), weight.shape, eps)
            if key not in checked:
                checked[key] = computes_rms_norm(module)
            if not checked[key]:
                name = type(module).__name__
                self.kept[name] = self.kept.get(name, 0) + 1
                continue
            norm = RMSNorm(path, self.build, len(weight), eps)
            self.norms.append(norm)
            self.model.set_submodule(path, NormModule(norm))

    def words(self) -> str:
        """Describe what runs on this engine's kernels and what does not, for a start-up note."""
        experts = sum(weight.ndim == 3 for weight in self.model.parameters())
        kept = [f"{count} {name}" for name, count in self.kept.items()]
        kept += [f"the matrices of experts ({experts}), in the model's dtype"] if experts else []
        own = f"{len(self.linears)} linear layers and {len(self.norms)} norms of this engine"
        return own + (f"; {' and '.join(kept)} stay the library's" if kept else "")

    def _short(self, path: str) -> str:
        """Return the path as quantizers match it: layers.3.self_attn.q_proj."""
        return re.sub(rf"^{re.escape(self.blocks)}\.", "layers.", path)

    def _is_router(self, path: str) -> bool:
        """Whether the matrix is beside experts and chooses among them: a small error would choose others."""
        return hasattr(self.model.get_submodule(path.rpartition(".")[0]), "experts")
