"""Components in Hydra's form: a node of plain JSON values, and a defaults list for nested parts."""

from __future__ import annotations

import re
from typing import Any

from pydantic_core import to_jsonable_python

from dovetail.core.compose.component import Component
from dovetail.core.compose.config import Config, part_fields
from dovetail.core.compose.kinds import KINDS

MISSING = "???"


def component_node(component: Component) -> dict[str, Any]:
    """Return the content of config `<kind>/<name>`. An app's is placed at the root, all others under their kind."""
    node = {"name": component.name, **plain_defaults(component.config)}
    at_root = component.kind == "app"
    # Apps and list items are nested one level deeper: an app's options are under its own name, and two items of a
    # list would otherwise merge into one node.
    nested = at_root or KINDS[component.kind].cardinality != "one"
    below = f"{component.name}." if nested else ""
    defaults: list[Any] = [
        {f"/{kind}@{below}{field}": choice} for field, (kind, choice) in part_fields(component.config).items()
    ]
    body = {component.name: node} if nested else node
    return {"defaults": [*defaults, "_self_"], **({"app": component.name} if at_root else {}), **body}


def plain_defaults(config: type[Config]) -> dict[str, Any]:
    parts = part_fields(config)
    defaults = {
        name: MISSING if info.is_required() else info.get_default(call_default_factory=True)
        for name, info in config.model_fields.items()
        if name not in parts
    }
    plain: dict[str, Any] = _escape(to_jsonable_python(defaults))
    return plain


def _escape(value: Any) -> Any:
    """Escape `${x}`, which OmegaConf would resolve as an interpolation."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda m: m[1] * 2 + r"\${", value)
    if isinstance(value, dict):
        return {key: _escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape(item) for item in value]
    return value
