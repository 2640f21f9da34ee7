"""Adapters through the whole engine, with the bundled model on the CPU."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail import LLM, CapabilityError, ConfigError, RequestError, SamplingParams

PROMPTS = ["def fib(n):\n", "import os\n\nclass Path:\n    def __init__(self, ", "for i in range(10):\n    "]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
BASE = ("engine.device=cpu", "engine.dtype=float32", "engine.max_len=128", "engine.max_seqs=8")
Save = Callable[..., str]
Alone = dict[str, list[list[int]]]


@pytest.fixture(scope="module")
def alone() -> Alone:
    """Adapter -> its tokens for each prompt, one request at a time; filled on demand."""
    return {}


def running(*overrides: str, **adapters: str) -> LLM:
    load = [f"+adapter.load.{name}='{folder}'" for name, folder in adapters.items()]
    return LLM("tiny", overrides=[*BASE, "adapter=lora", *load, *overrides])


def mixed(llm: LLM, names: tuple[str, ...], params: SamplingParams = GREEDY) -> list[list[int]]:
    """Return the tokens of every prompt with every adapter, all in the engine at once."""
    found: dict[int, list[list[int]]] = {}

    def ask(at: int, name: str) -> None:
        found[at] = [g.token_ids for g in llm.generate(PROMPTS, params, adapter=name)]

    threads = [threading.Thread(target=ask, args=(at, name)) for at, name in enumerate(names)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[at] for at in range(len(names))]


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["adapter.slots=3"], marks=pytest.mark.nightly),
        pytest.param(["adapter.slots=1", "engine.depth=2", "engine.token_budget=16"], marks=pytest.mark.nightly),
        pytest.param(
            ["adapter.slots=2", "engine.kv_pages=24", "spec_decode=ngram", "executor.delay=2", "engine.depth=4"],
            marks=pytest.mark.nightly,
        ),
        ["adapter.slots=1", "scheduler=static", "kv_cache=contiguous"],
    ],
    ids=" ".join,
)
def test_tokens_are_those_of_each_adapter_alone(overrides: list[str], save_lora: Save, alone: Alone) -> None:
    """Independent of concurrent requests, slots and preemption."""
    folders = {name: save_lora(name, seed=seed, rank=4 * seed) for seed, name in enumerate("abc", 1)}
    names = ("a", "", "b", "c", "a")
    for name in names[:4]:
        if name not in alone:
            with running(**{name: folders[name]} if name else {}) as llm:
                alone[name] = [llm.generate(prompt, GREEDY, adapter=name)[0].token_ids for prompt in PROMPTS]
    assert len(set(map(str, alone.values()))) == 4, "adapters without effect prove nothing"
    with running(*overrides, **folders) as llm:
        assert mixed(llm, names) == [alone[name] for name in names]
        llm.engine.kv.check()


def test_without_adapters_tokens_are_as_with_adapter_none(save_lora: Save) -> None:
    with LLM("tiny", overrides=BASE) as llm:
        expected = [g.token_ids for g in llm.generate(PROMPTS, GREEDY)]
        with pytest.raises(RequestError, match="adapter=none"):
            llm.generate(PROMPTS[0], GREEDY, adapter="a")
        with pytest.raises(RequestError, match="adapter=none"):
            llm.load_adapter("a", "/nowhere")
        assert llm.adapters == {}
    with running(a=save_lora("a", seed=1)) as llm:
        assert [g.token_ids for g in llm.generate(PROMPTS, GREEDY)] == expected


@pytest.mark.nightly
@pytest.mark.parametrize("kv_cache", ["prefix_hash", "radix"][: 2 if os.environ.get("DOVETAIL_GRID") == "pairs" else 1])
def test_cached_prefixes_are_not_shared_between_adapters(kv_cache: str, save_lora: Save) -> None:
    prompt = list(range(5, 105))
    folder = save_lora("a", seed=1)
    with running(f"kv_cache={kv_cache}", a=folder, b=save_lora("b", seed=2)) as llm:

        def cached(**request: str) -> int:
            return llm.generate(prompt, GREEDY, **request)[0].cached_tokens

        first = {name: cached(adapter=name) for name in ("", "a", "b")}
        again = {name: cached(adapter=name) for name in ("", "a", "b")}
        assert set(first.values()) == {0} and min(again.values()) >= 96
        # A salt that equals an adapter's internal key does not share, either.
        key = "a@1"
        assert cached(cache_salt=f"{key}\0") == cached(cache_salt="a", adapter="b") == 0
        llm.unload_adapter("a")
        llm.load_adapter("a", folder)
        assert cached(adapter="a") == 0


@pytest.mark.nightly
def test_loading_and_unloading_while_requests_run(save_lora: Save) -> None:
    a, b = save_lora("a", seed=1), save_lora("b", seed=2)
    with running("adapter.slots=1", "adapter.max_loaded=2") as llm:
        assert llm.adapters == {}
        with pytest.raises(RequestError, match="'a' is not loaded; there is none") as refused:
            llm.generate(PROMPTS[0], GREEDY, adapter="a")
        assert refused.value.status == 404
        llm.load_adapter("a", a)
        expected = llm.generate(PROMPTS[0], GREEDY, adapter="a")[0].token_ids
        with pytest.raises(RequestError, match="'a' is loaded already"):
            llm.load_adapter("a", b)
        deltas = llm.stream(PROMPTS[0], GREEDY, adapter="a")
        tokens = list(next(deltas).token_ids)
        llm.unload_adapter("a")
        # The name is free; running requests keep the unloaded adapter.
        with pytest.raises(RequestError, match="'a' is not loaded"):
            llm.generate(PROMPTS[0], GREEDY, adapter="a")
        llm.load_adapter("a", b)
        assert llm.adapters == {"a": b}
        with pytest.raises(RequestError, match="2 adapters are loaded, the limit is 2"):
            llm.load_adapter("c", a)
        other = llm.generate(PROMPTS[0], GREEDY, adapter="a")[0].token_ids
        for delta in deltas:
            tokens += delta.token_ids
        assert tokens == expected != other
        llm.load_adapter("c", a)
        assert llm.generate(PROMPTS[0], GREEDY, adapter="c")[0].token_ids == expected
        with pytest.raises(RequestError, match="'d' is not loaded; there is a, c"):
            llm.unload_adapter("d")
        for name in ("", "x" * 300, "a\nb"):
            with pytest.raises(RequestError, match="is no name"):
                llm.load_adapter(name, a)


def test_a_folder_that_does_not_fit_fails_the_start(save_lora: Save, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"rank 24.*hold at most 16.*adapter\.max_rank"):
        running(a=save_lora("a", seed=1, rank=24))
    with running("adapter.max_rank=32", a=str(tmp_path / "a")) as llm:
        llm.generate(PROMPTS[0], GREEDY, adapter="a")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(RequestError, match="no adapter_config.json"):
        running(a=str(tmp_path / "nothing"))


def test_a_missing_folder_is_an_error_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from dovetail.plugins.executor.inproc import InprocExecutor

    monkeypatch.delattr(InprocExecutor, "start")
    with pytest.raises(ConfigError, match="adapter sql: there is no folder /nowhere/sql"):
        running(sql="/nowhere/sql")


def test_samples_share_an_adapter_and_embeddings_have_it(save_lora: Save) -> None:
    params = SamplingParams(temperature=0.9, seed=5, n=3, max_tokens=12, ignore_eos=True)
    with running(a=save_lora("a", seed=1)) as llm:
        with_adapter, without = (llm.generate(PROMPTS[0], params, adapter=name)[0] for name in ("a", ""))
        assert [c.token_ids for c in with_adapter.completions] != [c.token_ids for c in without.completions]
        vectors = [llm.embed(PROMPTS[0], pooling="mean", adapter=name) for name in ("a", "")]
        assert abs(vectors[0] - vectors[1]).max() > 1e-3


def test_executors_without_adapters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from dovetail.core.compose import Capabilities
    from dovetail.plugins.executor import capabilities

    monkeypatch.setattr(capabilities, "inproc", lambda config, host: Capabilities(provides={"processes": "one"}))
    with pytest.raises(CapabilityError, match=r"adapter=lora requires executor with adapters.*does not state it"):
        running()
