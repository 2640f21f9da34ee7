"""Built-in tool parsers."""

from dovetail.plugins import builtin
from dovetail.plugins.tool_parser.config import HarmonyConfig, HermesConfig, Llama3Config, MistralConfig, NoneConfig

COMPONENTS = (
    builtin("tool_parser", "harmony", HarmonyConfig, "harmony:HarmonyToolParser"),
    builtin("tool_parser", "hermes", HermesConfig, "hermes:HermesParser"),
    builtin("tool_parser", "llama3", Llama3Config, "llama3:Llama3Parser"),
    builtin("tool_parser", "mistral", MistralConfig, "mistral:MistralParser"),
    builtin("tool_parser", "none", NoneConfig, "none:NoToolParser"),
)
