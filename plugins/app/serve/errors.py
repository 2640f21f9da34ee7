"""Error responses in OpenAI's format, and the HTTP status of each exception."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from dovetail.core.errors import EngineDown, RequestError, shown
from dovetail.plugins.app.serve.schemas import ChatRequest, ResponsesRequest

log = logging.getLogger(__name__)

_LONGEST_PATH = 8
"""Maximum number of parts in a field's path; a body can be nested hundreds of levels deep."""
_NAMED = re.compile("(stop|stop_token_ids|logit_bias|prediction|extra|min_tokens|max_tokens)(?:: |=)")
"""Begin of a message of the engine that is about a field which has the same name in requests."""
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}


class ServerError(Exception):
    """Error response whose cause is not the form of the request."""

    def __init__(self, status: int, message: str, *, code: str | None = None, retry_after: int | None = None) -> None:
        self.status, self.code, self.retry_after = status, code, retry_after
        super().__init__(message)


class FieldError(RequestError):
    """Refusal of a request because of one of its fields."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        self.param, self.code = param, code
        super().__init__(message, status=status)


def body_of(error: Exception) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Return status, body and headers. An unexpected exception is a 500 that does not reveal its cause."""
    if isinstance(error, EngineDown):
        # Proxies send a 503 to another server, so it is only for requests that have not reached an engine.
        error = ServerError(500 if error.ran else 503, str(error), code="engine_unavailable", retry_after=1)
    elif not isinstance(error, ServerError | RequestError):
        error = ServerError(500, "the server failed on this request; see its log for the cause")
    status, retry_after = error.status, getattr(error, "retry_after", None)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    headers = {"retry-after": str(retry_after)} if retry_after is not None else {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    param = getattr(error, "param", None)
    if param is None and status < 500 and (named := _NAMED.match(str(error))):
        param = named[1]
    field = {"param": param, "code": getattr(error, "code", None)}
    return status, {"error": {"message": str(error), "type": kind, **field}}, headers


def body_bytes(error: Exception) -> bytes:
    return msgspec.json.encode(body_of(error)[1])


def respond(error: Exception) -> Response:
    status, _, headers = body_of(error)
    return Response(body_bytes(error), status, headers, media_type="application/json")


def install(app: FastAPI) -> None:
    async def other(request: Request, error: Exception) -> Response:
        return respond(error)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return respond(_field_error(error))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        detail = _unreadable(request, error.__cause__) or f"{request.method} {request.url.path}: {error.detail}"
        response = respond(FieldError(detail, status=error.status_code))
        response.headers.update(error.headers or {})
        return response

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    for kind in (RequestError, ServerError, EngineDown, Exception):
        app.add_exception_handler(kind, other)


def _place(error: Any, body: Any) -> list[str | int]:
    """Return the path of a mistake within the body: its `loc` without the names that pydantic inserts for the
    alternatives of a union."""
    place: list[str | int] = []
    for part in error["loc"][1:]:
        if isinstance(body, dict) and part in body or isinstance(body, list) and isinstance(part, int):
            body = body[part]
            place.append(part)
    if error["type"] == "missing":
        place.append(error["loc"][-1])
    return place


def _most_specific(errors: Sequence[Any], body: Any) -> tuple[list[str | int], str]:
    """Return path and message of the first mistake. For a union, that of the alternative that accepts most of the
    value; of several, the different messages."""
    first = errors[0]
    place = _place(first, body)
    if len(place) == len(first["loc"]) - 1:
        return place, first["msg"]
    others = [(_place(one, body), one["msg"]) for one in errors]
    others = [(where, message) for where, message in others if where[:1] == place[:1]]
    best = max((where for where, _ in others), key=lambda where: (len(where), [p for p in where if isinstance(p, int)]))
    return best, ", or: ".join(dict.fromkeys(message for where, message in others if where == best))


def _unreadable(request: Request, cause: BaseException | None) -> str:
    """Return why a body cannot be parsed; empty = unknown. FastAPI reports it as the cause of an HTTPException."""
    encoding = request.headers.get("content-encoding", "identity")
    if isinstance(cause, UnicodeError) and encoding != "identity":
        return f"the body has content-encoding {encoding[:40]!r}: this server reads only bodies that are not compressed"
    if isinstance(cause, UnicodeError):
        return "the body is not valid UTF-8"
    return "the body is nested too deeply" if isinstance(cause, RecursionError) else ""


def _meant(field: str) -> str:
    """Return what an unknown field of the body itself may be meant as."""
    for path, request in (("chat/completions", ChatRequest), ("responses", ResponsesRequest)):
        if field in request.model_fields:
            return f"; it is a field of /v1/{path}"
    return f'; a parameter of a logits processor is given as "extra": {{"{field}": ...}}'


def _field_error(error: RequestValidationError) -> FieldError:
    """Return the first mistake, by field. The value may be a prompt, so it is not repeated."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return FieldError(f"the body is not JSON: {first['ctx']['error']} at character {first['loc'][-1]}")
    if first["type"] == "model_attributes_type" and first["loc"] == ("body",):
        return FieldError("the body is not a JSON object or lacks the header `content-type: application/json`")
    place, message = _most_specific(error.errors(), error.body)
    where = [shown(str(part))[1:-1] for part in place]
    path = ".".join(where[:_LONGEST_PATH] + ["..."] * (len(where) > _LONGEST_PATH)) or None
    # Pydantic puts this before the words of our own checks.
    reason = message.removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        reason = "there is no such field"
        if len(where) == 1:
            reason += _meant(where[0])
    return FieldError(f"{path or 'body'}: {reason}", where[0] if where else None)
