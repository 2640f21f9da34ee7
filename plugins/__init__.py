"""Built-in components, loaded through the same entry-point group as third-party ones."""

from __future__ import annotations

import importlib

from dovetail.core.compose import Component, hookimpl

# Packages in this folder. Each __init__ defines COMPONENTS and imports nothing heavy.
_KINDS = (
    "adapter",
    "app",
    "attention",
    "collective",
    "cost",
    "executor",
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


@hookimpl
def dovetail_components() -> list[Component]:
    return [c for kind in _KINDS for c in importlib.import_module(f"dovetail.plugins.{kind}").COMPONENTS]


@hookimpl
def dovetail_config_dirs() -> list[str]:
    return ["pkg://dovetail.conf"]
