"""Which steps get a graph, and that its layout and padding change no token. A replay runs the call again."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dovetail import LLM, Capabilities, Component, Config, SamplingParams
from dovetail.core.compose import compose, installed
from dovetail.core.compose.registry import Package, Registered, Registry
from dovetail.core.interfaces import MLA, PLAIN, AttentionBackend, Hidden, Row, RowFlag
from dovetail.core.ops import encode
from dovetail.core.testing.executor_scripts import quiet
from dovetail.core.testing.host_sync import NoHostSync
from dovetail.core.worker.batch import Rows
from dovetail.core.worker.device_state import DeviceState
from dovetail.core.worker.drafts import Drafts
from dovetail.core.worker.graph_sizes import MOST_PAIRS, DrawSize
from dovetail.core.worker.graphs import StepGraphs
from dovetail.core.worker.loader import load_rank
from dovetail.core.worker.runner import Runner, make_graphs
from dovetail.core.worker.slots import DRAWS, Draw
from dovetail.core.worker.warmup import failed_capture
from dovetail.plugins.executor.inproc import InprocExecutor
from dovetail.plugins.spec_decode.config import NgramConfig, NoneConfig
from dovetail.plugins.spec_decode.ngram import NgramDrafter
from dovetail.plugins.spec_decode.none import NoDrafter


class CountedModel:
    """Computes nothing, and counts the shapes that it is called with."""

    def __init__(self) -> None:
        self.build = SimpleNamespace(spec=SimpleNamespace(hidden=8, vocab=16), dtype=torch.float32)
        self.calls: Counter[tuple[str, int]] = Counter()

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(ids_T), 8)

    def forward(self, embeds_TC: torch.Tensor, ctx: Any, taps: Any) -> Hidden:
        self.calls["layers", len(embeds_TC)] += 1
        return Hidden(embeds_TC, {})

    def logits(self, states_NC: torch.Tensor) -> torch.Tensor:
        self.calls["logits", len(states_NC)] += 1
        return torch.zeros(len(states_NC), 16)

    def local_logits(self, states_NC: torch.Tensor) -> tuple[torch.Tensor, int]:
        return self.logits(states_NC), 0


class Autoregressive(NgramDrafter):
    autoregressive = True


def bare_graphs(
    lookahead: int = 0, model: CountedModel | None = None, drafter_class=NgramDrafter, most_rows: int = 100
) -> StepGraphs:
    """Graphs of up to 100 rows and, in mixed steps, 200 tokens."""
    state = DeviceState(slots=100, max_len=64, lookahead=lookahead, groups=(), device=torch.device("cpu"), seed=0)
    attention = FromDevice(None)
    drafter = drafter_class(NgramConfig(lookahead=lookahead)) if lookahead else NoDrafter(NoneConfig())
    return StepGraphs(
        model or CountedModel(),  # type: ignore[arg-type]
        state,
        (),
        attention,
        Drafts(drafter, state, attention, vocab=16),
        most_rows=most_rows,
        most_tokens=200,
        max_len=64,
    )


def run_nothing(call: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
    """Replace the recorder where graphs are picked and not run."""
    return call, (None, None)


@pytest.mark.parametrize("lookahead", [0, 4])
def test_some_graph_serves_a_chunk_and_any_number_of_decode_rows(lookahead: int) -> None:
    """Decode rows feed one token each, or as many as possible."""
    mixed = [capacity for capacity in bare_graphs(lookahead).capacities if capacity.chunks]
    for decodes in range(1, 100):
        for width in (1, 1 + lookahead):
            tokens = min(decodes * width + 1, 200)
            assert any(tokens <= capacity.tokens and decodes <= capacity.decodes for capacity in mixed)


def test_steps_without_drafts_take_no_larger_graphs_if_there_is_a_drafter() -> None:
    both = [bare_graphs(lookahead) for lookahead in (0, 4)]
    for graphs in both:
        graphs.capture(run_nothing, quiet)
    decode, sample = int(RowFlag.DECODE | RowFlag.SAMPLE), int(RowFlag.SAMPLE)
    for decodes in range(1, 90):
        for chunk in (0, 20, 64):
            rows = [Row(n, n, 0, 1, 50, 0, decode) for n in range(decodes)]
            rows += [Row(90, 90, 0, chunk, chunk, 0, sample)] if chunk else []
            one, other = (graphs.pick(Rows(rows).shape) for graphs in both)
            assert one is not None and other is not None and one.capacity.tokens == other.capacity.tokens


@pytest.mark.parametrize("most_rows", [1, 3, 100])
@pytest.mark.parametrize("lookahead", [4, 7])
def test_steps_of_few_drafts_make_no_more(lookahead: int, most_rows: int) -> None:
    """Where each draft takes a pass: graphs that begin with the passes make all drafts."""
    graphs = bare_graphs(lookahead, drafter_class=Autoregressive, most_rows=most_rows)
    graphs.capture(run_nothing, quiet)
    decode = int(RowFlag.DECODE | RowFlag.SAMPLE)
    for rows, drafts in product(range(1, min(most_rows, 20) + 1), range(1, lookahead + 1)):
        found = graphs.pick(Rows([Row(n, n, 0, 1 + drafts, 50, drafts, decode) for n in range(rows)]).shape)
        assert found is not None
        if drafts < lookahead or rows in graphs.sizes:
            assert found.capacity.drafts is (graphs.drafts.count(drafts) == lookahead)


def test_chunks_with_long_contexts_run_without_a_graph() -> None:
    """Contexts of all chunks count together; those of decode rows do not count."""
    graphs = bare_graphs()
    graphs.capture(run_nothing, quiet)
    decode, sample = int(RowFlag.DECODE | RowFlag.SAMPLE), int(RowFlag.SAMPLE)

    def picked(*chunks: tuple[int, int]) -> bool:
        rows = [Row(0, 0, 0, 1, 1 << 17, 0, decode)]
        rows += [Row(n, n, 0, count, bound, 0, sample) for n, (count, bound) in enumerate(chunks, 1)]
        return graphs.pick(Rows(rows).shape) is not None

    longest = MOST_PAIRS // 64
    assert picked() and picked((64, longest)) and picked((64, longest // 2), (64, longest // 2))
    assert not picked((64, longest + 1)) and not picked((64, longest // 2), (65, longest // 2))


def test_graphs_of_latents_have_the_limit_of_their_heads() -> None:
    """128 heads on two ranks: a chunk of 1500 tokens has more than 2.0 million pairs, one of 1400 has fewer."""
    model = CountedModel()
    model.build.spec.mla = MLA(q_rank=0, kv_rank=512, rope_dim=64, nope_dim=128, v_dim=128)
    model.build.spec.heads = 128
    bare = bare_graphs(model=model)
    engine = SimpleNamespace(max_seqs=100, drafts="always", tp=2)
    parts = SimpleNamespace(model=model, groups=(), attention=bare.attention, engine=engine, graph_tokens=2048)
    parts.max_len, parts.adapters, parts.processors = 4096, None, {}
    graphs = make_graphs(parts, bare.state, bare.drafts)  # type: ignore[arg-type]
    graphs.capture(run_nothing, quiet)

    def picked(count: int) -> bool:
        return graphs.pick(Rows([Row(0, 0, 0, count, count, 0, int(RowFlag.SAMPLE))]).shape) is not None

    assert picked(1400) and not picked(1500)


def test_warm_up_runs_all_that_is_captured() -> None:
    """Otherwise kernels that only one size needs would be compiled during capture, one after another."""
    captured, warm = CountedModel(), CountedModel()
    bare_graphs(4, captured).capture(lambda call: (call, call()), quiet)
    bare_graphs(4, warm).warm_up()
    assert len(captured.calls) > 50 and warm.calls == captured.calls


def broken(call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """A capture that fails as CUDA's do: its end raises another error."""
    try:
        call()
        raise RuntimeError("operation not permitted when stream is capturing")
    finally:
        raise RuntimeError("operation failed due to a previous error during capture")


def test_a_trial_capture_says_what_broke_it() -> None:
    rank = load_rank(compose(["model=tiny_draft", "engine.device=cpu", "engine.kv_pages=64"]), quiet)
    captured: list[Any] = []
    assert failed_capture(rank.parts, lambda call: captured.append(call()) or (call, None)) is None
    assert len(captured) == 1  # The backend captures decode steps only.
    assert failed_capture(rank.parts, broken) == "operation not permitted when stream is capturing"
    rank.close()


# Steps with the layout of graphs, on any device.


class FromDevice(AttentionBackend):
    """Reads nothing but the metadata's tensors, so one plan serves any step of its capacity."""

    def attend(self, layer, ctx, q, emit=(PLAIN,)):
        meta, pool = ctx.meta, self.pools[layer.group]
        place_T = torch.arange(len(q))
        at_T = meta.kv_len_B[meta.rows_T] - (meta.row_start_B1[meta.rows_T + 1] - place_T)
        at_T = torch.where(place_T < meta.row_start_B1[-1], at_T, -1)
        key_L = torch.arange(meta.page_table_BP.shape[1] * meta.page_tokens)
        page_TL = meta.page_table_BP[meta.rows_T][:, key_L // meta.page_tokens].long()
        slots_TL = page_TL * meta.page_tokens + key_L % meta.page_tokens
        seen_TL = key_L <= at_T[:, None]
        if meta.tree is not None:
            back_TL = key_L - meta.tree.root_T[:, None] - 1
            path_TL = (back_TL < 0) | (meta.tree.ancestors_T[:, None] >> back_TL.clamp(0, 63) & 1 != 0)
            fed_T = (meta.rows_T < ctx.host.num_decode) & (at_T >= 0)
            seen_TL = torch.where(fed_T[:, None], path_TL, seen_TL)
        k_TKLD, v_TKLD = (
            torch.where(seen_TL[:, :, None, None], pool.layer(layer.local, name).flatten(0, 1)[slots_TL], 0)
            .transpose(1, 2)
            .repeat_interleave(layer.heads // layer.kv_heads, 1)
            for name in ("k", "v")
        )
        mask = seen_TL[:, None, None, :]
        out = F.scaled_dot_product_attention(q[:, :, None], k_TKLD, v_TKLD, attn_mask=mask, scale=layer.scale)
        return encode(out.flatten(1), emit)


NIGHTLY = pytest.mark.skipif(os.environ.get("DOVETAIL_GRID") != "pairs", reason="half a minute: DOVETAIL_GRID=pairs")
TREE = "draft_model spec_decode.lookahead=3 spec_decode.tree=6"


class Options(Config):
    """None."""


def provides(config: object, host: object) -> Capabilities:
    return Capabilities(provides={"kinds": ("full",), "exact_lengths": "device", "tree": True, "graphs": "mixed"})


@pytest.fixture(scope="module")
def registry() -> Iterator[Registry]:
    module = ModuleType("acme_attention")
    module.FromDevice, module.provides = FromDevice, provides  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    component = Component(
        kind="attention",
        name="from_device",
        config=Options,
        target="acme_attention:FromDevice",
        capabilities="acme_attention:provides",
        api="attention/0.4",
    )
    own = installed()
    part = Registered(component, Package("acme", "1.0"))
    yield Registry([*own.registered.values(), part], own.problems, own.config_dirs)
    del sys.modules[module.__name__]


def tensors(outputs: Any) -> list[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    if isinstance(outputs, dict):
        outputs = tuple(outputs.values())
    elif not isinstance(outputs, tuple):
        outputs = tuple(getattr(outputs, name) for name in getattr(outputs, "__slots__", ()))
    return [tensor for output in outputs for tensor in tensors(output)]


def run_again(call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Replace a CUDA graph: a replay runs the call again and writes its outputs into the same tensors."""
    outputs = call()

    def replay() -> None:
        with NoHostSync("a step"):
            again = call()
        for kept, new in zip(tensors(outputs), tensors(again), strict=True):
            kept.copy_(new)

    return replay, outputs


class Bound:
    """A loaded rank whose KV pages hold NaN, and whose steps run as graphs if `graphs`."""

    graphs = False

    def __init__(self, composition: Any, progress: Any, **options: Any) -> None:
        self.rank = load_rank(composition, progress, **options)
        self.info, self.close = self.rank.info, self.rank.close

    def bind(self, num_pages: Any) -> Runner:
        capture = (lambda graphs: graphs.capture(run_again, quiet)) if self.graphs else None
        runner = Runner(self.rank.parts, num_pages, capture)
        for pool in runner.pools.values():
            for plane in pool.planes.values():
                plane.fill_(float("nan"))
        return runner


class WithGraphs(Bound):
    graphs = True


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Number of steps and draws by kind of graph."""
    kinds: Counter[str] = Counter()
    pick, draw, picked = StepGraphs.pick, StepGraphs.draw, [None]

    def counted(self: StepGraphs, rows: Any, adapted: bool = False, **wanted: bool) -> Any:
        graph = picked[0] = pick(self, rows, adapted, **wanted)
        kind = "none" if graph is None else "mixed" if graph.capacity.chunks else "decode"
        kinds[f"wide {kind}"] += graph is not None and graph.capacity.width > 1
        kinds["ragged"] += graph is not None and graph.capacity.ragged
        kinds[f"unfollowed {kind}"] += graph is not None and not graph.capacity.follows
        kinds[f"adapted {kind}" if adapted else kind] += 1
        return graph

    def drawn(self: StepGraphs, size: DrawSize, rows: int, what: Draw, logprobs: int | None) -> Any:
        kinds[str(what)] += 1
        kinds["wide draw of log-probabilities"] += size.width > 1 and logprobs is not None
        kinds["ragged draw of log-probabilities"] += size.tokens > 0 and logprobs is not None
        kinds["narrow draw after a wide graph"] += picked[0] is not None and picked[0].capacity.width > size.width
        sampled = draw(self, size, rows, what, logprobs)
        if sampled.logprobs is not None:
            # The next replay overwrites them; on a GPU they are copied before it.
            sampled.logprobs = tuple(values.clone() for values in sampled.logprobs)  # type: ignore[assignment]
        return sampled

    monkeypatch.setattr(StepGraphs, "pick", counted)
    monkeypatch.setattr(StepGraphs, "draw", drawn)
    return kinds


def run(registry: Registry, rank: type[Bound], drafter: str, budget: int, **adapters: str) -> list[Any]:
    """Each prompt twice, so that some are in the cache."""
    words = ["attention=from_device", "engine.device=cpu", "engine.depth=2", "engine.max_seqs=5", "engine.max_len=96"]
    component, *options = drafter.split()
    words += [
        f"spec_decode={component}",
        *options,
        f"engine.token_budget={budget}",
        "engine.kv_pages=64",
        "kv_cache=prefix_hash",
    ]
    words += (
        ["adapter=lora", *(f"+adapter.load.{name}='{path}'" for name, path in adapters.items())] if adapters else []
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InprocExecutor, "loader", f"{__name__}:{rank.__name__}")
        llm = LLM(composition=compose(words, registry=registry))
    with llm:
        if drafter != "none":
            # Some steps verify all drafts, in others rows have unlike numbers, and some have none.
            most = llm.engine.info.lookahead
            count = lambda seq, ctx: (0, most, seq.uid % (most + 1))[ctx.step % 3]  # noqa: E731
            llm.engine.scheduler.draft_tokens = count  # type: ignore[attr-defined]
            # The drafter follows the prompts of some steps.
            follow = lambda plan, sequences: setattr(plan, "follows", plan.step % 3 > 0)  # noqa: E731
            llm.engine.scheduler._drafting._follow = follow  # type: ignore[attr-defined]
        texts = ["def fib(n):\n", "import os\n\nclass Path:\n    def __init__(self, ", "x", "for i in range(10):\n" * 3]
        texts += ['"""Return the', "class Node:\n"]
        params = [
            SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
            SamplingParams(temperature=0.9, seed=5, max_tokens=7, n=2),
            SamplingParams(temperature=0.0, max_tokens=9, logprobs=2, prompt_logprobs=1),
            SamplingParams(temperature=1.1, seed=1, max_tokens=11),
            SamplingParams(temperature=0.7, top_p=0.8, seed=2, max_tokens=6),
            SamplingParams(temperature=0.0, max_tokens=10, repetition_penalty=1.3),
        ]
        found = [llm.generate(texts, params) for _ in range(2)]
        filters = [{"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.5, "seed": 8}, {}]
        random = [SamplingParams(temperature=0.9, max_tokens=6, **each) for each in filters]
        found.append(llm.generate(texts[:5], random))
        found.append(llm.generate(texts[:2], SamplingParams(temperature=0.9, seed=7, max_tokens=6)))
        found.append(llm.generate([f"# {text}" for text in texts], SamplingParams(temperature=0.0, max_tokens=6)))
        detailed = [{"logprobs": 4, "seed": 3}, {"logprobs": 0, "temperature": 0.0}, {"top_p": 0.9, "seed": 4}]
        found.append(llm.generate(texts[:3], [SamplingParams(max_tokens=9, **each) for each in detailed]))
        detailed += [{"logit_bias": {7: 4.0}, "logprobs": 2, "temperature": 0.0}, {"min_tokens": 4, "top_k": 9}]
        found.append(llm.generate(texts[:5], [SamplingParams(max_tokens=9, **each) for each in detailed]))
        found.append(llm.generate(texts[:2], SamplingParams(max_tokens=6, seed=5, frequency_penalty=0.5)))
        found += [llm.generate(texts, params, adapter=name) for name in adapters]
        vectors = llm.embed(texts, pooling="mean")
    completions = [s for each in found for g in each for s in g.completions]
    tokens = [s.token_ids for s in completions]
    logprobs = [
        [(round(each.logprob, 3), [token for token, _ in each.top]) for each in s.logprobs] for s in completions
    ]
    return [tokens, logprobs, [vector.round(4).tolist() for vector in vectors]]


@pytest.mark.parametrize(
    ("drafter", "budget"),
    [
        pytest.param("none", 24, marks=pytest.mark.nightly),
        pytest.param("ngram", 40, marks=pytest.mark.nightly),
        pytest.param("draft_model", 40, marks=pytest.mark.nightly),
        pytest.param(TREE, 60, marks=NIGHTLY),
    ],
)
def test_the_layout_of_graphs_changes_no_token(
    registry: Registry, kinds: Counter[str], drafter: str, budget: int
) -> None:
    expected = run(registry, Bound, drafter, budget)
    assert run(registry, WithGraphs, drafter, budget) == expected
    assert kinds["mixed"] > 3 and kinds["decode"] > 5, kinds
    assert min(kinds[str(what)] for what in DRAWS) > 2, kinds
    if drafter != "none":
        assert 3 < kinds["wide decode"] < kinds["decode"] - 3, kinds
        assert kinds["narrow draw after a wide graph"] > 2 and kinds["wide draw of log-probabilities"] > 2, kinds
        assert kinds["ragged"] > 5 and kinds["ragged draw of log-probabilities"] > 2, kinds
    if drafter == "draft_model":
        assert 2 < kinds["unfollowed mixed"] < kinds["mixed"] - 2, kinds


@pytest.mark.nightly
def test_steps_with_adapters_have_graphs_of_their_own(
    registry: Registry, kinds: Counter[str], save_lora: Callable[..., str]
) -> None:
    folders = {"a": save_lora("a", seed=1), "b": save_lora("b", seed=2)}
    expected = run(registry, Bound, "none", 40, **folders)
    assert run(registry, WithGraphs, "none", 40, **folders) == expected
    assert min(kinds[kind] for kind in ("mixed", "decode", "adapted mixed", "adapted decode")) > 3, kinds


@pytest.mark.nightly
@pytest.mark.parametrize("graph_tokens", [0, 32])
def test_lanes_draft_together_in_graphs(
    registry: Registry, kinds: Counter[str], monkeypatch: pytest.MonkeyPatch, graph_tokens: int
) -> None:
    """The drafter has experts, which all lanes share. One lane has no work."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "tp"))
    import lane_threads

    made, model = compose, ("model=small_moe", "engine.max_seqs=4", "engine.max_len=64")
    monkeypatch.setattr(lane_threads, "compose", lambda words: made(words, registry=registry))
    monkeypatch.setattr(InprocExecutor, "loader", f"{__name__}:WithGraphs")
    drafting = ("spec_decode=draft_model", "model@spec_decode.model=small_moe", "engine.drafts=always")
    placed = ("experts=all_to_all", "experts.capacity=0.5", "engine.ep=2", f"engine.graph_tokens={graph_tokens}")
    params = [SamplingParams(temperature=t, seed=3, max_tokens=9, ignore_eos=True) for t in (0.0, 0.9, 0.0)]
    prompts = [7, 300, 21, 4], [9] * 40, [5] * 7
    script = [lane_threads.Work(i, *each, after=3 * i) for i, each in enumerate(zip(prompts, params, strict=True))]
    with lane_threads.lanes(2, "attention=from_device", *model, *drafting, *placed) as run:
        done, idle = run([script, []])
    assert idle.empty > 5 and kinds["wide decode"] > 5 and bool(kinds["wide mixed"]) is bool(graph_tokens), kinds
    monkeypatch.undo()
    assert done.tokens == lane_threads.alone(script, *model).tokens
