"""Composition: find components, select among them and validate the result. Imports no torch."""

from dovetail.core.compose.capabilities import Capabilities, Host, Requires
from dovetail.core.compose.component import Component
from dovetail.core.compose.composer import compose
from dovetail.core.compose.composition import Composition
from dovetail.core.compose.config import AppConfig, Config, Part, Parts
from dovetail.core.compose.discovery import discover, installed
from dovetail.core.compose.engine_config import EngineConfig
from dovetail.core.compose.hookspecs import hookimpl
from dovetail.core.compose.kinds import ENGINE_NODES, KINDS, Kind
from dovetail.core.compose.registry import Package, Problem, Registered, Registry
from dovetail.core.compose.selected import Selected

__all__ = [
    "ENGINE_NODES",
    "KINDS",
    "AppConfig",
    "Capabilities",
    "Component",
    "Composition",
    "Config",
    "EngineConfig",
    "Host",
    "Kind",
    "Package",
    "Part",
    "Parts",
    "Problem",
    "Registered",
    "Registry",
    "Requires",
    "Selected",
    "compose",
    "discover",
    "hookimpl",
    "installed",
]
