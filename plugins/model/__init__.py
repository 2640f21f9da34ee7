"""Built-in models."""

from dovetail.plugins import builtin
from dovetail.plugins.model.config import AutoConfig, LlamaConfig, TransformersConfig

COMPONENTS = (
    builtin("model", "auto", AutoConfig, "transformers.decoder:TransformersDecoder", chooses="auto:choose", api="0.4"),
    builtin(
        "model",
        "llama",
        LlamaConfig,
        "llama.decoder:Llama",
        api="0.4",
        capabilities="llama.capabilities:capabilities",
        facts="llama.families:spec_of",
        reads="llama.families:runs",
    ),
    builtin(
        "model",
        "transformers",
        TransformersConfig,
        "transformers.decoder:TransformersDecoder",
        api="0.4",
        capabilities="transformers.capabilities:capabilities",
        facts="transformers.spec:spec_of",
    ),
)
