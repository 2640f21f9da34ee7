"""Built-in reasoning parsers."""

from dovetail.plugins import builtin
from dovetail.plugins.reasoning_parser.config import HarmonyConfig, NoneConfig, ThinkConfig

COMPONENTS = (
    builtin("reasoning_parser", "harmony", HarmonyConfig, "harmony:HarmonyReasoningParser"),
    builtin("reasoning_parser", "none", NoneConfig, "none:NoReasoningParser"),
    builtin("reasoning_parser", "think", ThinkConfig, "think:ThinkParser"),
)
