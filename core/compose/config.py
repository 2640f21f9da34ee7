"""Base class of every component's config, and fields that hold another component."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field


class Config(BaseModel):
    """Options of one component: frozen, no unknown keys, a docstring with the unit under each field.

    `name` is reserved: in the composed config it names the component that a node configures.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class AppConfig(Config):
    """Options of an app, which also declares what the app reads. No other node is validated or built."""

    needs: ClassVar[tuple[str, ...]] = ()
    """Nodes that the app reads: "engine" and kinds."""
    takes_prompts: ClassVar[bool] = False
    """Whether words after `--` on the command line are passed to the app."""


_PART, _PARTS = "dovetail_part", "dovetail_parts"


def Part(kind: str, *, default: str) -> Any:
    """Return a field that holds one component of `kind`; annotate it with `Selected`.

    It becomes a separate config group: `model@spec_decode.model=tiny` selects, `spec_decode.model.x=1` sets an option.
    """
    return Field(json_schema_extra={_PART: kind, "default": default})


def Parts(kind: str, *, default: Sequence[str] = ()) -> Any:
    """Return a field that holds several components of a list kind by name; annotate it with `dict[str, Selected]`."""
    return Field(json_schema_extra={_PARTS: kind, "default": list(default)})


def part_fields(config: type[Config]) -> dict[str, tuple[str, str | list[str]]]:
    """Nested parts of a config class: field name -> (kind, default choice or list of choices)."""
    found: dict[str, tuple[str, str | list[str]]] = {}
    for name, info in config.model_fields.items():
        marks: dict[str, Any] = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
        kind = marks.get(_PART) or marks.get(_PARTS)
        if kind is not None:
            found[name] = (kind, marks["default"])
    return found
