"""Fused operations between matmuls. Each is one function with a torch reference and a Triton kernel. CPU tensors take
the reference, CUDA tensors the kernel. Start-up notes list operations that run unfused."""

from dovetail.core.ops.activations import gelu
from dovetail.core.ops.bitmask import apply_bitmask
from dovetail.core.ops.decoded_matmul import decoded_matmul
from dovetail.core.ops.experts import ExpertWeights, gated_experts
from dovetail.core.ops.formats import encode
from dovetail.core.ops.gated import gelu_and_mul, silu_and_mul
from dovetail.core.ops.kv_write import rope_kv_write
from dovetail.core.ops.layernorm import layer_norm
from dovetail.core.ops.matmul import block_scaled_matmul, matmul, scaled_matmul, unscaled_matmul
from dovetail.core.ops.norm import rms_norm
from dovetail.core.ops.packed_experts import PackedExperts, packed_gated_experts
from dovetail.core.ops.routing import route, router_logits

__all__ = [
    "ExpertWeights",
    "PackedExperts",
    "apply_bitmask",
    "block_scaled_matmul",
    "decoded_matmul",
    "encode",
    "gated_experts",
    "gelu",
    "gelu_and_mul",
    "layer_norm",
    "matmul",
    "packed_gated_experts",
    "rms_norm",
    "rope_kv_write",
    "route",
    "router_logits",
    "scaled_matmul",
    "silu_and_mul",
    "unscaled_matmul",
]
