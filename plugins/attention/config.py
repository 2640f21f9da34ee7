"""Options of the built-in attention backends."""

from pydantic import Field

from dovetail.core.compose import Config


class SDPAConfig(Config):
    """torch's scaled_dot_product_attention over gathered pages. The reference backend; runs on any device."""


class TritonConfig(Config):
    """Dovetail's paged attention kernels in Triton, for CUDA: grouped heads, windows, sinks, caps, draft trees, FP8."""

    gluon: bool = True
    """Whether Hopper GPUs use the kernels in Gluon (experimental in Triton) for prompts, for decode rows and for
    compressed latents. If false, the kernels for all GPUs run."""


class FlashInferConfig(Config):
    """FlashInfer's paged kernels (the extra `flashinfer`), for CUDA: grouped heads, windows, FP8 pages."""

    workspace_mib: int = Field(256, ge=16)
    """Device memory in MiB for partial results of split rows. More is allocated if the model's heads may need it."""
