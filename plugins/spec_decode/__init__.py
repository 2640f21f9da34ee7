"""Built-in drafters."""

from dovetail.plugins import builtin
from dovetail.plugins.spec_decode.config import NgramConfig, NoneConfig

COMPONENTS = (
    builtin("spec_decode", "none", NoneConfig, "none:NoDrafter", capabilities="capabilities:none", api="0.2"),
    builtin("spec_decode", "ngram", NgramConfig, "ngram:NgramDrafter", capabilities="capabilities:ngram", api="0.2"),
)
