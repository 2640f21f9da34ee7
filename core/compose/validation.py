"""One root model for the whole composition, so that every mistake is reported at once, in readable messages."""

from __future__ import annotations

import json
import re
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_core import ErrorDetails

from dovetail.core.compose.config import AppConfig, Config, part_fields
from dovetail.core.compose.engine_config import EngineConfig
from dovetail.core.compose.former import former
from dovetail.core.compose.kinds import KINDS, PRESET
from dovetail.core.compose.nodes import plain_defaults
from dovetail.core.compose.registry import Registered, Registry
from dovetail.core.compose.selected import NOT_CHOSEN, Placement, Selected, placed
from dovetail.core.compose.wording import did_you_mean, in_place, listing, show
from dovetail.core.errors import ConfigError, DovetailDeprecationWarning

Path = tuple[str, ...]
Node = dict[str, Any]


def _warn_of_former_contract(registered: Registered) -> None:
    component = registered.component
    if (known := former(component.api)) is None:
        return
    now = KINDS[component.kind].api
    message = (
        f"package {registered.package}: {component.kind}={component.name} is made for {component.api}; it still runs, "
        f"but {known.change}. Dovetail {known.until} refuses it: write it for {now}"
    )
    warnings.warn(message, DovetailDeprecationWarning, stacklevel=2)


@dataclass(frozen=True, slots=True)
class ComposedConfig:
    """A composed and resolved config before validation."""

    app: str
    nodes: Node
    placements: Mapping[Path, Placement]
    """Node -> the component that the defaults list puts there."""
    broken: Mapping[Placement, str]
    """Unusable choices -> the node at their root. For a preset this is its own node."""
    options: Callable[[str], Sequence[str]]
    """Kind -> everything that can be selected, variants included."""
    touched: Mapping[str, str]
    """Override of a value -> the node at its root."""
    choices: Mapping[str, str]
    """Kind -> the name that selected its part: a component or a variant."""
    faults: tuple[str, ...] = ()
    unsettled: frozenset[str] = frozenset()


def validate(composed: ComposedConfig, registry: Registry) -> dict[str, Any]:
    """Return the validated nodes that the app reads: `engine`, kinds, and its own options under the app's name."""
    return _Validation(composed, registry).run()


class _Validation:
    def __init__(self, composed: ComposedConfig, registry: Registry) -> None:
        self.composed, self.registry = composed, registry
        self.app = registry.get("app", composed.app)
        config = self.app.component.config
        assert issubclass(config, AppConfig)
        self.needs = config.needs
        self.faults = list(composed.faults)

    def run(self) -> dict[str, Any]:
        self._refuse_broken()
        self._find_idle_overrides()
        nodes = self._nodes()
        validated: BaseModel | None = None
        try:
            validated = self._root_model().model_validate_json(
                json.dumps(nodes), strict=True, context={"registry": self.registry}
            )
        except ValidationError as error:
            details = error.errors(include_url=False)
            # A list with an invalid item also counts as too short.
            owners = {e["loc"][:-1] for e in details}
            details = [e for e in details if e["type"] != "too_short" or e["loc"] not in owners]
            self.faults += [self._words(e) for e in details if e["loc"][0] not in self.composed.unsettled]
        faults = list(dict.fromkeys(self.faults))
        if faults:
            one = len(faults) == 1
            raise ConfigError(
                faults[0] if one else f"{len(faults)} mistakes:\n" + "\n".join(f"  - {f}" for f in faults)
            )
        assert validated is not None
        return {name: getattr(validated, name) for name in type(validated).model_fields}

    # Input of the root model.

    def _reads(self, root: str) -> bool:
        return root in self.needs or root in (self.composed.app, "app")

    def _refuse_broken(self) -> None:
        for placement, root in self.composed.broken.items():
            if self._reads(root) or placement.kind == PRESET:
                self.registry.refuse_broken(placement.kind, placement.name)

    def _find_idle_overrides(self) -> None:
        for text, root in self.composed.touched.items():
            if (root in KINDS or root == "engine") and not self._reads(root) and root != "app":
                self.faults.append(f"`{text}` has no effect: app={self.composed.app} does not read `{root}`")

    def _nodes(self) -> Node:
        """Return the app's nodes, and the unknown ones, which the root model refuses."""
        nodes: Node = {}
        for root, node in self.composed.nodes.items():
            known = root in KINDS or root == "engine"
            if root == "app" or (known and not self._reads(root)):
                continue
            many = root in KINDS and KINDS[root].cardinality != "one" and isinstance(node, dict)
            nodes[root] = {n: self._node((root, n), v) for n, v in node.items()} if many else self._node((root,), node)
        for kind in self.needs:
            if kind in KINDS and KINDS[kind].cardinality != "one":
                items = nodes.setdefault(kind, {})
                at_hand = self.registry.options(kind) if KINDS[kind].cardinality == "per_request" else ()
                items.update({name: self._node((kind, name), {}) for name in at_hand if name not in items})
        return nodes

    def _node(self, path: Path, node: Any) -> Any:
        placement = self._placement(path)
        if placement is None or not isinstance(node, dict):
            return node
        registered = self.registry.get(placement.kind, placement.name)
        _warn_of_former_contract(registered)
        options = dict(node)
        if (name := options.pop("name", placement.name)) != placement.name:
            choice = f"{placement.kind}={name}" if len(path) == 1 else f"{placement.kind}@{'.'.join(path)}={name}"
            self.faults.append(f"{'.'.join(path)}.name cannot be set; choose with `{choice}`")
        self._rename(path, registered, options)
        for field, (_, default) in part_fields(registered.component.config).items():
            part = options.get(field, {} if isinstance(default, list) else None)
            if isinstance(default, list) and isinstance(part, dict):
                options[field] = {name: self._node((*path, field, name), item) for name, item in part.items()}
            elif part is not None:
                options[field] = self._node((*path, field), part)
        return placed(placement, options)

    def _placement(self, path: Path) -> Placement | None:
        if path in self.registry.registered and KINDS[path[0]].cardinality == "per_request":
            return Placement(*path)
        return self.composed.placements.get(path)

    def _rename(self, path: Path, registered: Registered, options: Node) -> None:
        for old, new in registered.component.renamed.items():
            if old not in options:
                continue
            value, where = options.pop(old), ".".join(path)
            if options.get(new) != plain_defaults(registered.component.config)[new]:
                self.faults.append(f"{where}.{old} is the former name of {where}.{new}; both are given")
                continue
            options[new] = value
            message = f"package {registered.package}: {where}.{old} is now {where}.{new}"
            warnings.warn(message, DovetailDeprecationWarning, stacklevel=2)

    def _root_model(self) -> type[BaseModel]:
        fields: dict[str, Any] = {self.composed.app: (Selected, Field())}
        for need in self.needs:
            if need == "engine":
                fields[need] = (EngineConfig, Field())
            else:
                fields[need] = (Selected if KINDS[need].cardinality == "one" else dict[str, Selected], Field())
        return create_model("Composition", __config__=ConfigDict(extra="forbid", frozen=True), **fields)

    # Messages for its errors.

    def _words(self, error: ErrorDetails) -> str:
        loc = tuple(str(part) for part in error["loc"])
        path, value = ".".join(loc), error["input"]
        config = self._config_at(loc[:-1])
        if error["type"] == "extra_forbidden":
            return self._unknown_root(loc[0]) if len(loc) == 1 else self._unknown_option(loc, config)
        if error["type"] == "missing":
            if len(loc) == 1:
                there_are = listing(self.composed.options(path))
                return f"{path}: app={self.composed.app} needs one, and none is chosen. Options: {there_are}."
            about = config.model_fields[loc[-1]].description if config and loc[-1] in config.model_fields else None
            return f"{path} is required" + (f": {about}" if about else "")
        if error["type"] == NOT_CHOSEN:
            parts = part_fields(config) if config and issubclass(config, Config) else {}
            if isinstance(value, str) and loc[-1] in parts:
                kind, _ = parts[loc[-1]]
                return f"{path} is a component of the kind {kind}; choose it with `{kind}@{path}={value}`"
            options = self.composed.options(loc[0]) if len(loc) == 2 else ()
            if options and loc[1] not in options:
                return self.registry.no_such(loc[0], loc[1], options)
            how = f"{loc[0]}=[..., {loc[1]}]" if len(loc) == 2 else f"{loc[0]}=<name>"
            return f"{path} is not chosen, so it has no options; choose it with `{how}`"
        message = error["msg"].removeprefix("Input ").removeprefix("Value error, ")
        message = message.replace("valid integer", "whole number").replace("a valid boolean", "true or false")
        if error["type"] in ("too_short", "too_long"):
            message = re.sub(r"^\w+ (should have .*) after validation", r"\1", message)
        if len(loc) > 1 and config is not None and (owner := self._placement(loc)):
            known = self.registry.get(owner.kind, owner.name).component.config.model_fields
            message = in_place(message, owner.kind, path, known)
        hint = ""
        if error["type"] == "literal_error" and isinstance(value, str):
            hint = did_you_mean(value, _literals(config, loc[-1]))
        given = "" if isinstance(value, dict) else f"={show(value)}"
        return f"{path}{given}: {message}.{hint}"

    def _unknown_root(self, root: str) -> str:
        if root in self.registry.options("app"):
            return f"`{root}` has the options of app={root}, and the app is {self.composed.app}"
        if root == "hydra":
            return (
                "`hydra` has no options here: a run makes no folders, does not change directory and sets up no logging"
            )
        nodes = ("app", "engine", "preset", self.composed.app, *KINDS)
        there_are = listing(dict.fromkeys(nodes))
        return f"`{root}` cannot be set.{did_you_mean(root, nodes)} Options: {there_are}."

    def _unknown_option(self, loc: Path, config: type[BaseModel] | None) -> str:
        options: Iterable[str] = config.model_fields if config else ()
        owner = self._placement(loc[:-1])
        whose = f"{owner.kind}={owner.name}" if owner else "it"
        hint = did_you_mean(loc[-1], options)
        if loc[0] != "engine" and loc[-1] in EngineConfig.model_fields:
            hint = f" Did you mean `engine.{loc[-1]}`, which every part reads?"
        elif owner and (others := self._with_option(owner.kind, loc[-1])):
            hint = f" It is an option of {' and '.join(others)}."
        return f"{'.'.join(loc)}: {whose} has no option `{loc[-1]}`.{hint} Options: {listing(options)}."

    def _with_option(self, kind: str, option: str) -> list[str]:
        """Return the components of the kind that have the option, as "kind=name"."""
        components = (r.component for r in self.registry.registered.values())
        return [f"{kind}={c.name}" for c in components if c.kind == kind and option in c.config.model_fields]

    def _config_at(self, path: Path) -> type[BaseModel] | None:
        """Return the model that validates a node, if it can be determined."""
        if placement := self._placement(path):
            return self.registry.get(placement.kind, placement.name).component.config
        if path == ("engine",):
            return EngineConfig
        if len(path) < 2:
            return None
        parent = self._config_at(path[:-1])
        info = parent.model_fields.get(path[-1]) if parent else None
        annotation = info.annotation if info else None
        return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _literals(config: type[BaseModel] | None, field: str) -> list[str]:
    info = config.model_fields.get(field) if config else None
    return [str(arg) for arg in typing.get_args(info.annotation)] if info else []
