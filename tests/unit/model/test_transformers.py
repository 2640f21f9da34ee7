"""model=transformers and model=auto: what is chosen, what is refused, and what a plan reads, without weights."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dovetail import LLM, SamplingParams
from dovetail.core.compose import compose
from dovetail.core.compose.cli import main
from dovetail.core.errors import CapabilityError, ConfigError
from dovetail.plugins.model.transformers.plan import Cut
from dovetail.plugins.model.transformers.replace import is_router
from dovetail.plugins.model.transformers.spec import read_decoder

PHI: dict[str, Any] = {
    "architectures": ["PhiForCausalLM"],
    "model_type": "phi",
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}


def of(architecture: str, kind: str, **changes: Any) -> dict[str, Any]:
    return {**PHI, "architectures": [architecture], "model_type": kind, **changes}


GEMMA3N = of(
    "Gemma3nForCausalLM",
    "gemma3n_text",
    head_dim=8,
    intermediate_size=[48, 48],
    layer_types=["sliding_attention", "full_attention"],
    num_kv_shared_layers=0,
    vocab_size_per_layer_input=67,
    hidden_size_per_layer_input=8,
    laurel_rank=8,
    activation_sparsity_pattern=[0.0, 0.0],
)
LAYERS = {"layer_types": ["full_attention", "chunked_attention"]}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "remote code": (
        {**PHI, "auto_map": {"AutoModelForCausalLM": "modeling_phi.PhiForCausalLM"}},
        r"auto_map asks for code of the model folder, 'modeling_phi\.py', and such code is never run",
    ),
    "no architecture": ({**PHI, "architectures": None}, "architectures is None; it must be a list"),
    "unknown": ({**PHI, "model_type": "phi99"}, r"model_type is 'phi99'; transformers 5\S+ does not know it\. Native"),
    "another task": (
        {**PHI, "architectures": ["PhiModel"]},
        "the decoder of model_type phi is PhiForCausalLM",
    ),
    "no decoder": (of("ViTModel", "vit"), "'ViTModel': model_type vit is no decoder of text"),
    "wrong type": ({**PHI, "hidden_size": "32"}, "PhiForCausalLM: transformers refuses the file"),
    "missing": ({k: v for k, v in PHI.items() if k != "num_hidden_layers"}, "the key 'num_hidden_layers' is missing"),
    "too many": ({**PHI, "num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be from 1 to 1024"),
    # The library's config makes a list of so many entries.
    "too many in a list": (
        {**PHI, "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "num_hidden_layers": 10**9},
        "num_hidden_layers is 1000000000; it must be from 1 to 1024",
    ),
    "contradiction": ({**PHI, "hidden_size": 30}, "PhiForCausalLM: "),
    "state space": (of("MambaForCausalLM", "mamba"), "its layers keep a recurrent state"),
    "hybrid": (of("Lfm2ForCausalLM", "lfm2", layer_types=["conv", "full_attention"]), "layers of the type 'conv'"),
    "infinity in JSON": (
        of("Mamba2ForCausalLM", "mamba2", num_heads=8, head_dim=8, time_step_limit=[0.0, {"__float__": "Infinity"}]),
        "its layers keep a recurrent state",
    ),
    "token ids": (GEMMA3N, r"Gemma3nForCausalLM: it uses token ids for more than its embedding \(add, embedding"),
    "positions": (
        of("RobertaForCausalLM", "roberta", is_decoder=True, pad_token_id=1),
        "roberta.embeddings.position_embeddings counts positions from the id of its padding",
    ),
    "values of tensors": (
        of("JetMoeForCausalLM", "jetmoe", kv_channels=8, num_local_experts=2),
        "its code reads values of tensors, and a trial has none: 'NotImplementedError: Cannot copy",
    ),
    "cross attention": (of("BartForCausalLM", "bart"), "it has an encoder and cross attention"),
    "linear biases": (of("BloomForCausalLM", "bloom"), "does not let attention be replaced"),
    "images": (
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": {}},
        "it has a decoder besides other models",
    ),
    "both directions": (of("BertLMHeadModel", "bert"), "attend to later tokens"),
    "chunks": (of("Llama4ForCausalLM", "llama4_text", **LAYERS), "layers of the type 'chunked_attention'"),
    "two calls": (of("DiffLlamaForCausalLM", "diffllama"), "its 2 layers call attention 4 times"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_run_is_refused_by_name(case: str) -> None:
    hf, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        read_decoder(hf, "config.json")


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    def write(hf: dict[str, Any]) -> list[str]:
        (tmp_path / "config.json").write_text(json.dumps(hf))
        return [f"model.path={tmp_path}", "model.load=dummy", "engine.device=cpu"]

    return write


def test_a_type_may_run_with_the_class_of_another_one() -> None:
    """The library has no class of this name, and renames the tensors of such a folder for Llama's."""
    found = read_decoder(of("ExaoneForCausalLM", "exaone"), "config.json")
    assert found.library.model.__name__ == "LlamaForCausalLM"
    with pytest.raises(ConfigError, match="the decoder of model_type exaone is LlamaForCausalLM"):
        read_decoder(of("Exaone9ForCausalLM", "exaone"), "config.json")


def test_auto_prefers_a_native_family(folder: Any) -> None:
    chosen = {}
    for name, kind in (("PhiForCausalLM", "phi"), ("LlamaForCausalLM", "llama"), ("OlmoeForCausalLM", "olmoe")):
        chosen[kind] = compose(folder(of(name, kind))).part("model").name
    assert chosen == {"phi": "transformers", "llama": "llama", "olmoe": "transformers"}
    with pytest.raises(ConfigError, match="absent"):
        compose(["model=auto", "model.path=/absent"])


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("LlamaForCausalLM", "llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
        ("LlamaForCausalLM", "llama", {"hidden_act": "relu"}),
        ("CohereForCausalLM", "cohere", {"use_qk_norm": True}),
        (
            "Qwen3MoeForCausalLM",
            "qwen3_moe",
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 2},
        ),
    ],
)
def test_auto_leaves_options_that_a_native_family_lacks_to_the_library(
    name: str, kind: str, options: dict[str, Any], folder: Any
) -> None:
    words = folder(of(name, kind, **options))
    composition = compose(words)
    assert composition.part("model").name == "transformers"
    composition.part("model").facts()
    with pytest.raises(ConfigError, match="model=transformers"):
        compose(["model=llama", *words]).part("model").facts()


def test_auto_leaves_wrong_values_to_the_native_family(folder: Any) -> None:
    with pytest.raises(ConfigError, match="hidden_act is 3; the options are silu"):
        compose(folder(of("LlamaForCausalLM", "llama", hidden_act=3))).part("model").facts()


def test_the_start_up_says_what_runs_and_why(folder: Any) -> None:
    with LLM(overrides=folder(PHI)) as llm:
        (result,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True))
        notes = llm.info.notes
    assert len(result.token_ids) == 3
    assert "model=auto chose model=transformers, because no native model runs this PhiForCausalLM" in notes
    assert (
        "model=transformers runs PhiForCausalLM with 12 linear layers in 8 matmuls and 0 norms of this engine" in notes
    )


def test_ranks_follow_the_plan_of_the_class(folder: Any) -> None:
    assert read_decoder(PHI, "config.json").ranks == (1, 2)
    whole = of("GPT2LMHeadModel", "gpt2")
    with pytest.raises(CapabilityError, match=r"tp 1 \(its class has no plan that splits its layers\)"):
        compose(["model=auto", *folder(whole), "executor=multiproc", "engine.tp=2"]).check_layout(None)  # type: ignore[arg-type]


def test_a_plan_counts_the_parameters(folder: Any) -> None:
    experts = of("MixtralForCausalLM", "mixtral", num_local_experts=4, num_experts_per_tok=2)
    output = io.StringIO()
    with redirect_stdout(output):
        assert main(["app=plan", "plan.format=json", "cost=h200", "model=auto", *folder(experts)]) == 0
    counted = read_decoder(experts, "config.json").spec.parameters
    assert counted is not None and json.loads(output.getvalue())["parameters"] == counted.total
    assert counted.experts == 2 * 4 * 3 * 32 * 48 == 2 * counted.active_experts
    assert counted.embedding == counted.head == 67 * 32 and counted.mlp == 0
    assert counted.attention == 2 * 32 * (32 + 2 * 16 + 32)


def test_frequencies_that_grow_with_the_length_limit_it() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    spec = read_decoder({**PHI, "rope_parameters": {**rope, "partial_rotary_factor": 0.5}}, "config.json").spec
    assert spec.max_len == 16


def test_buffers_without_values_are_refused() -> None:
    """A buffer that the library leaves as it was allocated would hold anything."""
    from transformers import PhiConfig, PhiForCausalLM

    from dovetail.plugins.model.transformers.materialize import make_buffers

    with torch.device("meta"):
        model = PhiForCausalLM(PhiConfig(**{key: PHI[key] for key in PHI if key != "architectures"}))
        model.model.register_buffer("table", torch.ones(3), persistent=False)
    with pytest.raises(ValueError, match=r"does not compute model\.table"):
        make_buffers(model, torch.device("cpu"))
    del model.model.table
    make_buffers(model, torch.device("cpu"))
    assert torch.equal(model.model.rotary_emb.inv_freq, PhiForCausalLM(model.config).model.rotary_emb.inv_freq)


def test_a_hybrid_class_without_hybrid_layers_runs() -> None:
    """Granite 4.0 Micro, with the names that its published file has."""
    sizes = {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 48}
    mamba = {"mamba_n_heads": 4, "mamba_d_head": 16, "position_embedding_type": "rope"}
    hf = of("GraniteMoeHybridForCausalLM", "granitemoehybrid", **sizes, **mamba)
    assert read_decoder({**hf, "layer_types": ["attention", "attention"]}, "config.json").spec.layers == 2
    with pytest.raises(ConfigError, match="its layers keep a recurrent state"):
        read_decoder({**hf, "layer_types": ["mamba", "attention"]}, "config.json")


def test_routers_keep_the_dtype_of_the_class(folder: Any) -> None:
    """Also one that is in a module of its own; the matrices of shared experts are quantized."""
    experts, shared = nn.Linear(2, 2), nn.ModuleDict({"up": nn.Linear(2, 2), "down": nn.Linear(2, 2)})
    layer = nn.ModuleDict({"gate": nn.ModuleDict({"wg": nn.Linear(2, 2)}), "shared": shared, "wg": nn.Linear(2, 2)})
    layer.experts = experts
    model = nn.ModuleDict({"mlp": layer, "o": nn.Linear(2, 2)})
    assert [is_router(model, path) for path in ("mlp.gate.wg", "mlp.wg", "mlp.shared.up", "o")] == [1, 1, 0, 0]
    sizes = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    }
    with LLM(overrides=["model=auto", *folder(of("Qwen2MoeForCausalLM", "qwen2_moe", **sizes))]) as llm:
        # In each layer q, k, v and o, and three matrices of the shared expert.
        assert any("with 14 linear layers" in note for note in llm.info.notes)


def test_parts_of_packed_tensors() -> None:
    """A tensor with gate and up in succession: each rank has a part of both."""
    whole = torch.arange(2 * 8 * 3).view(2, 8, 3)
    for rank in (0, 1):
        cut, part = Cut(1, packed=True), torch.zeros(2, 4, 3, dtype=whole.dtype)
        assert cut.shape(whole.shape, 2) == part.shape and cut.whole(part.shape, 2) == whole.shape
        cut.take(whole, part, rank, 2)
        assert torch.equal(part, whole[:, [2 * rank, 2 * rank + 1, 4 + 2 * rank, 5 + 2 * rank]])
