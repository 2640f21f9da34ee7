"""What a plugin hands over: a record that says where everything is and imports none of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from dovetail.core.compose.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One implementation of one kind, picked by name."""

    kind: str
    """A name in `dovetail.core.compose.kinds.KINDS`."""
    name: str
    """Lower case letters, digits and underscores; unique within its kind."""
    config: type[Config]
    """The options. Keep the class in a module that imports nothing heavy: listing and validating import it."""
    target: str
    """Where the class is, "package.module:Class"; imported when the component is built: `Class(config, ...)`."""
    api: str
    """The version of the contract it was written for, a literal such as "scheduler/0.1"."""
    capabilities: str | None = None
    """Where a function of `(config, host)` is that returns `Capabilities`; imported when they are checked."""
    facts: str | None = None
    """ "package.module:function" of `(config)`: what is known before anything is built, as the kind's own record (a
    model: ModelSpec). It imports no torch, so that planning needs none."""
    renamed: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Former option -> its name today. The former one still works, with a warning that names the package."""
