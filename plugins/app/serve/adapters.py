"""/v1/load_lora_adapter and /v1/unload_lora_adapter; served only if serve.adapter_root is set."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

from dovetail.plugins.app.serve.errors import FieldError
from dovetail.plugins.app.serve.schemas import LoadAdapterRequest, UnloadAdapterRequest
from dovetail.plugins.app.serve.service import Service
from dovetail.plugins.app.serve.transport import json_response


def router(service: Service) -> APIRouter:
    routes = APIRouter()
    assert service.config.adapter_root is not None
    root = Path(service.config.adapter_root).expanduser().resolve()

    @routes.post("/v1/load_lora_adapter")
    async def load(body: LoadAdapterRequest) -> Response:
        """Load an adapter; answers once requests can use it. Other requests keep running."""
        if body.lora_name in service.model_names:
            raise FieldError(f"lora_name: {body.lora_name!r} is the base model's name", "lora_name")
        await service.client.load_adapter(body.lora_name, str(_inside(root, body.lora_path)))
        return json_response({"status": "loaded", "lora_name": body.lora_name})

    @routes.post("/v1/unload_lora_adapter")
    async def unload(body: UnloadAdapterRequest) -> Response:
        """Unload an adapter. Requests that use it still run to their end."""
        await service.client.unload_adapter(body.lora_name)
        return json_response({"status": "unloaded", "lora_name": body.lora_name})

    return routes


def _inside(root: Path, asked: str) -> Path:
    """Return the requested folder. Raises FieldError if it is outside `root` once symlinks are resolved."""
    try:
        folder = (root / asked).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise FieldError(f"lora_path: {asked!r} is not a valid path: {error}", "lora_path") from None
    if not folder.is_relative_to(root):
        raise FieldError(f"lora_path: {asked!r} is not in serve.adapter_root", "lora_path")
    return folder
