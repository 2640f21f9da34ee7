"""Built-in models."""

from dovetail.plugins import builtin
from dovetail.plugins.model.config import LlamaConfig

COMPONENTS = (
    builtin(
        "model",
        "llama",
        LlamaConfig,
        "llama.decoder:Llama",
        api="0.2",
        capabilities="llama.capabilities:capabilities",
        facts="llama.families:spec_of",
    ),
)
