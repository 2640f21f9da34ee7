"""Many clients at once: every client gets its own answer, and all pages are freed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time

import httpx
import pytest

from dovetail import LLM, SamplingParams

STREAMS = 64
MIXED = int(os.environ.get("DOVETAIL_MIXED", "150"))
"""Number of requests, of which 20 % are aborted; .ci/nightly sends 10 000."""


def prompts() -> list[str]:
    return [f"def f{i}(x):\n    return x + {i}\n\n\ndef g{i}(" for i in range(STREAMS)]


async def stream(client: httpx.AsyncClient, path: str, body: dict) -> list[dict]:
    """Return the events of a stream, in order."""
    events = []
    async with client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
    return events


def test_64_streams_at_once_are_each_their_own(server):
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with LLM(overrides=["+preset=tiny_cpu"]) as llm:
        expected = [generation.text for generation in llm.generate(prompts(), params)]

    async def all_of_them() -> list[list[dict]]:
        limits = httpx.Limits(max_connections=STREAMS)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
            body = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
            return await asyncio.gather(
                *(stream(client, "/v1/completions", {**body, "prompt": prompt}) for prompt in prompts())
            )

    answers = asyncio.run(all_of_them())
    assert ["".join(e["choices"][0]["text"] for e in events) for events in answers] == expected
    assert len({events[0]["id"] for events in answers}) == STREAMS
    assert len(set(expected)) > STREAMS / 2


def test_requests_that_arrive_while_a_launch_is_delayed_get_the_same_tokens(start):
    """The device is simulated: its tokens are a function of the prompt, and its step times are predictable."""
    device = ("executor=simulated", "cost=h200", "cost.step_us=3000", "engine.depth=2")
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM(overrides=["+preset=tiny_cpu", *device]) as llm:
        expected = [generation.text for generation in llm.generate(prompts(), params)]
    running = start(*device, "engine.late_launch=true").wait_ready()
    rng = random.Random(0)

    async def all_of_them() -> list[str]:
        async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:

            async def one(prompt: str) -> str:
                await asyncio.sleep(rng.random())
                body = {"prompt": prompt, "temperature": 0, "max_tokens": 8}
                return (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]

            return await asyncio.gather(*map(one, prompts()))

    assert asyncio.run(all_of_them()) == expected
    assert running.stats()["running"] == 0


def test_no_page_is_lost_by_mixed_requests_and_aborts(server):
    random.seed(0)
    before = server.stats()

    async def one(client: httpx.AsyncClient, number: int) -> None:
        chance = random.random()
        body: dict = {
            "prompt": f"def f{number % 40}(x):\n" * random.randint(1, 12),
            "max_tokens": random.randint(1, 24),
        }
        if chance < 0.2:
            async with client.stream(
                "POST", "/v1/completions", json={**body, "stream": True, "max_tokens": 600, "ignore_eos": True}
            ) as answer:
                async for _ in answer.aiter_lines():
                    break
            return
        if chance < 0.3:
            body["prompt"] = "x" * 30000
        elif chance < 0.4:
            body |= {"n": 3, "temperature": 1.0}
        elif chance < 0.5:
            body |= {"stop": ["return"], "logprobs": 2}
        elif chance < 0.55:
            body |= {"timeout": 0.01}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code in (200, 400, 429, 504), answer.text

    async def mixed() -> None:
        limits = httpx.Limits(max_connections=48)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            gate = asyncio.Semaphore(48)

            async def gated(number: int) -> None:
                async with gate:
                    await one(client, number)

            await asyncio.gather(*(gated(number) for number in range(MIXED)))

    asyncio.run(mixed())
    stats = idle(server)
    assert stats["pages_owned"] == 0 and stats["steps"] > before["steps"]
    assert httpx.get(f"{server.url}/stats").json()["samples"] == 0


def idle(server) -> dict[str, float]:
    deadline = time.monotonic() + 60
    while (stats := server.stats())["running"] or stats["waiting"]:
        assert time.monotonic() < deadline, stats
        time.sleep(0.02)
    return stats


def test_a_client_that_leaves_frees_its_pages(server):
    body, before = {"prompt": "x = 1\n", "max_tokens": 2000, "ignore_eos": True}, server.stats()["steps"]
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**body, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert server.stats()["running"] == 1
    assert idle(server)["pages_owned"] == 0
    assert server.stats()["steps"] - before < 1000
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.3)
    assert idle(server)["pages_owned"] == 0
