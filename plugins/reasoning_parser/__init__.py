"""Built-in reasoning parsers."""

from dovetail.plugins import builtin
from dovetail.plugins.reasoning_parser.config import NoneConfig, ThinkConfig

COMPONENTS = (
    builtin("reasoning_parser", "none", NoneConfig, "none:NoReasoningParser"),
    builtin("reasoning_parser", "think", ThinkConfig, "think:ThinkParser"),
)
