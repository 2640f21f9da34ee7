"""Endpoints that do not generate: models, adapters, tokenization, health, metrics, live figures."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, Response

import dovetail
from dovetail.core.errors import for_clients, shown
from dovetail.plugins.app.serve.errors import FieldError, ServerError
from dovetail.plugins.app.serve.output import spell
from dovetail.plugins.app.serve.schemas import (
    DetokenizeRequest,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from dovetail.plugins.app.serve.service import Service
from dovetail.plugins.app.serve.transport import json_response

_MOST_ENTRIES = 1000
"""Files and folders in an adapter's folder, all of which are checked for links."""


def install(app: FastAPI, service: Service) -> None:
    client = service.client

    @app.get("/v1/models")
    async def models() -> Response:
        names = (*service.model_names, *client.adapters)
        return json_response({"object": "list", "data": [_model(service, name) for name in names]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        return json_response(_model(service, service.model(model)))

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        service.model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise FieldError("give one of prompt and messages", "prompt")
        async with service.limit():
            if body.messages is not None:
                text = await service.text.render(body.messages)
                ids = await service.text.encode(text, special=False, param="messages")
            else:
                ids = await service.text.tokenize(body.prompt or "", special=body.add_special_tokens)
        answer: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": client.info.max_len}
        if body.return_token_strs:
            answer["token_strs"] = [spell(service.text.tokenizer, token) for token in ids]
        return json_response(answer)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        service.model(body.model)
        if wrong := [token for token in body.tokens if token >= client.info.vocab]:
            raise FieldError(f"token id {wrong[0]} is not in the model's vocabulary of {client.info.vocab}", "tokens")
        text = await service.text.threaded(service.text.tokenizer.decode, body.tokens, skip_special=False)
        return json_response({"prompt": text})

    @app.get("/health")
    async def health() -> Response:
        """Liveness probe: 200 unless the engine has failed for good."""
        status = 503 if client.state == "failed" else 200
        return json_response({"status": client.state, "replicas": client.health()}, status)

    @app.get("/ready")
    async def ready() -> Response:
        """Readiness probe: 200 while requests are accepted."""
        if service.ready:
            return json_response({"status": "ready"})
        status = "draining" if service.draining else client.state
        return json_response({"status": status, "phase": client.phase, "failure": for_clients(client.failure)}, 503)

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": dovetail.__version__})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        found = await service.monitor.exposition(request.headers.get("accept", ""))
        return Response(found.text, headers={"content-type": found.content_type})

    @app.get("/stats")
    async def stats() -> Response:
        """Live figures, for the page at /."""
        health = {"samples": client.samples, "state": client.state, "replicas": client.health()}
        return json_response(await service.monitor.live() | health)

    @app.get("/composition")
    async def composition() -> Response:
        """Components chosen for each kind."""
        info = client.info
        return json_response(
            {
                "version": dovetail.__version__,
                "models": (*service.model_names, *client.adapters),
                "device": info.device,
                "max_len": info.max_len,
                "parts": _parts(service),
                "slower_paths": info.notes,
            }
        )

    if service.config.debug:

        @app.post("/debug/check")
        async def check() -> Response:
            """Run the KV allocator's integrity check between two steps. Returns its counters: sums, and per replica."""
            try:
                found = await client.control("check")
                sums = {name: sum(counters[name] for counters in found) for name in found[0]}
                return json_response(sums | {"replicas": found})
            except dovetail.RequestError as error:
                raise ServerError(500, str(error), code="integrity") from None

    if service.config.adapter_root is None:
        return
    root = Path(service.config.adapter_root).expanduser().resolve()

    @app.post("/v1/load_lora_adapter")
    async def load(body: LoadAdapterRequest) -> Response:
        """Load an adapter; answers once requests can use it. Other requests keep running."""
        if body.lora_name in service.model_names:
            raise FieldError(f"lora_name: {body.lora_name!r} is the base model's name", "lora_name")
        folder = await asyncio.to_thread(_inside, root, body.lora_path)
        await client.load_adapter(body.lora_name, str(folder))
        return json_response({"status": "loaded", "lora_name": body.lora_name})

    @app.post("/v1/unload_lora_adapter")
    async def unload(body: UnloadAdapterRequest) -> Response:
        """Unload an adapter. Requests that use it still run to their end."""
        await client.unload_adapter(body.lora_name)
        return json_response({"status": "unloaded", "lora_name": body.lora_name})


def _inside(root: Path, asked: str) -> Path:
    """Return the requested folder. Raises FieldError if it, or a file in it, is outside `root` once symlinks are
    resolved. A link from the folder to another place in `root` is allowed, because download caches consist of them."""
    try:
        folder = (root / asked).resolve()
        walked = folder.rglob("*") if folder.is_relative_to(root) else ()
        entries = list(itertools.islice(walked, _MOST_ENTRIES + 1))
        inside = [path.resolve().is_relative_to(root) for path in (folder, *entries)]
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else type(error).__name__
        raise FieldError(f"lora_path: {shown(asked)} is not a valid path ({reason})", "lora_path") from None
    if not inside[0]:
        raise FieldError(f"lora_path: {shown(asked)} is not in serve.adapter_root", "lora_path")
    if len(entries) > _MOST_ENTRIES:
        raise FieldError(f"lora_path: {shown(asked)} has more than {_MOST_ENTRIES} files: not an adapter", "lora_path")
    if not all(inside):
        link = shown(entries[inside.index(False) - 1].relative_to(folder))
        raise FieldError(f"lora_path: {link} in {shown(asked)} leads out of serve.adapter_root", "lora_path")
    return folder


def _model(service: Service, name: str) -> dict[str, Any]:
    adapter = service.adapter(name)
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "dovetail",
        "root": Path(service.client.adapters[adapter]).name if adapter else service.client.info.model,
        "parent": service.model_names[0] if adapter else None,
        "max_model_len": service.client.info.max_len,
    }


def _parts(service: Service) -> dict[str, list[dict[str, str]]]:
    found = {}
    for kind, part in service.composition.parts.items():
        some = list(part.values()) if isinstance(part, dict) else [part]
        found[kind] = [{"name": one.name, "package": str(one.package)} for one in some]
    return found
