"""/v1/embeddings."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from numpy.typing import NDArray
from starlette.responses import Response

from dovetail.core.frontend.outputs import Delta, truncate_and_normalize
from dovetail.core.interfaces import EmbeddingSpec, SamplingParams
from dovetail.plugins.app.serve import output
from dovetail.plugins.app.serve.errors import FieldError
from dovetail.plugins.app.serve.schemas import EmbeddingRequest
from dovetail.plugins.app.serve.service import Service
from dovetail.plugins.app.serve.transport import json_response, while_connected

_AT_ONCE = 256
"""Maximum number of a request's texts that the engine has at once; the next ones take their places in the queue."""


def install(app: FastAPI, service: Service) -> None:
    @app.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        model = service.model(body.model)
        how = _how(service, model)
        _check_dimensions(body.dimensions, how, service)
        limit, params = service.limit(body.timeout), SamplingParams(max_tokens=1)
        async with limit:
            prompts = await service.text.prompts(body.input, "input")
        found: list[Delta] = []
        size = min(_AT_ONCE, service.capacity)
        for start in range(0, len(prompts), size):
            wave, admitted = prompts[start : start + size], start > 0
            jobs = service.submit(
                request, body, "embeddings", wave, params, limit, pooling=how.pooling, admitted=admitted
            )
            try:
                found += await while_connected(request.receive, output.collect(jobs, 1))
            finally:
                output.close(jobs)
        vectors = np.stack([delta.pooled_C for delta in found])
        vectors = truncate_and_normalize(vectors, normalize=how.normalize, dimensions=body.dimensions)
        data = await service.text.threaded(_data, vectors, body.encoding_format == "base64")
        tokens = sum(map(len, prompts))
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return json_response({"object": "list", "data": data, "model": model, "usage": usage})


def _how(service: Service, model: str) -> EmbeddingSpec:
    stated, chosen = service.client.info.embedding, service.config.pooling
    if chosen != "auto":
        return EmbeddingSpec(chosen, stated.normalize if stated else True, stated.dimensions if stated else ())
    if stated is None:
        raise FieldError(
            f"the model {model} generates text: no file in its folder specifies how it embeds. To use its hidden "
            "states anyway, start the server with serve.pooling=last or serve.pooling=mean",
            "model",
        )
    return stated


def _check_dimensions(asked: int | None, how: EmbeddingSpec, service: Service) -> None:
    size = service.client.info.hidden
    if asked is None or asked == size:
        return
    if asked > size:
        raise FieldError(f"dimensions={asked}: this model's embeddings have {size}", "dimensions")
    if service.config.matryoshka or how.dimensions is None or asked in how.dimensions:
        return
    there_are = ", ".join(map(str, (*how.dimensions, size)))
    raise FieldError(
        f"dimensions={asked}: config.json does not declare that this model's embeddings can be truncated to that size; "
        f"available: {there_are} (serve.matryoshka=true allows any)",
        "dimensions",
    )


def _data(vectors: NDArray[np.float32], as_base64: bool) -> list[dict[str, Any]]:
    def written(vector: NDArray[np.float32]) -> Any:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode() if as_base64 else vector.tolist()

    return [{"object": "embedding", "index": i, "embedding": written(vector)} for i, vector in enumerate(vectors)]
