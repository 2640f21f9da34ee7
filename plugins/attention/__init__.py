"""Built-in attention backends."""

from dovetail.core.compose import Component
from dovetail.plugins.attention.config import FlashInferConfig, SDPAConfig, TritonConfig

COMPONENTS = (
    Component(
        kind="attention",
        name="sdpa",
        config=SDPAConfig,
        target="dovetail.plugins.attention.sdpa.backend:SDPA",
        api="attention/0.1",
        capabilities="dovetail.plugins.attention.sdpa.capabilities:capabilities",
    ),
    Component(
        kind="attention",
        name="triton",
        config=TritonConfig,
        target="dovetail.plugins.attention.triton.backend:Triton",
        api="attention/0.1",
        capabilities="dovetail.plugins.attention.triton.capabilities:capabilities",
    ),
    Component(
        kind="attention",
        name="flashinfer",
        config=FlashInferConfig,
        target="dovetail.plugins.attention.flashinfer.backend:FlashInfer",
        api="attention/0.1",
        capabilities="dovetail.plugins.attention.flashinfer.capabilities:capabilities",
    ),
)
