"""ASGI application: endpoints, error handlers and limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

import dovetail
from dovetail.plugins.app.serve import chat, completions, embeddings, errors, meta, responses
from dovetail.plugins.app.serve.keys import Keys
from dovetail.plugins.app.serve.service import Service
from dovetail.plugins.app.serve.transport import CLIENT_DISCONNECTED, ClientDisconnected, Gate

_STATIC = Path(__file__).parent / "static"
_POLICY = "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'"
"""Content-Security-Policy of the page: resources of this server only, no inline scripts."""
_STATUSES = {
    400: "The request is invalid; the message gives the reason.",
    401: "No valid API key.",
    403: "The header Host has a name that is not in serve.allowed_hosts.",
    404: "No such model or endpoint.",
    408: "The body took too long to arrive.",
    413: "The body is too long.",
    415: "The body is compressed.",
    429: "The queue is full: try again after Retry-After seconds.",
    500: "Internal server error, or the engine died while it had the request.",
    503: "No engine is available yet or any more, or the server is stopping: nothing has run.",
    504: "The request took longer than its time limit.",
}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


def build(service: Service, keys: Keys) -> ASGIApp:
    text, optional = {"type": "string"}, {"type": ["string", "null"]}
    error = _object(error=_object(message=text, type=text, param=optional, code=optional))
    answers: dict[int | str, dict[str, Any]] = {
        status: {"description": about, "content": {"application/json": {"schema": error}}}
        for status, about in _STATUSES.items()
    }
    app = FastAPI(title="Dovetail", version=dovetail.__version__, responses=answers, docs_url=None, redoc_url=None)
    errors.install(app)

    async def disconnected(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_DISCONNECTED)

    app.add_exception_handler(ClientDisconnected, disconnected)
    for part in (completions, chat, responses, embeddings, meta):
        part.install(app, service)
    if service.config.page:
        app.mount("/static", StaticFiles(directory=_STATIC), name="static")

        @app.get("/", include_in_schema=False)
        async def page() -> Response:
            return FileResponse(_STATIC / "index.html", headers={"content-security-policy": _POLICY})

    gate: ASGIApp = Gate(app, service.config, keys, service.monitor.response_sent)
    if service.config.cors_origins:
        # Outermost, so that error responses carry CORS headers too.
        gate = CORSMiddleware(
            gate,
            allow_origins=list(service.config.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return gate
