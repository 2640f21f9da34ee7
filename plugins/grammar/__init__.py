"""Built-in grammar compilers."""

from dovetail.core.compose import Component
from dovetail.plugins.grammar.config import LLGuidanceConfig, NoneConfig

COMPONENTS = (
    Component(
        kind="grammar",
        name="llguidance",
        config=LLGuidanceConfig,
        target="dovetail.plugins.grammar.guidance:LLGuidance",
        api="grammar/0.1",
    ),
    Component(
        kind="grammar",
        name="none",
        config=NoneConfig,
        target="dovetail.plugins.grammar.none:NoGrammars",
        api="grammar/0.1",
    ),
)
