"""Built-in models."""

from dovetail.core.compose import Component
from dovetail.plugins.model.config import LlamaConfig

COMPONENTS = (
    Component(
        kind="model",
        name="llama",
        config=LlamaConfig,
        target="dovetail.plugins.model.llama.decoder:Llama",
        api="model/0.1",
        capabilities="dovetail.plugins.model.llama.capabilities:capabilities",
        facts="dovetail.plugins.model.llama.families:spec_of",
    ),
)
