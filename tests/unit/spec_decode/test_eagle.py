"""EAGLE and EAGLE-3: their drafts are those of the published code, and the same however a sequence is scheduled."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from dovetail import LLM, Grammar, SamplingParams
from dovetail.core.engine.drafting import Drafting
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import Draft, DraftContext, FedTokens, Hidden
from dovetail.core.testing.draft_bench import Bench
from dovetail.core.testing.executor_scripts import small_composition
from dovetail.plugins.model import bundled
from dovetail.plugins.spec_decode.eagle import Eagle, Eagle3
from dovetail.plugins.spec_decode.eagle_files import TAPS
from dovetail.plugins.spec_decode.eagle_layer import Eagle3Layer

from .heads import DRAFT_VOCAB, HIDDEN, VOCAB, bound, eagle_tensors, save_head, view_of_tiny

DRAFTERS = {"eagle": Eagle, "eagle3": Eagle3}
K = 3


# Drafts against a plain implementation.


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def rotate(x_HTD: torch.Tensor) -> torch.Tensor:
    half = x_HTD.shape[-1] // 2
    angles_TD = torch.arange(x_HTD.shape[1])[:, None] / 10000 ** (torch.arange(half) / half)
    cos, sin = angles_TD.cos(), angles_TD.sin()
    a, b = x_HTD.split(half, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def published(
    name: str, tensors: dict[str, torch.Tensor], embeds_TC: torch.Tensor, features_TF: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the feature that the layer predicts after the last token, and its own logits over the draft vocabulary;
    without pages, as in the published code."""

    def linear(x: torch.Tensor, module: str) -> torch.Tensor:
        return F.linear(x, tensors[f"{module}.weight"], tensors.get(f"{module}.bias"))

    layer = "layers.0" if name == "eagle" else "midlayer"
    if name == "eagle":
        residual = x = linear(torch.cat((embeds_TC, features_TF), -1), "fc")
    else:
        residual = features_TF
        normed = (
            norm(embeds_TC, tensors[f"{layer}.input_layernorm.weight"]),
            norm(features_TF, tensors[f"{layer}.hidden_norm.weight"]),
        )
        x = torch.cat(normed, -1)
    q, k, v = (
        linear(x, f"{layer}.self_attn.{part}_proj").view(len(x), heads, 32).transpose(0, 1)
        for part, heads in (("q", 4), ("k", 2), ("v", 2))
    )
    attended = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
    residual = residual + linear(attended.transpose(0, 1).flatten(1), f"{layer}.self_attn.o_proj")
    x = norm(residual, tensors[f"{layer}.post_attention_layernorm.weight"])
    x = F.silu(linear(x, f"{layer}.mlp.gate_proj")) * linear(x, f"{layer}.mlp.up_proj")
    predicted_C = (residual + linear(x, f"{layer}.mlp.down_proj"))[-1]
    return predicted_C, None if name == "eagle" else linear(norm(predicted_C, tensors["norm.weight"]), "lm_head")


class Recorded:
    """Makes a drafter keep the features that it observes."""

    seen: dict[tuple[int, int], torch.Tensor]

    def observe(self, fed: FedTokens, hidden: Hidden) -> None:
        features_TF = torch.cat(self.features_of(hidden), -1)  # type: ignore[attr-defined]
        for slot, at, feature_F in zip(fed.slots_T.tolist(), fed.ctx.positions_T.tolist(), features_TF, strict=True):
            self.seen[slot, at] = feature_F
        super().observe(fed, hidden)  # type: ignore[misc]


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_are_those_of_the_published_layer(name: str, tmp_path: Path) -> None:
    tensors = save_head(tmp_path / name, name)
    words = [f"spec_decode={name}", f"spec_decode.path={tmp_path / name}", f"spec_decode.lookahead={K}"]
    config = small_composition(*words).part("spec_decode").config
    drafter: Any = type("Kept", (Recorded, DRAFTERS[name]), {})(config)
    drafter.seen = {}
    view = view_of_tiny()
    table_VC = view.embed(torch.arange(VOCAB))
    drafter.bind(view)
    bench = Bench(drafter, view)
    histories = {2: torch.randint(VOCAB, (23,)).tolist(), 0: torch.randint(VOCAB, (9,)).tolist(), 1: [5]}
    bench.seat(histories, chunk=7)
    bench.state.temperature_S.fill_(0.0)
    found = bench.guess()
    for (slot, ids), guesses in zip(histories.items(), found, strict=True):
        ids = list(ids)
        features = [torch.zeros_like(next(iter(drafter.seen.values())))]
        features += [drafter.seen[slot, at] for at in range(len(ids) - 1)]
        fed_TF = torch.stack(features)
        fed_TF = fed_TF if name == "eagle" else F.linear(fed_TF, tensors["fc.weight"])
        for draft in guesses.tokens:
            predicted_C, logits_D = published(name, tensors, table_VC[ids], fed_TF)
            if logits_D is None:
                token = int((table_VC @ predicted_C).argmax())
            else:
                best = int(logits_D.argmax())
                token = best + int(tensors["d2t"][best])
            assert token == draft
            ids.append(token)
            fed_TF = torch.cat((fed_TF, predicted_C[None]))
        assert len(guesses.tokens) == K


# Drafts in the engine.

BASE = ["engine.device=cpu", "engine.dtype=float32", "engine.max_len=128", "engine.page_size=8"]
PREFIX = "import os\nimport sys\n\n\ndef main(argv=None):\n    "
PROMPTS = [PREFIX + "parser = ", PREFIX + "for name in os.listdir(", "x"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=15, ignore_eos=True, n=2),
    SamplingParams(temperature=0.7, seed=5, max_tokens=14, ignore_eos=True),
]
VARIANTS = {
    "alone": ["engine.max_seqs=1"],
    "small chunks, preempted, depth 4, results late": [
        *("engine.token_budget=11", "engine.max_seqs=3", "engine.kv_pages=9", "engine.depth=4", "executor.delay=3")
    ],
    "radix, depth 2": ["kv_cache=radix", "engine.depth=2"],
}
Drafted = dict[tuple[int, int], list[int]]


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Drafted]:
    """(key of a sequence's draws, length) -> drafts, by every drafter that proposes."""
    found: Drafted = {}
    propose = Eagle.propose

    def kept(self: Eagle, ctx: DraftContext) -> Draft:
        draft = propose(self, ctx)
        counts = torch.minimum(draft.count_B, ctx.k_B).tolist()
        rows = zip(ctx.key_S[ctx.slots_B].tolist(), ctx.lengths_B.tolist(), strict=True)
        for row, count, tokens in zip(rows, counts, draft.tokens_BK.tolist(), strict=True):
            if count:
                known = found.setdefault(row, tokens[:count])
                assert all(map(int.__eq__, known, tokens[:count])), f"{row}: {known} before, {tokens[:count]} now"
        return draft

    monkeypatch.setattr(Eagle, "propose", kept)
    yield found


@pytest.mark.nightly
def test_drafts_do_not_depend_on_scheduling(tmp_path: Path, drafted: Drafted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, prefix hits in the middle of a page, forks, preemption and reused slots: the drafts of a sequence that
    runs alone, token for token, and the text of plain decoding."""
    save_head(tmp_path / "head", "eagle3")
    with LLM("tiny", overrides=BASE) as llm:
        plain = [generation.token_ids for generation in llm.generate(PROMPTS, PARAMS)]
    words = ["spec_decode=eagle3", f"spec_decode.path={tmp_path / 'head'}", f"spec_decode.lookahead={K}"]
    for variant in VARIANTS.values():
        drafted_before = len(drafted)
        with LLM("tiny", overrides=[*BASE, *words, *variant]) as llm:
            for _ in range(2):  # The second round finds the prompts in the prefix cache.
                assert [generation.token_ids for generation in llm.generate(PROMPTS, PARAMS)] == plain
            counters = llm.engine.counters
            assert counters.drafted > 100 and counters.cached_tokens > 0 and llm.engine.kv.stats().owned == 0
            assert (llm.engine.scheduler.stats().preemptions > 0) is ("engine.kv_pages=9" in variant)
    assert drafted_before == len(drafted) > 40, "all variants draft after the same texts"
    # Rows whose prompts or cached prefixes it did not follow have no drafts, and the others those of before.
    monkeypatch.setattr(Drafting, "_follow", lambda self, plan, sequences: setattr(plan, "follows", plan.step % 3 > 0))
    with LLM("tiny", overrides=[*BASE, *words, "engine.depth=2", "engine.token_budget=17"]) as llm:
        for _ in range(2):
            assert [generation.token_ids for generation in llm.generate(PROMPTS, PARAMS)] == plain
        counters = llm.engine.counters
    assert 0 < counters.drafted < K * counters.decode_rows / 2 and len(drafted) == drafted_before


@pytest.mark.parametrize("verify", ["draws", pytest.param("rejection", marks=pytest.mark.nightly)])
def test_nothing_writes_outside_of_the_draft_vocabulary(
    verify: str, tmp_path: Path, drafted: Drafted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass writes the logits of the draft vocabulary into one buffer. Filters, logits processors and grammars
    leave the rest of it at -inf, and drafts are those of fresh logits."""
    save_head(tmp_path / "head", "eagle3")
    params = [
        PARAMS[0].model_copy(update={"logit_bias": {7: 90.0, 300: -90.0}}),
        PARAMS[1].model_copy(update={"n": 1, "top_k": 20, "top_p": 0.9, "presence_penalty": 0.5}),
        PARAMS[2].model_copy(update={"grammar": Grammar(kind="regex", value="[a-c ]{9,20}"), "ignore_eos": False}),
    ]
    words = [f"spec_decode.path={tmp_path / 'head'}", f"spec_decode.lookahead={K}", f"spec_decode.verify={verify}"]
    layers: list[Eagle3Layer] = []
    reserve, texts, counts = Eagle3Layer.reserve, [], []
    for then in (reserve, lambda layer, rows: None):
        monkeypatch.setattr(Eagle3Layer, "reserve", lambda *given, then=then: (layers.append(given[0]), then(*given)))
        with LLM("tiny", overrides=[*BASE, "spec_decode=eagle3", *words, "engine.max_seqs=4"]) as llm:
            texts.append([generation.token_ids for generation in llm.generate(PROMPTS, params)])
        counts.append(len(drafted))
    assert texts[0] == texts[1] and 10 < counts[0] <= counts[1] < 2 * counts[0]
    logits_MV, without_MV = (layer._logits_MV for layer in layers)
    written = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, layers[0].ids_D, True)
    assert without_MV is None and logits_MV.shape == (4, VOCAB) and logits_MV[0, written].isfinite().all()
    assert (logits_MV[:, ~written] == float("-inf")).all()


def test_every_draft_of_a_perfect_head_is_accepted(tmp_path: Path) -> None:
    """A target whose next token depends on the last one alone, and a head that repeats the embedding."""
    source = Path(bundled.__file__).parent / "tiny"
    shutil.copytree(source, tmp_path / "target")
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "target" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    tensors["model.norm.weight"] = torch.ones(HIDDEN)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].roll(1, 0)
    save_file(tensors, tmp_path / "target" / "model.safetensors")
    silent = {f"layers.0.{name}.weight": 0 for name in ("self_attn.o_proj", "mlp.down_proj")}
    zeros = {name: torch.zeros_like(eagle_tensors()[name]) for name in silent}
    fc = torch.cat((torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)), 1)
    save_head(tmp_path / "head", "eagle", tensors=zeros | {"fc.weight": fc, "fc.bias": torch.zeros(HIDDEN)})
    words = ["spec_decode=eagle", f"spec_decode.path={tmp_path / 'head'}", "engine.depth=2", "engine.token_budget=9"]
    with LLM(tmp_path / "target", overrides=[*BASE, *words]) as llm:
        llm.generate(PROMPTS, PARAMS[0])
        counters = llm.engine.counters
    assert counters.accepted == counters.drafted > 20


# Bad input.


@pytest.mark.parametrize(
    ("name", "config", "tensors", "says"),
    [
        ("eagle", {"hidden_size": 128}, {}, "a hidden size of 128, and this model has 256"),
        ("eagle", {"vocab_size": 32000}, {}, "a vocabulary of 32000, and this model has 4096"),
        ("eagle", {"num_hidden_layers": 2}, {}, "num_hidden_layers is 2; spec_decode=eagle runs heads of one layer"),
        ("eagle", {"hidden_act": "gelu"}, {}, "hidden_act is 'gelu'; the options are silu"),
        ("eagle", {}, {"fc.weight": None}, "model.safetensors: .*1 missing .*fc.weight"),
        (
            "eagle",
            {},
            {"fc.weight": torch.zeros(HIDDEN, HIDDEN)},
            r"fc.weight. has shape .256, 256.* must be .256, 512",
        ),
        ("eagle", {}, {"layers.1.mlp.up_proj.weight": torch.zeros(1)}, "1 unexpected .*layers.1.mlp.up_proj"),
        ("eagle3", {TAPS: [2, 4, 9]}, {}, "after 2, 4, 9 layers, and the model has 8: they must be from 1 to 8"),
        (
            "eagle3",
            {"eagle_config": {TAPS: [2, 4]}},
            {},
            f"eagle_config.{TAPS} is .2, 4.; .* fuses the states of 3 layers",
        ),
        ("eagle3", {"draft_vocab_size": 5000}, {}, "draft_vocab_size is 5000; it must be from 1 to 4096"),
        ("eagle3", {}, {"d2t": None}, "1 missing .*d2t"),
        ("eagle3", {}, {"d2t": torch.zeros(DRAFT_VOCAB)}, "d2t. is 'F32' in the checkpoint; it must be I64 or I32"),
        ("eagle3", {}, {"d2t": torch.full((DRAFT_VOCAB,), 4000)}, "d2t. maps draft id 96 to 4096; .* below 4096"),
        ("eagle3", {}, {"d2t": -torch.arange(DRAFT_VOCAB)}, "d2t. maps several draft ids to one id"),
        ("eagle3", {}, {"norm.weight": torch.full((HIDDEN,), float("nan"))}, "norm.weight' has values that are NaN"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    name: str, config: dict[str, Any], tensors: dict[str, Any], says: str, tmp_path: Path
) -> None:
    save_head(tmp_path / "head", name, config, tensors)
    with pytest.raises(ConfigError, match=says) as error:
        bound(name, tmp_path / "head")
    assert str(error.value).isprintable()


def test_pickled_weights_are_refused_with_the_command_that_converts_them(tmp_path: Path) -> None:
    tensors = save_head(tmp_path / "head", "eagle")
    (tmp_path / "head" / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "head" / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="weights are pickled .pytorch_model.bin., which would run code") as error:
        bound("eagle", tmp_path / "head")
    command = str(error.value).partition("inside the folder: ")[2]
    subprocess.run(command.replace("python", sys.executable, 1), shell=True, check=True, cwd=tmp_path / "head")
    bound("eagle", tmp_path / "head")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["spec_decode.hf={}", "spec_decode.path=somewhere"], "both of spec_decode.path and spec_decode.hf given"),
        (["spec_decode.hf={}"], "spec_decode.hf has shapes but no weights"),
        (["spec_decode.path=nowhere/at/all"], "spec_decode.path=nowhere/at/all: there is no such folder"),
    ],
)
def test_a_head_that_is_not_there_is_refused(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        small_composition("spec_decode=eagle", *words).part("spec_decode").build().bind(view_of_tiny())


def test_a_kind_of_head_without_a_bundled_one_needs_a_folder() -> None:
    says = r"neither of spec_decode\.path and spec_decode\.hf given: .* such as spec_decode=parallel_llama3_8b "
    with pytest.raises(ConfigError, match=says):
        small_composition("spec_decode=parallel")


def test_a_target_with_windows_is_refused(tmp_path: Path) -> None:
    save_head(tmp_path / "head", "eagle")
    with pytest.raises(ConfigError, match="follows a model without attention windows"):
        bound("eagle", tmp_path / "head", windows=(0,) * 7 + (16,))


@pytest.mark.parametrize("name", DRAFTERS)
def test_its_size_is_planned(name: str, tmp_path: Path) -> None:
    tensors = save_head(tmp_path / "head", name)
    facts = (
        small_composition(f"spec_decode={name}", f"spec_decode.path={tmp_path / 'head'}").part("spec_decode").facts()
    )
    copies = "embed_tokens.weight", "fc.bias", "d2t", "t2d"
    assert facts.spec.parameters.total == sum(t.numel() for key, t in tensors.items() if key not in copies)
    assert facts.spec.kv_bytes_per_token(2) == 2 * 2 * 32 * 2
