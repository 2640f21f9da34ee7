"""The Python API on the bundled model: sync, streaming, asyncio, and mistakes of users."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from dovetail import LLM, ConfigError, RequestError, SamplingParams
from dovetail.core.interfaces import Request
from dovetail.plugins.logits.penalties import Penalties

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", overrides=["engine.device=cpu", "engine.depth=2", "engine.max_len=256"]) as llm:
        yield llm


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_streaming_and_asyncio_give_the_same_text(llm: LLM) -> None:
    prompt = "def main():\n"
    whole = llm.generate(prompt, GREEDY)[0]
    deltas = list(llm.stream(prompt, GREEDY))
    assert "".join(d.text for d in deltas) == whole.text
    assert [t for d in deltas for t in d.token_ids] == whole.token_ids
    assert deltas[-1].finish_reason == whole.completions[0].finish_reason == "length"
    assert len(deltas) > 10, "the output arrives in pieces"

    async def both() -> list[str]:
        results = await asyncio.gather(*(llm.agenerate(prompt, GREEDY) for _ in range(3)))
        return [r.text for r in results]

    assert asyncio.run(both()) == [whole.text] * 3


def test_text_equals_the_decoded_tokens(llm: LLM) -> None:
    result = llm.generate("import ", GREEDY)[0]
    assert result.text == llm.tokenizer.decode(result.token_ids)


def test_callers_in_many_threads(llm: LLM) -> None:
    prompts = [f"x = {i}\n" for i in range(8)]
    alone = [llm.generate(p, GREEDY)[0].token_ids for p in prompts]
    got: dict[int, list[int]] = {}
    threads = [
        threading.Thread(target=lambda i=i: got.update({i: llm.generate(prompts[i], GREEDY)[0].token_ids}))
        for i in range(8)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [got[i] for i in range(8)] == alone


def test_leaving_a_stream_frees_its_pages(llm: LLM) -> None:
    for _ in llm.stream("def f():\n", SamplingParams(max_tokens=200, ignore_eos=True)):
        break
    wait_until(lambda: llm.engine.kv.stats().owned == 0)


def test_an_error_of_on_done_reaches_the_caller_and_not_the_engine(llm: LLM) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        llm.generate(["a", "b"], GREEDY, on_done=broken)
    assert len(llm.generate("ok", GREEDY)[0].token_ids) == 24


def test_a_closed_event_loop_aborts_its_requests_and_not_the_engine(llm: LLM) -> None:
    loop = asyncio.new_event_loop()
    stream = llm.astream("def f():\n", SamplingParams(max_tokens=200, ignore_eos=True))
    loop.run_until_complete(anext(stream))
    loop.close()
    wait_until(lambda: not llm._table.busy)
    assert len(llm.generate("ok", GREEDY)[0].token_ids) == 24


def test_a_task_that_is_cancelled_while_it_submits_leaves_no_request(llm: LLM) -> None:
    async def test() -> None:
        with llm._table._submitting:
            task = asyncio.ensure_future(llm.agenerate("x", SamplingParams(max_tokens=200, ignore_eos=True)))
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(test())  # Waits for the submitting thread.
    assert not llm._table.busy


def test_samples_differ_and_are_reproducible(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=20)
    first, second = (llm.generate("def g(a, b):\n", params)[0] for _ in range(2))
    texts = [c.text for c in first.completions]
    assert len(set(texts)) == 3
    assert texts == [c.text for c in second.completions]


def test_logprobs_are_those_of_the_model(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    result = llm.generate("for i in range(", params)[0]
    completion = result.completions[0]
    assert len(completion.logprobs) == 6
    for token, lp in zip(completion.token_ids, completion.logprobs, strict=True):
        assert lp.top[0] == (token, pytest.approx(lp.logprob))
        assert sum(math.exp(v) for _, v in lp.top) <= 1.0 + 1e-5
        assert len(lp.top) == 3
    assert len(result.prompt_logprobs) == len(result.prompt_ids) - 1
    # The same tokens as a prompt have the same log-probabilities.
    again = llm.generate([*result.prompt_ids, *completion.token_ids], params)[0]
    assert [lp.logprob for lp in again.prompt_logprobs[-6:]] == pytest.approx(
        [lp.logprob for lp in completion.logprobs], abs=1e-4
    )


def test_prompt_logprobs_are_computed_a_few_rows_at_a_time(llm: LLM) -> None:
    """With as many rows as sampling needs, since the logits of a long prompt would not fit on a device."""
    params, prompt = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2), [5, 9, 200, 31, 8, 77, 40]
    with LLM("tiny", overrides=["engine.device=cpu", "engine.max_seqs=2"]) as small:
        found = small.generate(prompt, params)[0].prompt_logprobs
    expected = llm.generate(prompt, params)[0].prompt_logprobs
    assert [lp.logprob for lp in found] == pytest.approx([lp.logprob for lp in expected], abs=1e-4)
    assert [[token for token, _ in lp.top] for lp in found] == [[token for token, _ in lp.top] for lp in expected]


def test_stop_token_min_tokens_and_include_stop(llm: LLM) -> None:
    free = llm.generate("def main():\n", GREEDY)[0].token_ids
    stop = free[3]
    stopped = llm.generate("def main():\n", SamplingParams(temperature=0, max_tokens=24, stop_token_ids=(stop,)))[
        0
    ].completions[0]
    assert stopped.token_ids == free[: free.index(stop) + 1] and stopped.finish_reason == "stop"
    assert stopped.text == llm.tokenizer.decode(free[: free.index(stop)])
    included = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=(stop,), include_stop=True)
    (whole,) = llm.generate("def main():\n", included)[0].completions
    assert whole.token_ids == stopped.token_ids and whole.text == llm.tokenizer.decode(whole.token_ids) != stopped.text
    later = llm.generate(
        "def main():\n",
        SamplingParams(temperature=0, max_tokens=24, min_tokens=10, stop_token_ids=(stop,), ignore_eos=True),
    )
    assert stop not in later[0].token_ids[:10]


def test_common_mistakes_get_a_hint(llm: LLM) -> None:
    with pytest.raises(ConfigError, match=r"overrides are a list of words: \['spec_decode=ngram'\]"):
        LLM(overrides="spec_decode=ngram")
    with pytest.raises(TypeError, match=r"SamplingParams\(\*\*params\)"):
        llm.generate("x", {"max_tokens": 3})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([], GREEDY, "empty"),
        ([1] * 256, GREEDY, "engine.max_len"),
        ([10**6], GREEDY, "vocabulary"),
        ([-1], GREEDY, "vocabulary"),
        ([1], SamplingParams(logit_bias={10**6: 1.0}), "logit_bias"),
        ([1], SamplingParams(stop_token_ids=(10**6,)), "stop_token_ids"),
    ],
)
def test_a_bad_request_gets_the_reason_and_does_not_affect_others(
    llm: LLM, prompt: list[int], params: SamplingParams, words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        llm.generate([prompt], params)
    assert len(llm.generate("ok", GREEDY)[0].token_ids) == 24


def test_a_processor_joins_sequences_that_use_it_and_their_successors(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This applies to the processor on the rank. Those on the host join only requests that use them."""
    joined: dict[Penalties, list[float]] = {}
    join = Penalties.join

    def counted(self: Penalties, slot: int, request: Request) -> None:
        joined.setdefault(self, []).append(request.params.presence_penalty)
        join(self, slot, request)

    monkeypatch.setattr(Penalties, "join", counted)
    plain, penalised = (SamplingParams(temperature=0.0, max_tokens=4, presence_penalty=p) for p in (0.0, 2.0))
    before = [llm.generate("import os", plain)[0].token_ids for _ in range(2)]
    assert not joined
    llm.generate("import os", penalised)
    after = [llm.generate("import os", plain)[0].token_ids for _ in range(3)]
    *host, rank = sorted(joined.values())
    assert rank == [2.0, 0.0] and all(each == [2.0] for each in host)
    assert before + after == [before[0]] * 5


def test_a_parameter_that_no_chosen_processor_supports_is_refused() -> None:
    with LLM("tiny", overrides=["engine.device=cpu", "engine.max_len=256", "logits=[min_tokens]"]) as llm:
        with pytest.raises(RequestError, match=r"repetition_penalty=1.5: no chosen logits processor"):
            llm.generate("x", SamplingParams(repetition_penalty=1.5))
        assert llm.generate("x", SamplingParams(min_tokens=3, max_tokens=4))[0].token_ids


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"max_tokens": 0},
        {"max_tokens": 2**31},
        {"min_tokens": 2**70, "max_tokens": None},
        {"top_k": 2**70},
        {"seed": 2**63},
        {"logprobs": 65},
        {"stop_token_ids": (2**31,)},
        {"min_tokens": 9, "max_tokens": 3},
        {"stop": ("",)},
        {"logit_bias": {3: float("nan")}},
        {"logit_bias": {-1: 1.0}},
        {"n": 0},
        {"nonsense": 1},
    ],
)
def test_sampling_parameters_are_checked(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)  # type: ignore[arg-type]


def test_every_call_after_an_engines_death_gets_the_cause() -> None:
    with LLM("tiny", overrides=["engine.device=cpu", "engine.max_len=256"]) as llm:

        def broken() -> None:
            raise OSError("the device fell off")

        llm.engine.executor.collect = broken  # type: ignore[assignment, method-assign]
        with pytest.raises(RuntimeError, match="the device fell off"):
            llm.generate("x", GREEDY)
        with pytest.raises(RuntimeError, match="the device fell off"):
            llm.generate("x", GREEDY)
