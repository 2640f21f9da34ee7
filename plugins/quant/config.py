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
    """row: of each output channel of a weight and of each token. tensor: of each matrix (of a rank's share of it) and of
    all tokens of a step together: what simple hardware takes, less exact, a token's result depends on the others, and
    its input costs passes of its own. Weights that a checkpoint has in FP8 keep their scales."""

    skip: tuple[str, ...] = ()
    """Patterns of layer paths that stay plain, for instance "layers.*.mlp.down". Embedding and logits always do."""
    fast_accum: bool = True
    """Sum large products in the matrix units' own accumulators, which have fewer bits than float32."""
