"""Number of weights of a decoder, from its shapes. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.core.interfaces import ModelSpec, Parameters

if TYPE_CHECKING:
    from dovetail.plugins.model.llama.family import Layout


def count_parameters(spec: ModelSpec, layout: Layout) -> Parameters:
    dense_layers = spec.layers if spec.moe is None else min(spec.moe.dense_layers, spec.layers)
    sparse_layers = spec.layers - dense_layers
    matrices = len(layout.names.up) + 1
    mlp = dense_layers * matrices * spec.hidden * spec.intermediate
    attention, attention_rest = _attention(spec, layout)
    norm = spec.hidden * (2 if layout.norm == "layer" else 1)
    mlp_biases = layout.mlp_bias * (len(layout.names.up) * spec.intermediate + spec.hidden)
    norms = len(layout.block.norms + layout.block.after) * norm
    rest = spec.layers * (norms + attention_rest) + dense_layers * mlp_biases + norm
    rest += spec.vocab * (layout.head_bias and spec.head)
    experts = active = 0
    if spec.moe is not None:
        expert = matrices * spec.hidden * spec.moe.intermediate
        experts, active = (sparse_layers * n * expert for n in (spec.moe.experts, spec.moe.active))
        mlp += sparse_layers * spec.moe.shared * expert
        assert layout.experts is not None
        biases = layout.experts.bias * (1 + (matrices - 1) * spec.moe.intermediate + spec.hidden)
        selection = layout.experts.names.selection_bias is not None
        rest += sparse_layers * spec.moe.experts * (spec.hidden + selection + biases)
    return Parameters(
        embedding=spec.vocab * spec.hidden,
        head=0 if spec.tied or not spec.head else spec.vocab * spec.hidden,
        attention=spec.layers * attention,
        mlp=mlp,
        experts=experts,
        active_experts=active,
        rest=rest,
    )


def mtp_spec(spec: ModelSpec, layout: Layout) -> ModelSpec:
    """Return a layer for multi-token prediction as a model of one layer, which always has experts if the model has
    some. Embedding and matrix of logits are the model's."""
    moe = None if spec.moe is None else replace(spec.moe, dense_layers=0)
    layer = replace(spec, layers=1, windows=(), moe=moe, parameters=None)
    p = count_parameters(layer, layout)
    own = replace(p, embedding=0, head=0, mlp=p.mlp + 2 * spec.hidden**2, rest=p.rest + 2 * spec.hidden)
    return replace(layer, parameters=own)


def _attention(spec: ModelSpec, layout: Layout) -> tuple[int, int]:
    """Return the weights of one layer's attention: (in matrices, in norms and biases)."""
    if spec.mla is not None:
        mla = spec.mla
        queries = spec.heads * (mla.nope_dim + mla.rope_dim)
        q = spec.hidden * mla.q_rank + mla.q_rank * queries if mla.q_rank else spec.hidden * queries
        kv = spec.hidden * (mla.kv_rank + mla.rope_dim) + mla.kv_rank * spec.heads * (mla.nope_dim + mla.v_dim)
        return q + kv + spec.heads * mla.v_dim * spec.hidden, mla.q_rank + mla.kv_rank
    inner, qkv = spec.heads * spec.head_dim, (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    biases = layout.qkv_bias * qkv + layout.o_bias * spec.hidden
    return spec.hidden * (qkv + inner), biases + layout.qk_norm * 2 * spec.head_dim + layout.sinks * spec.heads
