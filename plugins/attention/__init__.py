"""Built-in attention backends."""

from dovetail.plugins import builtin
from dovetail.plugins.attention.config import FlashInferConfig, SDPAConfig, TritonConfig

COMPONENTS = tuple(
    builtin(
        "attention",
        name,
        config,
        f"{name}.backend:{target}",
        capabilities=f"{name}.capabilities:capabilities",
        api="0.4",
    )
    for name, config, target in (
        ("sdpa", SDPAConfig, "SDPA"),
        ("triton", TritonConfig, "Triton"),
        ("flashinfer", FlashInferConfig, "FlashInfer"),
    )
)
