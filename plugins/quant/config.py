"""Options of the built-in quantizers."""

from __future__ import annotations

from dovetail.core.compose import Config


class NoneConfig(Config):
    """No quantization: weights and activations in the model's dtype."""


class Int8Config(Config):
    """W8A8: int8 weights with a scale per output channel, int8 activations with a scale per token, made on the fly."""

    skip: tuple[str, ...] = ()
    """Patterns of layer paths that stay plain, for instance "layers.*.mlp.down". Embedding and logits always do."""


class FP8Config(Config):
    """W8A8 in E4M3: weights with a scale per output channel, activations with a scale per token, made on the fly."""

    skip: tuple[str, ...] = ()
    """Patterns of layer paths that stay plain, for instance "layers.*.mlp.down". Embedding and logits always do."""
    fast_accum: bool = True
    """Sum large products in the matrix units' own accumulators, which have fewer bits than float32."""
