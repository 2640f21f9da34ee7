"""Options of the built-in quantizers."""

from __future__ import annotations

from typing import Literal

from dovetail.core.compose import Config


class NoneConfig(Config):
    """No quantization: weights and activations in the model's dtype."""


class Int8Config(Config):
    """W8A8: int8 weights with a scale per output channel, int8 activations with a scale per token, made on the fly."""

    skip: tuple[str, ...] = ()
    """Patterns of layer paths that stay plain, for instance "layers.*.mlp.down". Embedding and logits always do."""


class FP8Config(Config):
    """W8A8 in E4M3, made on the fly; by default with a scale per output channel and per token."""

    scales: Literal["row", "tensor"] = "row"
    """row: of each output channel of a weight and of each token. tensor: of each matrix (a rank's share of it) and of
    all tokens of a step together, those that pad a graph included and each half of a cut step by itself: a token's
    result depends on the others, and its input costs passes of its own. Weights that a checkpoint has in FP8 keep
    theirs."""

    skip: tuple[str, ...] = ()
    """Patterns of layer paths that stay plain, for instance "layers.*.mlp.down". Embedding and logits always do."""
    fast_accum: bool = True
    """Sum large products in the matrix units' own accumulators, which have fewer bits than float32."""
