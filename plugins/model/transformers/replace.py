"""Replaces modules of a transformers model on the meta device by this engine's layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from dovetail.core.interfaces import BuildContext, LinearMethod, LinearShape
from dovetail.core.layers import (
    ColumnParallel,
    Linear,
    LMHead,
    PlainLinear,
    RMSNorm,
    RowParallel,
    Taker,
    VocabParallelEmbedding,
    VocabTable,
)
from dovetail.core.layers.linear import Part
from dovetail.core.layers.plain import Given
from dovetail.core.layers.share import fewer_ranks
from dovetail.plugins.model.transformers.modules import (
    EmbeddingModule,
    HeadModule,
    LinearModule,
    NormModule,
    SharedProduct,
    SiblingModule,
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


def is_router(model: nn.Module, path: str) -> bool:
    """Whether the matrix chooses among experts: a small error would choose others. It is beside them, or alone in a
    module that is (HunYuan, 2024)."""
    parent, _, name = path.rpartition(".")
    module, beside = model.get_submodule(parent), model.get_submodule(parent.rpartition(".")[0])
    alone = all(own.startswith(f"{name}.") for own, _ in module.named_parameters())
    return hasattr(module, "experts") or (alone and hasattr(beside, "experts"))


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
        # Found before modules are replaced, since it depends on what is beside a matrix.
        self._routers = {path for path, module in model.named_modules() if is_linear(module) and is_router(model, path)}
        self._methods: dict[str, LinearMethod] = {}
        """Method of each matrix for which the quantizer was asked."""

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
            name = f"{path}.bias"
            layer = LMHead(table, build, None if head.bias is None else model.all_tied_weights_keys.get(name, name))
            self.tables.append(layer)
            model.set_submodule(path, HeadModule(layer))

    def merge_linears(self, shapes: Mapping[str, tuple[int, int]], groups: Iterable[tuple[str, ...]]) -> None:
        """Replace matrices with the same input by one matmul, if the quantizer leaves them in the model's dtype.
        `groups`: paths of the matrices that read one tensor."""
        for paths in groups:
            modules = [self.model.get_submodule(path) for path in paths]
            share, biased = share_of(self.model, paths[0]), modules[0].bias is not None
            alike = all((m.bias is not None) == biased and type(m) is nn.Linear for m in modules)
            same = all(share_of(self.model, path) == share and path not in self._routers for path in paths)
            if (
                not alike
                or not same
                or share == "row"
                or not all(self._stays_plain(path, shapes, share) for path in paths)
            ):
                continue
            outs, inp = tuple(shapes[path][0] for path in paths), shapes[paths[0]][1]
            name, build = "+".join(map(self._short, paths)), replace(self.build, quantizer=Given(PlainLinear()))
            linear: Linear
            if share == "column":
                linear = ColumnParallel(name, paths, build, inp, outs, bias=biased)
            else:
                parts = tuple(Part(path, out, 0, out) for path, out in zip(paths, outs, strict=True))
                linear = Linear(name, build, parts, inp, bias=biased)
            self.linears.append(linear)
            shared = SharedProduct(linear)
            for part, path in enumerate(paths):
                self.model.set_submodule(path, SiblingModule(shared, part))

    def _stays_plain(self, path: str, shapes: Mapping[str, tuple[int, int]], share: Literal["column", "none"]) -> bool:
        """Ask the quantizer, which each matrix asks once."""
        out, inp = shapes[path]
        out //= self.build.collective.size if share == "column" else 1
        shape = LinearShape(inp, out, (out,), share, self.build.dtype, (path,), fewer_ranks(self.build), inp)
        method = self._methods[path] = self.build.quantizer.linear(self._short(path), shape)
        return type(method) is PlainLinear

    def replace_linears(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        """`shapes`: (outputs, inputs) of the whole matrices, by path."""
        for path, module in list(self.model.named_modules()):
            if not is_linear(module) or module is self.head or path in self._routers:
                continue
            out, inp = shapes[path]
            name, bias = self._short(path), module.bias is not None
            share = "none" if isinstance(module, Conv1D) else share_of(self.model, path)
            build = self.build
            if path in self._methods:
                build = replace(build, quantizer=Given(self._methods[path]))
            linear: Linear
            if share == "column":
                linear = ColumnParallel(name, (path,), build, inp, (out,), bias=bias)
            elif share == "row":
                linear = RowParallel(name, path, build, inp, out, bias=bias)
            else:
                linear = Linear(name, build, (Part(path, out, 0, out),), inp, bias=bias)
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
        matrices = sum(len(linear.parts) for linear in self.linears)
        merged = f" in {len(self.linears)} matmuls" if matrices > len(self.linears) else ""
        own = f"{matrices} linear layers{merged} and {len(self.norms)} norms of this engine"
        return own + (f"; {' and '.join(kept)} stay the library's" if kept else "")

    def _short(self, path: str) -> str:
        """Return the path as quantizers match it: layers.3.self_attn.q_proj."""
        return re.sub(rf"^{re.escape(self.blocks)}\.", "layers.", path)
