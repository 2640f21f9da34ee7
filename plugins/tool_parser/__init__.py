"""Built-in tool parsers."""

from dovetail.core.compose import Component
from dovetail.plugins.tool_parser.config import HermesConfig, Llama3Config, MistralConfig, NoneConfig

COMPONENTS = (
    Component(
        kind="tool_parser",
        name="hermes",
        config=HermesConfig,
        target="dovetail.plugins.tool_parser.hermes:HermesParser",
        api="tool_parser/0.1",
    ),
    Component(
        kind="tool_parser",
        name="llama3",
        config=Llama3Config,
        target="dovetail.plugins.tool_parser.llama3:Llama3Parser",
        api="tool_parser/0.1",
    ),
    Component(
        kind="tool_parser",
        name="mistral",
        config=MistralConfig,
        target="dovetail.plugins.tool_parser.mistral:MistralParser",
        api="tool_parser/0.1",
    ),
    Component(
        kind="tool_parser",
        name="none",
        config=NoneConfig,
        target="dovetail.plugins.tool_parser.none:NoToolParser",
        api="tool_parser/0.1",
    ),
)
