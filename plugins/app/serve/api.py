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
from dovetail.plugins.app.serve import adapters, chat, completions, embeddings, errors, meta, responses
from dovetail.plugins.app.serve.keys import Keys
from dovetail.plugins.app.serve.service import Service
from dovetail.plugins.app.serve.transport import ClientDisconnected, Gate, disconnected_response

_STATIC = Path(__file__).parent / "static"
_POLICY = "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'"
"""Content-Security-Policy of the page: resources of this server only, no inline scripts."""
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_STATUSES = {
    400: "The request is invalid; the message gives the reason.",
    401: "No valid API key.",
    404: "No such model or endpoint.",
    408: "The body took too long to arrive.",
    413: "The body is too long.",
    429: "The queue is full: try again after Retry-After seconds.",
    500: "Internal server error.",
    503: "The engine is starting or has died, or the server is stopping.",
    504: "The request took longer than its time limit.",
}


def build(service: Service, keys: Keys) -> ASGIApp:
    answers: dict[int | str, dict[str, Any]] = {
        status: {"description": text, "content": {"application/json": {"schema": _ERROR}}}
        for status, text in _STATUSES.items()
    }
    app = FastAPI(title="Dovetail", version=dovetail.__version__, responses=answers, docs_url=None, redoc_url=None)
    errors.install(app)

    async def disconnected(request: Request, error: Exception) -> Response:
        return disconnected_response()

    app.add_exception_handler(ClientDisconnected, disconnected)
    for part in (completions, chat, responses, embeddings, meta):
        app.include_router(part.router(service))
    if service.config.adapter_root is not None:
        app.include_router(adapters.router(service))
    if service.config.page:
        app.mount("/static", StaticFiles(directory=_STATIC), name="static")

        @app.get("/", include_in_schema=False)
        async def page() -> Response:
            return FileResponse(_STATIC / "index.html", headers={"content-security-policy": _POLICY})

    gate: ASGIApp = Gate(
        app,
        keys=keys,
        max_body_bytes=service.config.max_body_bytes,
        receive_timeout=service.config.receive_timeout,
        log_requests=service.config.log_requests,
        on_status=service.monitor.response_sent,
    )
    if service.config.cors_origins:
        # Outermost, so that error responses carry CORS headers too.
        gate = CORSMiddleware(
            gate, allow_origins=list(service.config.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    return gate
