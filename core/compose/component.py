"""The record that a plugin registers. It names everything by reference and imports none of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from dovetail.core.compose.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One implementation of one kind, selected by name."""

    kind: str
    """A name in `dovetail.core.compose.kinds.KINDS`."""
    name: str
    """Lower-case letters, digits and underscores; unique within its kind."""
    config: type[Config]
    """Class of the options, in a module that imports nothing heavy: listing and validating components import it."""
    target: str
    """Reference to the class, "package.module:Class", called as `Class(config, ...)`. Imported when it is built."""
    api: str
    """Version of the contract that it implements, a literal such as "scheduler/0.3"."""
    capabilities: str | None = None
    """Reference to a function of `(config, host)` that returns `Capabilities`. Imported for the check of them."""
    facts: str | None = None
    """Reference to a function of `(config)` that returns facts known before anything is built, as the kind's own record
    (for a model: ModelSpec). It must not import torch, so that planning needs none."""
    reads: str | None = None
    """Reference to a function of a checkpoint's config.json, which returns whether the component reads it: for a
    quantizer its quantized weights, for a model its architecture. It must not import torch."""
    stored: str | None = None
    """Reference to a function of `(config.json, prefix of a matrix, headers of its tensors by the rest of their names)`
    that returns the StoredMatrix, or None for a plain one. It must not import torch, so that planning needs none."""
    chooses: str | None = None
    """Reference to a function of `(config, facts of the model, readers)`, which returns the name of another component
    of this kind to use instead. `readers` has the functions that `reads` refer to, by component. The facts are None for
    a model that chooses."""
    contract: str | None = None
    """Reference to the subclass of the kind's contract suite that tests the component. None = the suite itself, which
    builds the class with default options. Imported by app=check and `dovetail.core.testing.suites`; needs the `test`
    extra."""
    renamed: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Former option name -> current name. The former name still works, with a warning that names the package."""
