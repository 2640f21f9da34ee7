"""Dovetail: an LLM inference engine in which every part can be swapped.

The names below are the public API. Each is imported on first use, so that `import dovetail` stays light.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dovetail.core.compose import (
        ENGINE_NODES,
        AppConfig,
        Capabilities,
        Component,
        Composition,
        Config,
        EngineConfig,
        Host,
        Part,
        Parts,
        Requires,
        Selected,
        compose,
        hookimpl,
    )
    from dovetail.core.engine.policy import PolicyScheduler
    from dovetail.core.errors import (
        CapabilityError,
        CapacityError,
        ConfigError,
        DovetailDeprecationWarning,
        DovetailError,
        PluginError,
        RequestError,
    )
    from dovetail.core.frontend.llm import LLM
    from dovetail.core.frontend.outputs import Completion, Delta, Generation
    from dovetail.core.interfaces import Grammar, SamplingParams
    from dovetail.core.memory.eviction import EvictionPolicy

if not (Path(__file__).parent / "core").is_dir():
    raise ImportError(
        "src/dovetail/core is a text file and not a symbolic link (git on Windows clones without symlinks by default): "
        "run `git config core.symlinks true`, then `git checkout -- src/dovetail`"
    )

__version__ = "0.1.0"

_MODULES = {
    "dovetail.core.compose": (
        "ENGINE_NODES",
        "AppConfig",
        "Capabilities",
        "Component",
        "Composition",
        "Config",
        "EngineConfig",
        "Host",
        "Part",
        "Parts",
        "Requires",
        "Selected",
        "compose",
        "hookimpl",
    ),
    "dovetail.core.frontend.llm": ("LLM",),
    "dovetail.core.frontend.outputs": ("Completion", "Delta", "Generation"),
    "dovetail.core.engine.policy": ("PolicyScheduler",),
    "dovetail.core.interfaces": ("Grammar", "SamplingParams"),
    "dovetail.core.memory.eviction": ("EvictionPolicy",),
    "dovetail.core.errors": (
        "CapabilityError",
        "CapacityError",
        "ConfigError",
        "DovetailDeprecationWarning",
        "DovetailError",
        "PluginError",
        "RequestError",
    ),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "ENGINE_NODES",
    "LLM",
    "AppConfig",
    "Capabilities",
    "CapabilityError",
    "CapacityError",
    "Completion",
    "Component",
    "Composition",
    "Config",
    "ConfigError",
    "Delta",
    "DovetailDeprecationWarning",
    "DovetailError",
    "EngineConfig",
    "EvictionPolicy",
    "Generation",
    "Grammar",
    "Host",
    "Part",
    "Parts",
    "PluginError",
    "PolicyScheduler",
    "RequestError",
    "Requires",
    "SamplingParams",
    "Selected",
    "__version__",
    "compose",
    "hookimpl",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dovetail' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
