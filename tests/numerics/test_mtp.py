"""Drafts of the layer for multi-token prediction: those of transformers, whatever the schedule, and text of plain
decoding. Shapes: T tokens, C hidden channels, V vocabulary."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail import LLM, SamplingParams
from dovetail.core.compose import compose, installed
from dovetail.core.engine.cost import bind_cost
from dovetail.core.errors import CapabilityError, ConfigError
from dovetail.core.interfaces import Draft, DraftContext
from dovetail.plugins.spec_decode.mtp import MTP

from .checkpoints import SHAPE, in_blocks, random_tokens, save_random
from .published import BLOCKS

LAYERS, K, HIDDEN = 2, 3, SHAPE["hidden_size"]
SMALL = {"num_attention_heads": 4, "num_key_value_heads": 4}
LAYER = f"model.layers.{LAYERS}."
BASE = ["engine.device=cpu", "engine.dtype=float32", "engine.max_len=128", "engine.page_size=8"]
PREFIX = random_tokens(21, seed=1)
PROMPTS = [PREFIX + random_tokens(n, seed=n) for n in (3, 20)] + [random_tokens(n, seed=n) for n in (1, 40)]
PARAMS = [SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True) for _ in PROMPTS]
PARAMS[1] = SamplingParams(temperature=0.8, seed=5, n=2, max_tokens=9, ignore_eos=True)


def save_mtp(folder: Path, variant: str, layers: int = 1) -> None:
    """Save a random checkpoint of the published layout, whose last layer predicts the token after the next one."""
    small = SMALL if variant.startswith("deepseek") else {}
    save_random(folder, variant, **small, num_hidden_layers=LAYERS + 1)
    tensors = {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    generator = torch.Generator().manual_seed(11)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{LAYER}{name}.weight"] = 0.5 + torch.rand(HIDDEN, generator=generator)
    tensors[f"{LAYER}eh_proj.weight"] = torch.randn(HIDDEN, 2 * HIDDEN, generator=generator) / 8
    for copy, name in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        tensors[f"{LAYER}{copy}.weight"] = tensors[f"{name}.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config.pop("num_mtp_layers", None)
    config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deepseek")
    save_mtp(path, "deepseek_v3")
    return path


class Proposals:
    """Drafts of every proposal, and their logits, by (key of the sequence's draws, length)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: dict[tuple[int, int], tuple[list[int], list[torch.Tensor]]] = {}
        self.proposed = 0
        propose, logits = MTP.propose, MTP._logits
        drawn: list[torch.Tensor] = []

        def kept(drafter: MTP, ctx: DraftContext) -> Draft:
            drawn.clear()
            draft = propose(drafter, ctx)
            counts = torch.minimum(draft.count_B, ctx.k_B).tolist()
            rows = zip(ctx.key_S[ctx.slots_B].tolist(), ctx.lengths_B.tolist(), strict=True)
            for row, (at, count, tokens) in zip(
                rows, zip(range(len(counts)), counts, draft.tokens_BK.tolist(), strict=True), strict=True
            ):
                if count:
                    self.proposed += 1
                    known, _ = self.found.setdefault(row, (tokens[:count], [each[at] for each in drawn]))
                    assert all(map(int.__eq__, known, tokens[:count])), f"{row}: {known} before, {tokens[:count]} now"
            return draft

        def recorded(drafter: MTP, states_BC: torch.Tensor) -> torch.Tensor:
            drawn.append(logits(drafter, states_BC))
            return drawn[-1]

        monkeypatch.setattr(MTP, "propose", kept)
        monkeypatch.setattr(MTP, "_logits", recorded)


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> Proposals:
    return Proposals(monkeypatch)


# Drafts against transformers.


def reference(folder: Path) -> tuple[Any, Any]:
    """Return transformers' model, and its layer for multi-token prediction."""
    import transformers
    from transformers.modeling_layers import MtpModel

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{LAYERS}.*"]
    return model, MtpModel.from_pretrained(model).eval()


@torch.no_grad()
def reference_drafts(model: Any, mtp: Any, ids: list[int]) -> tuple[list[int], list[torch.Tensor]]:
    """Return K greedy drafts and their logits, without a cache. The first token, which transformers leaves out, follows
    a state of zeros."""
    hidden_TC = model.model(torch.tensor([ids])).last_hidden_state[0]
    states_TC = torch.cat((torch.zeros(1, HIDDEN), hidden_TC[:-1]))
    drafts, logits = [], []
    for _ in range(K):
        positions = torch.arange(len(ids))[None]
        given = {"position_ids": positions, "mtp_cache": None, "input_ids": torch.tensor([ids])}
        out_TC = mtp.forward_layer(0, states_TC[None], **given)[0]
        logits.append(mtp._project_to_logits(out_TC[-1]))
        drafts.append(int(logits[-1].argmax()))
        ids, states_TC = [*ids, drafts[-1]], torch.cat((states_TC, out_TC[-1:]))
    return drafts, logits


@pytest.mark.parametrize("variant", ["deepseek_v3", "glm4_moe"])
def test_drafts_are_those_of_transformers(variant: str, tmp_path: Path, proposals: Proposals) -> None:
    save_mtp(tmp_path, variant)
    words = ["spec_decode=mtp", f"spec_decode.lookahead={K}", "engine.token_budget=11", "engine.max_seqs=1"]
    with LLM(str(tmp_path), overrides=[*BASE, *words, "engine.drafts=always"]) as llm:
        (result,) = llm.generate([PROMPTS[1]], [PARAMS[0]])
    text = [*PROMPTS[1], *result.token_ids]
    assert len(proposals.found) > 4
    models = reference(tmp_path)
    for (_, length), (drafts, logits) in proposals.found.items():
        expected, expected_logits = reference_drafts(*models, text[:length])
        assert drafts == expected[: len(drafts)]
        for got_V, expected_V in zip(logits[: len(drafts)], expected_logits, strict=False):
            assert (got_V - expected_V).norm() < 1e-4 * expected_V.norm()


# Drafts in the engine.

VARIANTS = {
    "alone": ["engine.max_seqs=1"],
    "small chunks, preempted, depth 4, results late": [
        *("engine.token_budget=11", "engine.max_seqs=3", "engine.kv_pages=10", "engine.depth=4", "executor.delay=3")
    ],
    "radix, depth 2": ["kv_cache=radix", "engine.depth=2"],
}
if os.environ.get("DOVETAIL_GRID") == "pairs":
    VARIANTS["host tier"] = [
        *("kv_cache=prefix_hash", "kv_cache.host_pages=40", "engine.kv_pages=24", "engine.depth=2")
    ]
    VARIANTS |= {name: [f"scheduler={name}"] for name in installed().options("scheduler")}
    VARIANTS |= {name: [f"kv_cache={name}", "engine.token_budget=9"] for name in installed().options("kv_cache")}


def run(folder: Path, *words: str) -> tuple[list[list[int]], LLM]:
    """Generate twice; the second round finds the prompts in the prefix cache."""
    with LLM(str(folder), overrides=[*BASE, *words]) as llm:
        rounds = [llm.generate(PROMPTS, PARAMS) for _ in range(2)]
        llm.engine.kv.check()
    found = [[one.token_ids for result in results for one in result.completions] for results in rounds]
    assert found[0] == found[1], "the second round differs"
    return found[0], llm


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[list[int]]:
    """Text of plain decoding."""
    return run(folder)[0]


@pytest.mark.nightly
def test_drafts_do_not_depend_on_scheduling(folder: Path, plain: list[list[int]], proposals: Proposals) -> None:
    """Chunks, prefix hits, forks, preemption and reused slots: the drafts of a sequence that runs alone, token for
    token, and the text of plain decoding."""
    words, least = ["spec_decode=mtp", f"spec_decode.lookahead={K}", "engine.drafts=always"], 0
    for variant in VARIANTS.values():
        text, llm = run(folder, *words, *variant)
        assert text == plain, variant
        assert llm.engine.counters.drafted > 60, variant
        assert llm.engine.scheduler.stats().preemptions > 0 or "engine.kv_pages=10" not in variant
        least = least or len(proposals.found)
    assert least > 25 and proposals.proposed > 2 * least


def test_a_checkpoint_in_blocks_may_have_a_plain_pair(folder: Path, tmp_path: Path) -> None:
    """Those of DeepSeek-V3 have matrices in E4M3 with scales of blocks, and `eh_proj` in bfloat16, which config.json
    does not say."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("_proj.weight", "_mqa.weight"))]:
        if name.endswith("eh_proj.weight"):
            tensors[name] = tensors[name].bfloat16()
        else:
            tensors[name], tensors[f"{name}_scale_inv"], _ = in_blocks(tensors[name], outputs=128)
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": BLOCKS}))
    drafted, llm = run(tmp_path, "quant=auto", "spec_decode=mtp", "engine.drafts=always")
    assert drafted == run(tmp_path, "quant=auto")[0] and llm.engine.counters.drafted > 10


def test_trees_change_no_text_and_acceptance_can_be_simulated(folder: Path, plain: list[list[int]]) -> None:
    assert run(folder, "spec_decode=mtp", "spec_decode.lookahead=3", "spec_decode.tree=8")[0] == plain
    words = ["spec_decode=mtp", "spec_decode.simulate_acceptance=[1.0]"]
    with LLM(str(folder), overrides=[*BASE, *words]) as llm:
        llm.generate(PROMPTS, PARAMS)
        assert llm.engine.counters.accepted == llm.engine.counters.drafted > 10


# Size and time.


def test_its_size_and_time_are_planned(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    copies = tuple(f"{LAYER}{name}.weight" for name in ("embed_tokens", "shared_head.head"))
    own = sum(each.numel() for name, each in tensors.items() if name.startswith(LAYER) and name not in copies)
    words = [f"model.path={folder}", "engine.dtype=float32", "cost=h200"]
    composition = compose([*words, "spec_decode=mtp", "spec_decode.lookahead=2"], app="plan")
    spec = composition.part("model").target().spec(composition.part("model").config)
    assert spec.mtp is not None and spec.mtp.parameters is not None and spec.mtp.parameters.total == own
    cost = bind_cost(composition, spec, "cuda")
    assert cost is not None and cost.drafter is not None
    # Each pass reads the layer and the model's matrix of logits.
    read = 4 * (own + SHAPE["vocab_size"] * HIDDEN)
    assert cost.drafter.step_weight_bytes() == read
    assert cost.draft_seconds(4, 2, 100) > cost.draft_seconds(4, 1, 100) > 0


# Bad input.


def changed(folder: Path, into: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor | None]) -> Path:
    """Save a copy of a folder with entries of config.json and tensors replaced (None = left out)."""
    into.mkdir()
    stated = json.loads((folder / "config.json").read_text()) | config
    (into / "config.json").write_text(json.dumps(stated))
    kept = {
        name: each for name, each in {**load_file(folder / "model.safetensors"), **tensors}.items() if each is not None
    }
    save_file(kept, into / "model.safetensors")
    return into


@pytest.mark.parametrize(
    ("config", "tensors", "words", "says"),
    [
        ({"num_nextn_predict_layers": 0}, {}, [], "requires model with mtp_layers 1 .*model=llama has 0"),
        ({"num_nextn_predict_layers": 2}, {}, [], "requires model with mtp_layers 1 .*model=llama has 2"),
        ({}, {}, ["model=transformers"], "requires model with mtp_layers 1 .*model=transformers does not state it"),
        ({}, {f"{LAYER}eh_proj.weight": None}, [], f"/model: .*1 missing .*{LAYER}eh_proj.weight"),
        ({}, {f"{LAYER}mlp.experts.3.up_proj.weight": None}, [], f"1 missing .*{LAYER}mlp.experts.3.up_proj.weight"),
        (
            {},
            {f"{LAYER}eh_proj.weight": torch.zeros(HIDDEN, HIDDEN)},
            [],
            f"model.safetensors: .*eh_proj.weight. has shape .{HIDDEN}, {HIDDEN}.*must be .{HIDDEN}, {2 * HIDDEN}",
        ),
        ({}, {f"{LAYER}more.weight": torch.zeros(1)}, [], f"1 unexpected .*{LAYER}more.weight"),
        ({}, {}, ["engine.tp=3", "executor=multiproc"], "requires engine with tp 1 or 2 or 4 "),
        ({}, {}, ["spec_decode.lookahead=17"], "lookahead"),
        ({}, {}, ["spec_decode.path=x"], "spec_decode.path"),
    ],
)
def test_what_does_not_fit_is_refused_before_loading(
    config: dict[str, Any], tensors: dict[str, Any], words: list[str], says: str, folder: Path, tmp_path: Path
) -> None:
    path = changed(folder, tmp_path / "model", config, tensors)
    with pytest.raises((CapabilityError, ConfigError), match=says) as error:
        LLM(str(path), overrides=[*BASE, "spec_decode=mtp", *words])
    assert str(error.value).isprintable() or "\n" in str(error.value)


def test_a_layer_that_is_not_used_is_noted(folder: Path) -> None:
    with LLM(str(folder), overrides=BASE) as llm:
        notes = llm.engine.info.notes
    assert any(
        "layer for multi-token prediction is not loaded; spec_decode=mtp drafts with it" in note for note in notes
    )
    with LLM(str(folder), overrides=[*BASE, "spec_decode=mtp"]) as llm:
        assert not any("multi-token prediction" in note for note in llm.engine.info.notes)


def test_a_layer_that_the_folder_lacks_is_not_noted(folder: Path, tmp_path: Path) -> None:
    lacks: dict[str, torch.Tensor | None] = {
        name: None for name in load_file(folder / "model.safetensors") if name.startswith(LAYER)
    }
    with LLM(str(changed(folder, tmp_path / "model", {}, lacks)), overrides=BASE) as llm:
        assert not any("multi-token prediction" in note for note in llm.engine.info.notes)
