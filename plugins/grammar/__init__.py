"""Built-in grammar compilers."""

from dovetail.plugins import builtin
from dovetail.plugins.grammar.config import LLGuidanceConfig, NoneConfig

COMPONENTS = (
    builtin("grammar", "llguidance", LLGuidanceConfig, "guidance:LLGuidance", api="0.3"),
    builtin("grammar", "none", NoneConfig, "none:NoGrammars", api="0.3"),
)
