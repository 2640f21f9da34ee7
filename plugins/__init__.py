"""Built-in components, loaded through the same entry-point group as third-party ones."""

from __future__ import annotations

import importlib

from dovetail.core.compose import Component, Config, hookimpl
from dovetail.core.tuning.packages import BUILTIN

# Packages in this folder. Each __init__ defines COMPONENTS and imports nothing heavy.
_KINDS = (
    "adapter",
    "app",
    "attention",
    "collective",
    "cost",
    "executor",
    "experts",
    "grammar",
    "kv_cache",
    "logits",
    "model",
    "observer",
    "quant",
    "reasoning_parser",
    "router",
    "scheduler",
    "spec_decode",
    "tool_parser",
    "workload",
)


def builtin(
    kind: str,
    name: str,
    config: type[Config],
    target: str,
    *,
    capabilities: str | None = None,
    facts: str | None = None,
    reads: str | None = None,
    stored: str | None = None,
    chooses: str | None = None,
    api: str = "0.1",
) -> Component:
    """Describe a component of this package. References are relative to the package of its kind."""
    package = f"dovetail.plugins.{kind}."
    return Component(
        kind=kind,
        name=name,
        config=config,
        target=package + target,
        api=f"{kind}/{api}",
        capabilities=capabilities and package + capabilities,
        facts=facts and package + facts,
        reads=reads and package + reads,
        stored=stored and package + stored,
        chooses=chooses and package + chooses,
    )


@hookimpl
def dovetail_components() -> list[Component]:
    return [c for kind in _KINDS for c in importlib.import_module(f"dovetail.plugins.{kind}").COMPONENTS]


@hookimpl
def dovetail_config_dirs() -> list[str]:
    return ["pkg://dovetail.conf"]


@hookimpl
def dovetail_tuning_tables() -> list[str]:
    return [*BUILTIN]


@hookimpl
def dovetail_checkpoint_readers() -> list[str]:
    return ["dovetail.core.checkpoint.folder:FolderCheckpoint", "dovetail.core.checkpoint.gguf:GGUFCheckpoint"]
