"""Built-in drafters."""

from dovetail.core.compose import Component
from dovetail.plugins.spec_decode.config import NgramConfig, NoneConfig

COMPONENTS = (
    Component(
        kind="spec_decode",
        name="none",
        config=NoneConfig,
        target="dovetail.plugins.spec_decode.none:NoDrafter",
        api="spec_decode/0.1",
        capabilities="dovetail.plugins.spec_decode.capabilities:none",
    ),
    Component(
        kind="spec_decode",
        name="ngram",
        config=NgramConfig,
        target="dovetail.plugins.spec_decode.ngram:NgramDrafter",
        api="spec_decode/0.1",
        capabilities="dovetail.plugins.spec_decode.capabilities:ngram",
    ),
)
