"""Tensor-parallel layers. Each is a callable that owns its tensors and lists the checkpoint tensors it loads."""

from dovetail.core.layers.embedding import LMHead, VocabParallelEmbedding, VocabTable
from dovetail.core.layers.experts import ExpertRouter, Experts, SharedExperts
from dovetail.core.layers.kinds import kind_of, one_of_each
from dovetail.core.layers.kv_scales import KVScales
from dovetail.core.layers.linear import ColumnParallel, Linear, QKVParallel, RowParallel, local_heads
from dovetail.core.layers.norm import LayerNorm, NoNorm, RMSNorm
from dovetail.core.layers.plain import PlainLinear
from dovetail.core.layers.plain_experts import PlainExperts
from dovetail.core.layers.rotary import build_rope
from dovetail.core.layers.run import run_layers
from dovetail.core.layers.sinks import Sinks
from dovetail.core.layers.unstacked import Stack, unstacked, unstacked_headers, without
from dovetail.core.layers.weights import (
    Stored,
    Taker,
    Weight,
    WeightSet,
    check_headers,
    check_tied,
    dummy_weights,
    load_weights,
)
from dovetail.core.layers.wide_norm import WideQKNorm

__all__ = [
    "ColumnParallel",
    "ExpertRouter",
    "Experts",
    "KVScales",
    "LMHead",
    "LayerNorm",
    "Linear",
    "NoNorm",
    "PlainExperts",
    "PlainLinear",
    "QKVParallel",
    "RMSNorm",
    "RowParallel",
    "SharedExperts",
    "Sinks",
    "Stack",
    "Stored",
    "Taker",
    "VocabParallelEmbedding",
    "VocabTable",
    "Weight",
    "WeightSet",
    "WideQKNorm",
    "build_rope",
    "check_headers",
    "check_tied",
    "dummy_weights",
    "kind_of",
    "load_weights",
    "local_heads",
    "one_of_each",
    "run_layers",
    "unstacked",
    "unstacked_headers",
    "without",
]
