"""A component with its validated options. A composition consists of these."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import GetCoreSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from dovetail.core.compose.capabilities import Capabilities, Host
from dovetail.core.compose.component import Component
from dovetail.core.compose.config import Config
from dovetail.core.errors import PluginError

if TYPE_CHECKING:
    from dovetail.core.compose.registry import Package, Registered


@dataclass(frozen=True, slots=True)
class Selected:
    """Selected and validated, not yet built. Also the type of a field that `Part` makes."""

    registered: Registered
    config: Config
    chooser: str = ""
    """Name of the component that chose this one, such as `auto`; "" = it was selected by its name."""

    @property
    def component(self) -> Component:
        return self.registered.component

    @property
    def package(self) -> Package:
        return self.registered.package

    @property
    def name(self) -> str:
        return self.component.name

    def target(self) -> type[Any]:
        """Import the class and check it against the contract of its kind."""
        return self.registered.target()

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Return `Class(config, *args, **kwargs)`. An exception in it becomes a PluginError that names the package."""
        target = self.target()
        with self.registered.blamed("could not be built"):
            try:
                inspect.signature(target).bind(self.config, *args, **kwargs)
            except TypeError as error:
                call = ", ".join(["config", *("..." for _ in args), *(f"{name}=..." for name in kwargs)])
                raise TypeError(f"it is called as {target.__name__}({call}), which does not fit: {error}") from None
            return target(self.config, *args, **kwargs)

    def fault(self, reason: str) -> PluginError:
        """Return the error of a built component that breaks its contract. It names the component and its package."""
        return PluginError(str(self.package), f"{self.component.kind}={self.name}: {reason}")

    def capabilities(self, host: Host) -> Capabilities:
        """Return what the component states for these options on this host; empty without a capabilities function."""
        if self.component.capabilities is None:
            return Capabilities()
        function = self.registered.load(self.component.capabilities)
        with self.registered.blamed(f"cannot state its capabilities, {self.component.capabilities} failed"):
            stated = function(self.config, host)
        if not isinstance(stated, Capabilities):
            raise PluginError(str(self.package), f"{self.component.capabilities} returned {stated!r}, not Capabilities")
        return stated

    def facts(self) -> Any:
        """Return the kind's record of facts, or None if the component declares no function for it."""
        reference = self.component.facts
        if reference is None:
            return None
        function = self.registered.load(reference)
        with self.registered.blamed(f"cannot state its facts, {reference} failed"):
            return function(self.config)

    def to_node(self) -> dict[str, Any]:
        """Return plain values, as in the composed config."""
        return {"name": self.name, **self.config.model_dump(mode="json")}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(
            _select, serialization=core_schema.plain_serializer_function_ser_schema(cls.to_node)
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """The component at a node. It comes from the defaults list, not from the node, so an override cannot change it."""

    kind: str
    name: str


def placed(placement: Placement, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a node in the form that a field of type `Selected` validates."""
    return {"kind": placement.kind, "name": placement.name, "options": options}


NOT_CHOSEN = "not_chosen"
"""Error type for a node without a component in the defaults list."""
_PLACED = {"kind", "name", "options"}


def _select(value: object, info: ValidationInfo) -> Selected:
    if isinstance(value, Selected):
        return value
    registry = (info.context or {}).get("registry")
    if registry is None:
        raise ValueError("a part is chosen by composing, or given as a Selected")
    if not (isinstance(value, dict) and value.keys() == _PLACED):
        raise PydanticCustomError(NOT_CHOSEN, "is not chosen")
    registered = registry.get(value["kind"], value["name"])
    # Strict, from JSON: true is not 1, "3" is not 3, and a JSON list is still a tuple where the config has one. A
    # validation error raised here is joined to the root model's, with its path.
    options = json.dumps(value["options"])
    config = registered.component.config.model_validate_json(options, strict=True, context=info.context)
    return Selected(registered, config)
