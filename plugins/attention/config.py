"""Options of the built-in attention backends."""

from dovetail.core.compose import Config


class SDPAConfig(Config):
    """torch's scaled_dot_product_attention over gathered pages: the reference, on any device."""


class TritonConfig(Config):
    """Paged attention kernels of our own, for CUDA: grouped heads, windows, tree masks, FP8 pages."""
