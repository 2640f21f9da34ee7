"""The layer for multi-token prediction of DeepSeek V3 (2024) and GLM-4.5: a decoder layer over the pair of a token's
embedding and the hidden state before it. It follows the last layer in the checkpoint, which also has copies of
embedding and head there; those are the model's.

Shapes: T tokens, C hidden channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from dovetail.core.checkpoint import open_checkpoint
from dovetail.core.interfaces import (
    PLAIN,
    BuildContext,
    Checkpoint,
    ForwardContext,
    Hidden,
    KVGroup,
    Layers,
    ModelSpec,
    MTPLayer,
)
from dovetail.core.layers import (
    Linear,
    PlainLinear,
    RMSNorm,
    Taker,
    check_headers,
    dummy_weights,
    load_weights,
    run_layers,
    unstacked,
    unstacked_headers,
    without,
)
from dovetail.core.layers.linear import Part
from dovetail.core.layers.plain import Given
from dovetail.core.ops import encode
from dovetail.plugins.model.llama.block import Block
from dovetail.plugins.model.llama.experts import SparseMLP, stacks_of
from dovetail.plugins.model.llama.family import Layout

COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""Tensors of the layer that are copies of the model's."""


def _is_plain(spec: ModelSpec, name: str) -> bool:
    """Whether a quantized checkpoint has this matrix in 16 or 32 bits, though its config.json does not say so, as those
    of DeepSeek-V3 and R1 have `eh_proj`."""
    hf, path = spec.hf, spec.checkpoint
    if path is None or hf is None or not hf.get("quantization_config"):
        return False
    header = open_checkpoint(path).tensors().get(f"{name}.weight")
    return header is not None and header.dtype in ("BF16", "F16", "F32")


class LlamaMTPLayer(MTPLayer):
    def __init__(
        self,
        build: BuildContext,
        target: ModelSpec,
        layout: Layout,
        index: int,
        groups: tuple[KVGroup, ...],
        block: Block,
    ) -> None:
        """`target`: the whole model. `index`: number of the layer in the checkpoint. `block`: its decoder layer,
        without weights."""
        super().__init__(build)
        hidden, self._prefix = build.spec.hidden, layout.names.layer.format(index)
        self._layout, self._groups, self.block = layout, groups, block
        self.embed_norm, self.state_norm, self.norm = (
            RMSNorm(f"{self._prefix}.{name}", build, hidden, layout.eps, layout.norm_offset)
            for name in ("enorm", "hnorm", "shared_head.norm")
        )
        part = Part(f"{self._prefix}.eh_proj", hidden, 0, hidden)
        if _is_plain(target, part.name):
            build = replace(build, quantizer=Given(PlainLinear()))
        self.pair = Linear(f"layers.{index}.eh_proj", build, (part,), 2 * hidden)

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        return self._groups

    def check_checkpoint(self, checkpoint: Checkpoint) -> None:
        headers = self._own(checkpoint.tensors().items())
        if (experts := self._layout.experts) is not None:
            headers = unstacked_headers(headers, stacks_of(experts.names), experts.rule.experts)
            headers = without(headers, self._elsewhere)
        check_headers(self._weights(), dict(headers), checkpoint, self._ignored)

    def load(self, weights: Iterable[tuple[str, Callable[[], Any]]]) -> None:
        weights = self._own(weights)
        if (experts := self._layout.experts) is not None:
            weights = unstacked(weights, stacks_of(experts.names), experts.rule.experts)
            weights = without(weights, self._elsewhere)
        load_weights(self._weights(), weights, self._ignored)
        for linear in self._linears():
            linear.finish()
        if isinstance(self.block.mlp, SparseMLP):
            self.block.mlp.finish()

    def init_dummy(self, seed: int) -> None:
        self.load(dummy_weights(self._weights(), seed, self.build.dtype, self.build.device))

    def forward(self, embeds_TC: torch.Tensor, states_TC: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        embeds, states = (
            norm(x_TC)[0][PLAIN].values for norm, x_TC in ((self.embed_norm, embeds_TC), (self.state_norm, states_TC))
        )
        pair_TC = self.pair(encode(torch.cat((embeds, states), -1), self.pair.inputs))
        return run_layers(self._layers(pair_TC, ctx)).states

    def _layers(self, pair_TC: torch.Tensor, ctx: ForwardContext) -> Layers:
        x, residual = yield from self.block(pair_TC, None, ctx)
        # As the model's last norm precedes the states that this layer reads, its own precedes those that it returns:
        # the published layers were trained on normed states.
        normed, _ = yield lambda: self.build.collective.boundary(x, residual, self.norm, (PLAIN,))
        return Hidden(normed[PLAIN].values, {})

    @property
    def _ignored(self) -> tuple[str, ...]:
        """Ends of names of the layer's tensors that have no use."""
        return (*self._layout.ignored, *COPIES)

    @property
    def _elsewhere(self) -> frozenset[str]:
        """Prefixes of the matrices of experts that other ranks load."""
        mlp = self.block.mlp
        return mlp.experts.elsewhere if isinstance(mlp, SparseMLP) else frozenset()

    def _own(self, tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Select the layer's tensors among those of the checkpoint."""
        return ((name, tensor) for name, tensor in tensors if name.startswith(f"{self._prefix}."))

    def _linears(self) -> Iterator[Linear]:
        yield from (self.pair, *self.block.attention.linears, *self.block.mlp.linears)

    def _weights(self) -> Iterator[Taker]:
        block = self.block
        norms = (self.embed_norm, self.state_norm, self.norm, *block.norms)
        sparse = (block.mlp,) if isinstance(block.mlp, SparseMLP) else ()
        for layer in (*norms, block.attention, *self._linears(), *sparse):
            yield from layer.weights()
