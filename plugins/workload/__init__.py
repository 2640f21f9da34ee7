"""Built-in workloads."""

from dovetail.plugins import builtin
from dovetail.plugins.workload.config import (
    ChatsConfig,
    FixedConfig,
    PoissonConfig,
    RecordingConfig,
    SharedPrefixConfig,
    ShareGPTConfig,
    TextConfig,
    TraceConfig,
)

COMPONENTS = (
    builtin("workload", "chats", ChatsConfig, "chats:Chats"),
    builtin("workload", "fixed", FixedConfig, "synthetic:Fixed"),
    builtin("workload", "poisson", PoissonConfig, "synthetic:Poisson"),
    builtin("workload", "recording", RecordingConfig, "recorded:Recorded"),
    builtin("workload", "shared_prefix", SharedPrefixConfig, "synthetic:SharedPrefix"),
    builtin("workload", "sharegpt", ShareGPTConfig, "files:ShareGPT"),
    builtin("workload", "text", TextConfig, "text:Text"),
    builtin("workload", "trace", TraceConfig, "files:Trace"),
)
