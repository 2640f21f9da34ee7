"""Constraints on the output in a request, converted for SamplingParams.grammar."""

from __future__ import annotations

from typing import Any

from dovetail.plugins.app.serve.errors import FieldError
from dovetail.plugins.app.serve.schemas import Common, Penalised, ResponsesRequest


def grammar_of(body: Common) -> dict[str, Any] | None:
    """Return {"kind": ..., "value": ...}, or None for free text."""
    found: list[tuple[str, dict[str, Any]]] = []
    if body.regex is not None:
        found.append(("regex", {"kind": "regex", "value": body.regex}))
    if body.choice is not None:
        found.append(("choice", {"kind": "choice", "value": tuple(body.choice)}))
    if body.grammar is not None:
        found.append(("grammar", {"kind": "lark", "value": body.grammar}))
    if isinstance(body, Penalised) and (wanted := body.response_format) is not None:
        schema = wanted.json_schema.schema_ if wanted.json_schema is not None else None
        found += _json("response_format", wanted.type, schema)
    if isinstance(body, ResponsesRequest) and body.text is not None and (form := body.text.format) is not None:
        found += _json("text", form.type, form.schema_)
    if not found:
        return None
    if len(found) > 1:
        raise FieldError(f"{' and '.join(name for name, _ in found)}: give only one of them", found[1][0])
    return found[0][1]


def _json(param: str, kind: str, schema: dict[str, Any] | None) -> list[tuple[str, dict[str, Any]]]:
    if kind == "text":
        return []
    if kind == "json_object":
        return [(param, {"kind": "json_object"})]
    if schema is None:
        raise FieldError(f"{param}: type json_schema needs a schema", param)
    return [(param, {"kind": "json_schema", "value": schema})]
