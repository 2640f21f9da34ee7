"""Halves of a step on two streams give the bits of one stream, even if streams lag and free memory is overwritten.

Shapes: T tokens, C channels.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.core.interfaces import Hidden
from dovetail.core.testing.model_driver import Driver, build_context
from dovetail.core.testing.reference import build
from dovetail.core.worker.two_batch_overlap import Inline, OverlappedForward, Side, SideStream, interleave
from dovetail.plugins.model.config import LlamaConfig
from dovetail.plugins.model.llama.decoder import Llama

GPU = torch.device("cuda")
TOKENS, CHANNELS = 768, 1024
"""Shape of a half. Its tensors are too large for the allocator's pool of small blocks."""
CYCLES = (0, 0, 100_000, 1_000_000)
"""Delays of a stream: half a millisecond at most."""


def overwrite_free_memory() -> None:
    """Overwrite free memory of the current stream that the allocator would use for a half's tensors."""
    taken = [torch.full((TOKENS, width), float("nan"), dtype=torch.bfloat16, device=GPU) for width in (CHANNELS,) * 6]
    taken += [torch.full((2, TOKENS, CHANNELS), float("nan"), dtype=torch.bfloat16, device=GPU) for _ in range(3)]
    del taken


class Lagging(SideStream):
    """Delays both streams in turns, and overwrites free memory at once."""

    def __init__(self) -> None:
        super().__init__(GPU)
        self.random = random.Random(3)

    def start(self, call: Callable[[], Any]) -> Any:
        overwrite_free_memory()
        return super().start(partial(self._late, call))

    def finish(self, started: Any) -> Any:
        result = super().finish(started)
        torch.cuda._sleep(self.random.choice(CYCLES))
        return result

    def _late(self, call: Callable[[], Any]) -> Any:
        torch.cuda._sleep(self.random.choice(CYCLES))
        result = call()
        overwrite_free_memory()
        return result


class DoesNotWait(Lagging):
    """Broken: the call does not wait for the main stream."""

    def start(self, call: Callable[[], Any]) -> Any:
        overwrite_free_memory()
        with torch.cuda.stream(self.stream):
            result = self._late(call)
            return call, result, self.stream.record_event()


class LetsGo(Lagging):
    """Broken: the inputs of a call are released once it is enqueued."""

    def start(self, call: Callable[[], Any]) -> Any:
        _, result, done = super().start(call)
        return None, result, done


def toy(x_TC: torch.Tensor, w_CC: torch.Tensor) -> Iterator[Any]:
    """Yield a matmul and a call in turns. Only the call refers to its inputs."""
    for _ in range(24):
        x_TC = yield partial(squashed, x_TC @ w_CC)
    return x_TC  # type: ignore[return-value]


def squashed(x_TC: torch.Tensor) -> torch.Tensor:
    return torch.tanh(2 * x_TC)


@torch.inference_mode()
def run_toy(side: Side) -> list[torch.Tensor]:
    generator = torch.Generator(GPU).manual_seed(1)
    w_CC = torch.randn(CHANNELS, CHANNELS, generator=generator, device=GPU).bfloat16() * CHANNELS**-0.5
    halves = [torch.randn(TOKENS, CHANNELS, generator=generator, device=GPU).bfloat16() for _ in range(2)]
    layers: list[Any] = [toy(x_TC, w_CC) for x_TC in halves]
    del halves
    found: Any = interleave(layers, side)
    torch.cuda.synchronize()
    return [x_TC.cpu() for x_TC in found]


def test_lagging_streams_change_no_bit() -> None:
    expected = run_toy(Inline())
    for _ in range(20):
        assert all(map(torch.equal, run_toy(Lagging()), expected))


@pytest.mark.parametrize("broken", [DoesNotWait, LetsGo])
def test_the_test_detects_a_broken_side_stream(broken: type[Lagging]) -> None:
    expected = run_toy(Inline())
    assert not all(all(map(torch.equal, run_toy(broken()), expected)) for _ in range(5))


HF = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": CHANNELS,
    "intermediate_size": 2816,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "eos_token_id": 2,
}
STEPS = (({"a": 2 * TOKENS}, 0), ({"a": 1, "b": 1100}, 1), ({"a": 1, "b": 1, "c": 700, "d": 300}, 2))


def model(quant: str) -> Llama:
    config = LlamaConfig(hf=HF, load="dummy")
    parts = {"quantizer": build("quant", quant), "attention": build("attention", "triton")}
    made = Llama(
        config,
        build_context(Llama.spec(config), **parts, dtype=torch.bfloat16, page_tokens=16, max_len=4096, device=GPU),
    )
    made.init_dummy(2)
    return made


@pytest.mark.parametrize("quant", ["none", "fp8"])
def test_a_model_on_two_streams_gives_the_bits_of_one(quant: str) -> None:
    """Steps have long prompts, chunks and decode rows, with taps."""
    llama = model(quant)
    tokens = torch.randint(512, (2 * TOKENS,), generator=torch.Generator().manual_seed(4)).tolist()

    def run(side: Side) -> list[torch.Tensor]:
        driver, found = Driver(llama), []
        forward = OverlappedForward(llama, llama.build.attention, None, GPU, least=2)
        forward.side = side
        driver.forward = forward
        for counts, num_decode in STEPS:
            rows = [(name, tokens[:count]) for name, count in counts.items()]
            found += driver.step(rows, num_decode, taps=(0, 5))
            hidden: Hidden = driver.hidden
            found += [hidden.states, *hidden.taps.values()]
        pools = [plane[:, 1:].clone() for pool in driver.paging.pools.values() for plane in pool.planes.values()]
        return [tensor.float().nan_to_num(-7.0).cpu() for tensor in (*found, *pools)]

    expected = run(Inline())
    assert all(tensor.std() > 0 and (tensor != -7).any() for tensor in expected)
    for side in (SideStream(GPU), *(Lagging() for _ in range(8))):
        for one, other in zip(run(side), expected, strict=True):
            assert torch.equal(one, other)


# Engines.

PROMPTS = ["def fibonacci(n):\n", "import os\n\nclass Path:\n    def __init__(self, ", "x = 1\n" * 40, '"""Return the']
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=24, logprobs=1, prompt_logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=32, repetition_penalty=1.1),
]
CUDA = ["engine.device=cuda", "engine.dtype=float32", "attention=triton", "engine.max_len=320", "engine.kv_pages=500"]


def tokens_of(*overrides: str) -> list[list[int]]:
    """Run the prompts twice, so that prefixes are in the cache."""
    with LLM("tiny", overrides=overrides) as llm:
        return [g.token_ids for _ in range(2) for g in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize(
    "overrides",
    [
        ["engine.cuda_graphs=false", "engine.overlap_tokens=2"],
        ["engine.graph_tokens=0", "engine.overlap_tokens=16", "engine.depth=2", "engine.token_budget=96"],
        ["engine.cuda_graphs=false", "engine.overlap_tokens=4", "engine.depth=2", "spec_decode=ngram"],
    ],
    ids=["all", "prompts", "drafts"],
)
def test_an_engine_gives_the_tokens_of_a_cpu(overrides: list[str]) -> None:
    assert tokens_of(*CUDA, "engine.max_seqs=8", *overrides) == tokens_of("engine.device=cpu", "engine.max_len=320")


RANKS = ["executor=multiproc", "engine.tp=2", "engine.depth=2", "engine.max_seqs=8", "engine.overlap_tokens=4"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "overrides",
    [
        ["collective=nccl", "engine.cuda_graphs=false"],
        ["collective=nccl", "collective.shard_rows=16", "engine.graph_tokens=0"],
        ["collective=symm_mem", "collective.algorithm=one_shot", "engine.graph_tokens=0"],
        ["collective=symm_mem", "collective.algorithm=two_shot", "engine.graph_tokens=0"],
        ["collective=symm_mem", "collective.shard_rows=16", "engine.graph_tokens=0"],
        ["collective=symm_mem", "engine.cuda_graphs=false"],
    ],
    ids=lambda words: " ".join(words),
)
def test_two_gpus_give_the_tokens_of_a_cpu(overrides: list[str]) -> None:
    assert tokens_of(*CUDA, *RANKS, *overrides) == tokens_of("engine.device=cpu", "engine.max_len=320")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("collective", ["nccl", "symm_mem"])
def test_a_killed_rank_ends_sums_on_the_side_stream(collective: str) -> None:
    """The write that stops waiting kernels must reach the GPU while they run."""
    with LLM("tiny", overrides=[*CUDA, *RANKS, f"collective={collective}", "engine.cuda_graphs=false"]) as llm:
        (worker,) = llm.engine.executor.worker_pids  # type: ignore[attr-defined]
        llm.generate(PROMPTS, PARAMS)
        threading.Timer(0.5, os.kill, (worker, signal.SIGKILL)).start()
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="rank 1"):
            while time.monotonic() - began < 60:
                llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True))
        assert time.monotonic() - began < 60
