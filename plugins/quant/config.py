"""Options of the built-in quantizers."""

from __future__ import annotations

from typing import Literal

from dovetail.core.compose import Config


class AutoConfig(Config):
    """The quantizer that reads the checkpoint, according to its config.json; none for plain weights. It gets the
    options that are set here."""

    head: Literal["auto", "plain", "fp8"] = "auto"
    """Option `head` of the chosen quantizer."""
    activations: str = "auto"
    """Option `activations` of the chosen quantizer."""


class NoneConfig(Config):
    """No quantization: weights and activations in the model's dtype."""


class Int8Config(Config):
    """W8A8: int8 weights with a scale per output channel, int8 activations with a dynamic scale per token."""

    skip: tuple[str, ...] = ()
    """Patterns of layer paths that stay plain, for instance "layers.*.mlp.down". Embedding and logits always do."""


class FP8Config(Config):
    """W8A8 in E4M3 with dynamic scales, by default per output channel and per token. On GPUs without FP8
    matmuls, inputs keep 16 bits (W8A16)."""

    activations: Literal["auto", "fp8", "plain"] = "auto"
    """Format of the input of matmuls. fp8: E4M3, which needs compute capability 8.9 (Ada, Hopper and later). plain: the
    model's dtype; weights keep 8 bits and are decoded as they are read. auto: fp8, and plain on older GPUs."""
    scales: Literal["row", "tensor"] = "row"
    """Granularity of scales. row: per output channel of a weight and per token. tensor: per matrix (a rank's shard) and
    over all tokens of a step, graph padding included, or of each half of a split step. With tensor, a token's result
    depends on the others, and quantizing takes extra passes over the input. FP8 weights of a checkpoint keep their
    scales."""

    skip: tuple[str, ...] = ()
    """Patterns of layer paths that stay plain, for instance "layers.*.mlp.down"."""
    head: Literal["auto", "plain", "fp8"] = "auto"
    """Format of the matrix of logits. fp8: quantized like the other layers, also if an embedding is tied to it. plain:
    the model's dtype. auto: as in the checkpoint."""
    fast_accum: bool = True
    """Sum large matmuls in the tensor cores' accumulators, which have fewer bits than float32."""
