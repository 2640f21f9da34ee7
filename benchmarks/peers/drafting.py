"""A peer's speculative decoding, derived from our drafter: the same drafts for each step, and with
spec_decode.simulate_acceptance the same share of them accepted at each position."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from peers import model_folder

from dovetail import Composition, ConfigError
from dovetail.core.checkpoint import locate
from dovetail.core.compose import Selected

WITH_DRAFTS = ("vllm",)
"""Peers that draft."""


def drafting_of(composition: Composition, peer: str, folder: Path) -> dict[str, Any] | None:
    """Return the settings with which `peer` drafts as the composition does; None without drafts. Writes the config.json
    of a drafter of shapes alone into `folder`. Raises ConfigError for drafters that the peer does not have."""
    drafter = composition.part("spec_decode")
    if drafter.name == "none":
        return None
    if peer not in WITH_DRAFTS:
        raise ConfigError(
            f"spec_decode={drafter.name}: {peer} runs without drafts here; {', '.join(WITH_DRAFTS)} has them"
        )
    if drafter.name not in _OWN:
        raise ConfigError(
            f"spec_decode={drafter.name}: {peer} is compared with {', '.join(sorted(_OWN))}; app=bench measures "
            "other drafters"
        )
    if getattr(drafter.config, "tree", 0):
        raise ConfigError(f"spec_decode.tree={drafter.config.tree}: {peer} drafts chains alone; set spec_decode.tree=0")
    # Of all steps, those in which the drafts up to a position are accepted.
    rates = [round(share, 6) for share in accumulate(drafter.config.simulated_rates, mul)]
    shared = {"method": drafter.name, "drafts": drafter.config.lookahead, "rates": rates or None}
    return shared | _OWN[drafter.name](composition, drafter, folder)


def _lookup(composition: Composition, drafter: Selected, folder: Path) -> dict[str, Any]:
    return {"match": [drafter.config.min_match, drafter.config.max_match]}


def _smaller_model(composition: Composition, drafter: Selected, folder: Path) -> dict[str, Any]:
    part = drafter.config.model
    source = part.target().source(part.config)
    if source.checkpoint is not None:
        path = Path(source.checkpoint.path)
    else:
        spec = part.facts() or part.target().spec(part.config)
        path = _written(folder, model_folder.hf_config(spec.hf), _quantization(drafter))
        model_folder.write_tokenizer(path, spec.vocab, dict(spec.hf))
    return {"model": str(path), "quantization": _quantization(drafter)}


def _head(composition: Composition, drafter: Selected, folder: Path) -> dict[str, Any]:
    config = drafter.config
    if config.folder is not None:
        return {"model": str(locate(config.folder)), "quantization": _quantization(drafter)}
    fields = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **config.hf}
    quantization = _quantization(drafter)
    return {"model": str(_written(folder, fields, quantization)), "quantization": quantization}


def _own_layer(composition: Composition, drafter: Selected, folder: Path) -> dict[str, Any]:
    return {}


_OWN: dict[str, Callable[[Composition, Selected, Path], dict[str, Any]]] = {
    "ngram": _lookup,
    "draft_model": _smaller_model,
    "eagle": _head,
    "eagle3": _head,
    "mtp": _own_layer,
}


def _quantization(drafter: Selected) -> str | None:
    """Return how the peer quantizes the drafter's plain weights as it loads them."""
    name: str = drafter.config.quant.name
    if name not in ("none", "auto", "fp8"):
        raise ConfigError(f"spec_decode.quant={name}: drafters are compared with none, auto and fp8")
    return "fp8" if name == "fp8" else None


def _written(folder: Path, config: dict[str, Any], quantization: str | None) -> Path:
    path = folder / "drafter"
    path.mkdir(exist_ok=True)
    if quantization is not None:
        # vLLM 0.24 cannot quantize a drafter as it loads, but random weights may as well be stored in the format.
        config = {**config, "quantization_config": {"quant_method": quantization, "activation_scheme": "dynamic"}}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path
