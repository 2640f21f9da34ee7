"""Draft trees change no token, whatever their shape, and their accepted paths are as long as the drafts allow."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from dovetail import LLM, Component, Config, SamplingParams
from dovetail.core.compose import compose, installed
from dovetail.core.compose.registry import Package, Registered, Registry
from dovetail.core.engine.checks import check_fit
from dovetail.core.errors import CapabilityError, ConfigError
from dovetail.core.interfaces import Draft, DraftContext, Drafter, ForwardContext, HostBounds
from dovetail.core.ops.trees import TreeState, write_tree
from dovetail.core.testing.executor_scripts import PAGES_PER_SLOT, SLOTS, VOCAB, small_runner
from dovetail.core.worker.batch import lay_out
from dovetail.core.worker.runner import Runner
from dovetail.plugins.attention.sdpa import capabilities

pytestmark = pytest.mark.nightly

PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, repetition_penalty=1.2, frequency_penalty=0.5),
    SamplingParams(temperature=0.9, seed=2, top_p=0.9, max_tokens=24, logprobs=2),
    SamplingParams(temperature=1.0, seed=5, max_tokens=24, logit_bias={7: 2.0}, stop=")\n", n=2),
    SamplingParams(temperature=0.0, max_tokens=23, ignore_eos=True, logprobs=0),
]
HEAD = "import os\nimport sys\n\n\ndef main(argv=None):\n    "
PROMPTS = [HEAD + "parser = ", HEAD + "for name in os.listdir(", "class Stack:\n    def __init__(self", "x"]
NIGHTLY = pytest.mark.skipif(os.environ.get("DOVETAIL_GRID") != "pairs", reason="DOVETAIL_GRID=pairs")
FIXED = "spec_decode.tree_shape=sequoia"
BASE = ["engine.device=cpu", "engine.dtype=float32", "engine.max_len=96"]


class BushesConfig(Config):
    """No options."""


class Bushes(Drafter):
    """Trees of random shape. Where the plain text is known, some of their drafts are its next tokens."""

    lookahead = 12  # type: ignore[assignment]
    depth = 5  # type: ignore[assignment]
    texts: list[list[int]] = []
    lies = False

    def bind(self, target):  # type: ignore[no-untyped-def]
        super().bind(target)
        self.rng = random.Random(3)

    def propose(self, ctx: DraftContext) -> Draft:
        rows = zip(ctx.tokens_SL[ctx.slots_B].tolist(), ctx.lengths_B.tolist(), strict=True)
        trees = [self.tree(tokens[:length], ctx.k) for tokens, length in rows]
        tokens_BK, parents_BK = (torch.tensor([tree[i] for tree in trees]) for i in range(2))
        count_B = torch.full((len(trees),), ctx.k)
        if self.lies:
            # An id that does not exist, parents that follow their draft, drafts that are too deep, counts above k.
            tokens_BK[:, self.rng.randrange(6, 12)] = -(2**31)
            parents_BK[:, self.rng.randrange(6, 12)] = self.rng.choice((-2, 11, 2**40))
            if self.rng.random() < 0.3:
                parents_BK[:] = torch.arange(12) - 1
            count_B = torch.full_like(count_B, self.rng.choice((-1, 7, 99)))
        return Draft(tokens_BK, count_B, parents_BK)

    def tree(self, known: list[int], count: int) -> tuple[list[int], list[int]]:
        following = next((t[len(known) :] for t in self.texts if t[: len(known)] == known), [])
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        right: list[bool] = []
        for node in range(count):
            able = [-1, *(i for i in range(node) if depths[i] < self.depth)]
            parent = self.rng.choice(able[-3:])
            depth = 1 if parent < 0 else depths[parent] + 1
            path = parent < 0 or right[parent]
            known_next = path and depth <= len(following) and self.rng.random() < 0.6
            tokens.append(following[depth - 1] if known_next else self.rng.randrange(4096))
            parents.append(parent)
            depths.append(depth)
            right.append(known_next)
        return tokens, parents


@pytest.fixture(scope="module")
def registry() -> Iterator[Registry]:
    module = ModuleType("acme_bushes")
    module.Bushes = Bushes  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    component = Component(
        kind="spec_decode", name="bushes", config=BushesConfig, target="acme_bushes:Bushes", api="spec_decode/0.8"
    )
    own = installed()
    yield Registry(
        [*own.registered.values(), Registered(component, Package("acme", "1"))], own.problems, own.config_dirs
    )
    del sys.modules[module.__name__]


def run(registry: Registry, *words: str):  # type: ignore[no-untyped-def]
    with LLM(composition=compose([*BASE, *words], registry=registry)) as llm:
        found = llm.generate(PROMPTS, PARAMS)
        llm.engine.kv.check()
        counters, results = llm.engine.counters, []
        for generation in found:
            for c in generation.completions:
                results.append((c.token_ids, c.text, [lp.logprob for lp in c.logprobs or ()]))
        texts = [[*g.prompt_ids, *c.token_ids] for g in found for c in g.completions]
        return results, texts, counters.accepted, llm.engine.scheduler.stats().preemptions


@pytest.fixture(scope="module")
def plain(registry):  # type: ignore[no-untyped-def]
    results, Bushes.texts, *_ = run(registry)
    return results


def assert_equal(found, plain) -> None:  # type: ignore[no-untyped-def]
    for (ids, text, logprobs), (plain_ids, plain_text, plain_logprobs) in zip(found, plain, strict=True):
        assert (ids, text) == (plain_ids, plain_text)
        assert logprobs == pytest.approx(plain_logprobs, abs=1e-4)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["engine.depth=1"], marks=NIGHTLY),
        ["engine.depth=2", "engine.kv_pages=11", "scheduler.max_chunk=5"],
        pytest.param(["engine.depth=4", "executor.delay=3", "engine.token_budget=24"], marks=NIGHTLY),
    ],
    ids=lambda words: " ".join(words),
)
def test_text_is_that_of_plain_decoding(registry, plain, words) -> None:
    found, _, accepted, preempted = run(registry, "spec_decode=bushes", *words)
    assert_equal(found, plain)
    assert accepted > 40
    assert preempted > 0 or "engine.kv_pages=11" not in words


@pytest.mark.parametrize(
    "words",
    [
        ["spec_decode=draft_model", "spec_decode.lookahead=4", "spec_decode.tree=12", "engine.depth=2"],
        pytest.param(["spec_decode=eagle3", "spec_decode.tree=10", "spec_decode.width=3"], marks=NIGHTLY),
        pytest.param(["spec_decode=medusa", "spec_decode.lookahead=2", "spec_decode.tree=6"], marks=NIGHTLY),
        ["spec_decode=draft_model", "spec_decode.tree=12", FIXED, "engine.depth=2"],
        pytest.param(["spec_decode=eagle3", "spec_decode.tree=10", FIXED], marks=NIGHTLY),
        pytest.param(["spec_decode=medusa", "spec_decode.tree=6", FIXED], marks=NIGHTLY),
    ],
    ids=lambda words: " ".join(words),
)
def test_text_of_built_in_trees_is_that_of_plain_decoding(registry, plain, words) -> None:
    found, _, accepted, _ = run(registry, *words)
    assert_equal(found, plain)
    # Heads without trained weights are seldom right.
    assert accepted > 40 or "draft_model" not in words[0]


def test_rejection_of_fixed_trees_leaves_greedy_text(registry, plain) -> None:
    """Greedy rows beside random ones, whose text differs from plain decoding's for a seed."""
    fixed = "spec_decode.tree=12", FIXED, "spec_decode.verify=rejection"
    found, _, accepted, _ = run(registry, "spec_decode=draft_model", *fixed, "engine.depth=2")
    greedy = [0, *range(4, len(plain))]
    assert_equal([found[i] for i in greedy], [plain[i] for i in greedy])
    assert accepted > 40 and [row[0] for row in found] != [row[0] for row in plain]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["spec_decode.tree=4"], "tree=4 drafts in 4 levels are a chain: set tree=0 or over 4"),
        (["spec_decode.tree=65"], "less than or equal to 64"),
        (["spec_decode.width=2"], "width=2 is that of a tree"),
        (["spec_decode.tree=12", "spec_decode.width=5"], "set width=4 or less"),
        (
            ["spec_decode.tree=12", "spec_decode.width=1"],
            "width=1 in 4 levels .* tree=12: set a greater width, or null",
        ),
        (["spec_decode.tree=5"], "a chain: set tree=6 or more, lookahead=3 or less, or tree=0"),
        (["spec_decode.tree=12", "spec_decode.verify=typical"], "verify=typical verifies chains alone"),
        (
            ["spec_decode.tree=12", "spec_decode.verify=rejection"],
            "lossless only for trees whose shape .* tree_shape=seq",
        ),
        ([FIXED], "tree_shape=sequoia is that of a tree: set tree"),
        (["spec_decode.tree=12", "spec_decode.width=3", FIXED], "width=3 .* leave it out"),
    ],
    ids=lambda words: words[-1] if isinstance(words, list) else "",
)
def test_trees_that_cannot_grow_are_refused_in_words(words, error) -> None:
    with pytest.raises(ConfigError, match=error):
        compose([*BASE, "spec_decode=draft_model", *words])


def test_attention_without_tree_masks_is_refused_in_words(registry, monkeypatch) -> None:
    composition = compose([*BASE, "spec_decode=bushes"], registry=registry)
    monkeypatch.setattr(Bushes, "verify", "typical")
    monkeypatch.setattr(Bushes, "lookahead", 70)
    able = capabilities.capabilities

    def without(*given):  # type: ignore[no-untyped-def]
        found = able(*given)
        return replace(found, provides=found.provides | {"tree": False})

    monkeypatch.setattr(capabilities, "capabilities", without)
    with pytest.raises(CapabilityError) as refused:
        check_fit(composition)
    for words in ("70 tokens, and the limit is 64", "its verification is typical", "attention=sdpa has no tree masks"):
        assert words in str(refused.value)


def test_trees_that_lie_change_no_token(registry, plain, monkeypatch) -> None:
    monkeypatch.setattr(Bushes, "lies", True)
    found, _, accepted, _ = run(registry, "spec_decode=bushes", "engine.depth=2")
    assert_equal(found, plain)
    assert accepted > 10


def feed(runner: Runner, slot: int, tokens: list[int], first: int, decodes: int) -> torch.Tensor:
    """Feed tokens to the model, and return the logits after each."""
    parts, state = runner.parts, runner.state
    state.tokens_SL[slot, first : first + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    state.computed_S[slot] = first
    starts, host = torch.tensor([0, len(tokens)]).int(), HostBounds((len(tokens),), (first + len(tokens),), decodes)
    rows = torch.tensor([slot]), starts, len(tokens), host
    layout, attn = lay_out(*rows, state, parts.groups, parts.attention)
    ctx = ForwardContext(layout.positions_T, attn, layout.live_T)
    return parts.model.logits(parts.model.forward(parts.model.embed(layout.ids_T), ctx).states)


@pytest.mark.parametrize("window", [None, 4])
def test_logits_after_each_draft_are_those_of_its_path_fed_alone(window) -> None:
    """In layers with a window that is shorter than the paths, too."""
    rng, prompt, count = random.Random(5), list(range(1, 12)), 14
    more = (
        [] if window is None else [f"+model.hf.sliding_window={window}", "model.hf.architectures=[MistralForCausalLM]"]
    )
    runner = small_runner(*more)
    state = runner.state
    assert runner.parts.groups[0].window == (window or 0)
    state.tables[0][:SLOTS, :PAGES_PER_SLOT] = torch.arange(1, 1 + SLOTS * PAGES_PER_SLOT).view(SLOTS, -1).int()
    drafts = [rng.randrange(VOCAB) for _ in range(count)]
    parents = [-1, -1, *(rng.randrange(max(-1, node - 4), node) for node in range(2, count))]
    with torch.inference_mode():
        feed(runner, 0, prompt[:-1], 0, 0)
        state.trees = TreeState.empty(SLOTS + 1, count, 6, state.device)
        tree = torch.tensor([drafts]), torch.tensor([parents]), torch.tensor([count])
        row = torch.tensor([0]), torch.tensor([len(prompt)]), torch.tensor([count])
        write_tree(*tree, *row, state.tokens_SL, state.drafts_S, state.trees, VOCAB)
        kept = int(state.drafts_S[0])
        found_NV = feed(runner, 0, [prompt[-1], *drafts], len(prompt) - 1, 1)
        state.trees = None
        for node in range(kept):
            path, up = [], node
            while up >= 0:
                path.insert(0, drafts[up])
                up = parents[up]
            alone_NV = feed(runner, 1, [*prompt, *path], 0, 0)
            assert torch.allclose(found_NV[1 + node], alone_NV[-1], atol=1e-4), (node, path)
    assert kept > 6
    runner.close()
