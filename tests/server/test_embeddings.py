"""/v1/embeddings through the official client, compared with LLM.embed, for a sentence-transformers folder."""

from __future__ import annotations

import json
import re
import shutil

import httpx
import numpy as np
import openai
import pytest

from dovetail import LLM
from dovetail.core.checkpoint import locate

pytestmark = pytest.mark.nightly

TEXTS = ["def fib(n):\n", "import os", "x = 1\n" * 100, "é"]


def save(folder) -> None:
    """Save the bundled model as an embedding checkpoint with mean pooling, truncatable to 16 or 64 dimensions."""
    shutil.copytree(locate("pkg://dovetail.plugins.model/bundled/tiny"), folder)
    config = json.loads((folder / "config.json").read_text()) | {"matryoshka_dimensions": [16, 64]}
    (folder / "config.json").write_text(json.dumps(config))
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    from .conftest import Server

    folder = tmp_path_factory.mktemp("models") / "tiny-embed"
    save(folder)
    server = Server("model=llama", f"model.path={folder}", "serve.max_waiting=20").wait_ready()
    with LLM(str(folder), overrides=["engine.device=cpu"]) as llm:
        yield server, llm.embed(TEXTS), llm.tokenizer
    assert server.stats()["pages_owned"] == 0
    assert server.stop() == 0, "".join(server.log)


def vectors(answer: openai.types.CreateEmbeddingResponse) -> np.ndarray:
    assert [entry.index for entry in answer.data] == list(range(len(answer.data)))
    return np.array([entry.embedding for entry in answer.data], np.float32)


def test_vectors_equal_those_of_the_python_api(served):
    server, expected, tokenizer = served
    client = server.client()
    assert [model.id for model in client.models.list()] == ["tiny-embed"]
    # By default, the client requests base64 and decodes it.
    for extra in ({}, {"encoding_format": "float"}):
        answer = client.embeddings.create(model="tiny-embed", input=TEXTS, **extra)
        np.testing.assert_allclose(vectors(answer), expected, atol=1e-5)
    ids = [tokenizer.encode(text) for text in TEXTS]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    np.testing.assert_allclose(vectors(client.embeddings.create(model="tiny-embed", input=ids)), expected, atol=1e-5)
    np.testing.assert_allclose(
        vectors(client.embeddings.create(model="tiny-embed", input=TEXTS[0])), expected[:1], atol=1e-5
    )
    cut = vectors(client.embeddings.create(model="tiny-embed", input=TEXTS, dimensions=16))
    np.testing.assert_allclose(cut, expected[:, :16] / np.linalg.norm(expected[:, :16], axis=1)[:, None], atol=1e-5)
    metrics = httpx.get(f"{server.url}/metrics").text
    assert re.search(r'requests_finished_total\{model_name="tiny-embed",outcome="stop"\} \d\d', metrics)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dimensions": 32}, "available: 16, 64, "),
        ({"dimensions": 100_000}, "have 2"),
        ({"input": ["a"] * 2049}, "2049 prompts, but at most 2048"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [2**30]}, "not in the model's vocabulary"),
        ({"input": [7] * 5000}, "maximum context length is .* 5000 tokens"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"extra_body": {"temperature": 1}}, "temperature"),
    ],
)
def test_mistakes_are_reported(served, changes, says):
    with pytest.raises(openai.BadRequestError, match=says):
        served[0].client().embeddings.create(**{"model": "tiny-embed", "input": "x"} | changes)


def test_more_texts_than_fit_into_the_queue(served):
    few, many = (
        served[0].client().embeddings.create(model="tiny-embed", input=[[1 + i % 90, 7] for i in range(count)]).data
        for count in (3, 300)
    )
    assert [one.index for one in many] == list(range(300))
    assert many[90].embedding == pytest.approx(few[0].embedding, abs=1e-5)


def test_a_model_that_embeds_generates_nothing(served):
    client = served[0].client()
    with pytest.raises(openai.BadRequestError, match="has no head"):
        client.completions.create(model="tiny-embed", prompt="x")
    with pytest.raises(openai.BadRequestError, match="has no head"):
        list(client.completions.create(model="tiny-embed", prompt="x", stream=True))
