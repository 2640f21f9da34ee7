"""Options of the built-in attention backends."""

from pydantic import Field

from dovetail.core.compose import Config


class SDPAConfig(Config):
    """torch's scaled_dot_product_attention over gathered pages: the reference, on any device."""


class TritonConfig(Config):
    """Paged attention kernels of our own, for CUDA: grouped heads, windows, tree masks, FP8 pages."""

    gluon: bool = True
    """On Hopper, prompts and rows of one token by kernels in Gluon, which Triton calls experimental: of prompts with a
    warp of its own for fetching, of single tokens with keys on their way first. False: by the kernel for all GPUs."""


class FlashInferConfig(Config):
    """FlashInfer's paged kernels (the extra `flashinfer`), for CUDA: grouped heads, windows, FP8 pages."""

    workspace_mib: int = Field(256, ge=16)
    """MiB on the device for partial results of rows that are split; more where a model's heads may need more."""
