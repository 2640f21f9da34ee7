"""Drafters of the published layouts for the bundled model, with random weights, as files. C hidden channels."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dovetail.core.interfaces import ModelSource, ModelSpec, TargetView
from dovetail.core.testing.executor_scripts import small_composition
from dovetail.core.testing.model_driver import build_context

HIDDEN, VOCAB, INNER, KV, MIDDLE = 256, 4096, 128, 64, 96
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": HIDDEN,
    "intermediate_size": MIDDLE,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}
DRAFT_VOCAB = 500


def eagle_tensors(layer: str = "layers.0", width: int = 1, fused: int = 2) -> dict[str, torch.Tensor]:
    """Return the tensors of an EAGLE head; its layer reads `width` states, and fc `fused` of them."""
    generator = torch.Generator().manual_seed(7)

    def matrix(out: int, inp: int) -> torch.Tensor:
        return torch.randn(out, inp, generator=generator) * 2 / inp**0.5

    inp = width * HIDDEN
    return {
        "embed_tokens.weight": torch.zeros(VOCAB, HIDDEN),
        "fc.weight": matrix(HIDDEN, fused * HIDDEN),
        f"{layer}.self_attn.q_proj.weight": matrix(INNER, inp),
        f"{layer}.self_attn.k_proj.weight": matrix(KV, inp),
        f"{layer}.self_attn.v_proj.weight": matrix(KV, inp),
        f"{layer}.self_attn.o_proj.weight": matrix(HIDDEN, INNER),
        f"{layer}.mlp.gate_proj.weight": matrix(MIDDLE, HIDDEN),
        f"{layer}.mlp.up_proj.weight": matrix(MIDDLE, HIDDEN),
        f"{layer}.mlp.down_proj.weight": matrix(HIDDEN, MIDDLE),
        f"{layer}.post_attention_layernorm.weight": 1 + 0.1 * matrix(HIDDEN, 1)[:, 0],
    }


def eagle3_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(8)
    ids_D = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
    t2d_V = torch.zeros(VOCAB, dtype=torch.bool)
    t2d_V[ids_D] = True
    tensors = eagle_tensors("midlayer", width=2, fused=3)
    del tensors["embed_tokens.weight"]
    for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "norm"):
        tensors[f"{name}.weight"] = 1 + 0.1 * torch.randn(HIDDEN, generator=generator)
    tensors["lm_head.weight"] = torch.randn(DRAFT_VOCAB, HIDDEN, generator=generator) / HIDDEN**0.5
    return tensors | {"d2t": ids_D - torch.arange(DRAFT_VOCAB), "t2d": t2d_V}


def medusa_tensors(heads: int = 3, layers: int = 2, own: bool = True) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    tensors = {}
    for head in range(heads):
        for layer in range(layers):
            tensors[f"{head}.{layer}.linear.weight"] = torch.randn(HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5
            tensors[f"{head}.{layer}.linear.bias"] = torch.randn(HIDDEN, generator=generator)
        if own:
            tensors[f"{head}.{layers}.weight"] = torch.randn(VOCAB, HIDDEN, generator=generator)
    return tensors


HEADS: dict[str, tuple[dict[str, Any], Any]] = {
    "eagle": (CONFIG, lambda: eagle_tensors() | {"fc.bias": torch.linspace(-1, 1, HIDDEN)}),
    "medusa": ({"medusa_num_heads": 3, "medusa_num_layers": 2}, medusa_tensors),
    "parallel": (
        CONFIG | {"draft_vocab_size": DRAFT_VOCAB, "ptd_token_id": 7},
        lambda: eagle3_tensors() | {"mask_hidden": torch.linspace(-1, 1, 3 * HIDDEN)},
    ),
    "eagle3": (CONFIG | {"draft_vocab_size": DRAFT_VOCAB}, eagle3_tensors),
}
"""Drafter -> its config.json and its tensors."""


def save_head(
    folder: Path,
    name: str,
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
    file: str = "model.safetensors",
) -> dict[str, torch.Tensor]:
    """Save a head of this drafter with entries of config.json and tensors replaced (None = left out). Return its
    tensors."""
    stated, made = HEADS[name]
    kept = {key: tensor for key, tensor in (made() | dict(tensors or {})).items() if tensor is not None}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(stated | dict(config or {})))
    save_file({key: tensor.contiguous() for key, tensor in kept.items()}, folder / file)
    return kept


def view_of_tiny(**facts: Any) -> TargetView:
    """Return a target of the bundled model's shape, with random embeddings."""
    table_VC = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
    spec = ModelSpec("target", VOCAB, 8, HIDDEN, 4, 2, 64, 64, 64, "float32", **facts)
    return TargetView(
        build=build_context(spec, max_len=128),
        source=ModelSource(None, dummy=True),
        max_seqs=4,
        max_len=64,
        first_group=1,
        embed=lambda tokens_T: table_VC[tokens_T.long()],
        logits=lambda states_BC: states_BC @ table_VC.T,
    )


def bound(name: str, folder: Path, *words: str, **facts: Any) -> Any:
    """Return a drafter that follows a model of the bundled model's shape."""
    part = small_composition(f"spec_decode={name}", f"spec_decode.path={folder}", *words).part("spec_decode")
    view = view_of_tiny(**facts)
    part.build().check_files(replace(view, build=replace(view.build, device=torch.device("meta"))))
    drafter = part.build()
    drafter.bind(view)
    return drafter
