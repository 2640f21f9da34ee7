"""Built-in reasoning parsers."""

from dovetail.core.compose import Component
from dovetail.plugins.reasoning_parser.config import NoneConfig, ThinkConfig

COMPONENTS = (
    Component(
        kind="reasoning_parser",
        name="none",
        config=NoneConfig,
        target="dovetail.plugins.reasoning_parser.none:NoReasoningParser",
        api="reasoning_parser/0.1",
    ),
    Component(
        kind="reasoning_parser",
        name="think",
        config=ThinkConfig,
        target="dovetail.plugins.reasoning_parser.think:ThinkParser",
        api="reasoning_parser/0.1",
    ),
)
