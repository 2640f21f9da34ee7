"""The contract suite of an installed component, ready to run. A test module of its package needs two lines:

class TestMine(suite_of("scheduler", "mine")):
    pass
"""

from __future__ import annotations

import importlib
from typing import Any

from dovetail.core.compose import KINDS, Registered, compose, installed
from dovetail.core.errors import ConfigError

__all__ = ["suite_of"]

_UNKNOWN = {
    "adapter": "save",
    "logits": "active_params",
    "reasoning_parser": "render",
    "tool_parser": "render",
}
"""Kind -> what the suite cannot know besides how the component is built."""


def suite_of(kind: str, name: str) -> type[Any]:
    """Return the suite that the component names as its `contract`, else its kind's suite over the class with default
    options. Raises ConfigError if there is no such component, or if the suite needs more than default options."""
    registered = installed().get(kind, name)
    if registered.component.contract is not None:
        return _named(registered, registered.component.contract)
    module, _, suite = KINDS[kind].suite.partition(":")
    base: type[Any] = getattr(importlib.import_module(module), suite)
    if kind in _UNKNOWN:
        raise ConfigError(
            f"{kind}={name}: {suite} needs `{_UNKNOWN[kind]}`: define it in a subclass of {module}.{suite}, and name "
            f"that class in Component(contract=...)"
        )
    return type(suite, (base,), {"__module__": __name__, **_factories(registered)})


def _named(registered: Registered, reference: str) -> type[Any]:
    kind = registered.component.kind
    module, _, suite = KINDS[kind].suite.partition(":")
    named, base = registered.load(reference), getattr(importlib.import_module(module), suite)
    if not (isinstance(named, type) and issubclass(named, base)):
        raise ConfigError(f"{kind}={registered.component.name}: {reference} is not a subclass of {module}.{suite}")
    return named


def _factories(registered: Registered) -> dict[str, Any]:
    """Return the methods that build the component with default options."""
    component = registered.component
    if required := [name for name, field in component.config.model_fields.items() if field.is_required()]:
        raise ConfigError(
            f"{component.kind}={component.name}: {', '.join(required)} is required, so it cannot be built with default "
            f"options: define `make` in a subclass of {KINDS[component.kind].suite}, and name that class in "
            f"Component(contract=...)"
        )
    if component.kind == "app":
        needs = getattr(component.config, "needs", ())
        small = ["engine.device=cpu", "engine.max_len=256", "engine.kv_pages=64"] if "engine" in needs else []
        return {"make": lambda self: compose(small, app=component.name)}

    def make(self: object, *given: Any) -> Any:
        return registered.target()(component.config(), *given)

    if component.kind == "model":
        return {"make": make, "spec": lambda self: registered.target().spec(component.config())}
    return {"make": make}
