"""Facts of a decoder of transformers: its config, and a trial of the model on the meta device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from dovetail.core.checkpoint import open_checkpoint
from dovetail.core.config_json import ConfigJson
from dovetail.core.errors import ConfigError, shown
from dovetail.core.interfaces import ModelSpec, MoE, Parameters
from dovetail.plugins.model.config import TransformersConfig
from dovetail.plugins.model.transformers.library import Library, read_library
from dovetail.plugins.model.transformers.plan import shared_sizes, shrink
from dovetail.plugins.model.transformers.replace import matrix_shapes
from dovetail.plugins.model.transformers.rope import constant_len
from dovetail.plugins.model.transformers.trial import TRIAL, AttentionCall, trial

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Decoder:
    """A decoder of transformers that the engine can run."""

    library: Library
    spec: ModelSpec
    calls: tuple[AttentionCall, ...]
    blocks: str
    """Path of the list of layers."""
    ranks: tuple[int, ...]
    """Tensor-parallel sizes, engine.tp."""
    why_one_rank: str
    """Reason why `ranks` has 1 only; "" = it has more."""


def spec_of(config: TransformersConfig) -> ModelSpec:
    spec = decoder_of(config).spec
    return spec if config.load == "dummy" else replace(spec, checkpoint=config.path)


def decoder_of(config: TransformersConfig) -> Decoder:
    """Read the checkpoint's config.json, or model.hf. Raises ConfigError for what cannot run."""
    if config.hf is not None:
        return read_decoder(config.hf, "model.hf")
    return read_decoder(open_checkpoint(config.path).config(), f"model.path={config.path}: config.json")


def read_decoder(hf: Mapping[str, Any], where: str) -> Decoder:
    # Several parts ask for it in one start, and building thousands of modules takes a second.
    return _read(json.dumps(hf), where)


@lru_cache(maxsize=4)
def _read(text: str, where: str) -> Decoder:
    hf = json.loads(text)
    library = read_library(hf, where)
    raw, config = ConfigJson(hf, where), library.config
    # The library's experts have a meta kernel in this dtype.
    model = library.build(TRIAL, torch.bfloat16)
    calls = trial(library, model, ids=True)
    _check_positions(library, model)
    head, call = model.get_output_embeddings(), calls[0]
    if head is None:
        raise library.refused("it has no output embedding")
    vocab = head.weight.shape[0]
    intermediate = _intermediate(config, model)
    moe = _moe(config, intermediate)
    spec = ModelSpec(
        architecture=library.model.__name__,
        vocab=vocab,
        layers=len(calls),
        hidden=model.get_input_embeddings().weight.shape[1],
        heads=call.heads,
        kv_heads=call.kv_heads,
        head_dim=call.head_dim,
        intermediate=intermediate,
        max_len=_max_len(library, raw),
        dtype=raw.choice("torch_dtype" if raw.get("dtype") is None else "dtype", DTYPES, "float32"),
        eos_ids=raw.counts("eos_token_id", at_most=vocab - 1),
        bos_id=next(iter(raw.counts("bos_token_id")), None),
        tied=head.weight is model.get_input_embeddings().weight,
        windows=tuple(call.window for call in calls),
        hf=hf,
        moe=moe,
        parameters=_count(model, calls, moe),
    )
    blocks = _blocks(library, model, calls)
    return Decoder(library, spec, calls, blocks, *_ranks(library, model, calls[0]))


def _ranks(library: Library, model: PreTrainedModel, call: AttentionCall) -> tuple[tuple[int, ...], str]:
    """Return Decoder.ranks and why_one_rank. The plan of a class may not fit its code, as another trial shows; it
    changes the model."""
    ranks, why = shared_sizes(model, call.heads, call.kv_heads)
    if len(ranks) > 1:
        shrink(model, ranks[1])
        try:
            trial(library, model)
        except ConfigError as error:
            return (1,), f"the plan of its class does not fit its code ({shown(error.__cause__ or error, 120)})"
    return ranks, why


def _blocks(library: Library, model: PreTrainedModel, calls: tuple[AttentionCall, ...]) -> str:
    """Return the path of the list that has each layer's attention in one entry."""
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == len(calls):
            if all(call.module.startswith(f"{path}.{call.layer}.") for call in calls):
                return path
    raise library.refused("its layers are not in one list")


def _intermediate(config: Any, model: PreTrainedModel) -> int:
    """Channels of the MLP: as stated, or the widest input of a linear layer."""
    stated = getattr(config, "intermediate_size", None)
    if isinstance(stated, int) and stated > 0:
        return stated
    return max(inputs for _, inputs in matrix_shapes(model).values())


def _check_positions(library: Library, model: PreTrainedModel) -> None:
    """Refuse positions that begin after the id of padding (RoBERTa, 2019): the engine counts them from 0."""
    tokens, most = model.get_input_embeddings(), getattr(library.config, "max_position_embeddings", None)
    for path, module in model.named_modules():
        if not isinstance(module, nn.Embedding) or module is tokens or module.num_embeddings != most:
            continue
        if module.padding_idx is not None:
            raise library.refused(f"{path} counts positions from the id of its padding")


def _max_len(library: Library, raw: ConfigJson) -> int:
    config = library.config
    most = getattr(config, "max_position_embeddings", None)
    if not isinstance(most, int) or most < 1:
        raise raw.wrong("max_position_embeddings", "the maximum length of a sequence must be a whole number")
    return min(most, constant_len(config) or most)


def _count(model: PreTrainedModel, calls: tuple[AttentionCall, ...], moe: MoE | None) -> Parameters:
    """Count the weights by role. Modules below a layer's attention are attention; matrices elsewhere are MLP."""
    attention = tuple(f"{call.module}." for call in calls)
    tables = {id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings())}
    counts = dict.fromkeys(("attention", "mlp", "experts", "rest"), 0)
    for name, weight in model.named_parameters():
        if id(weight) in tables:
            continue
        owner = model.get_submodule(name.rpartition(".")[0])
        role = "rest"
        if weight.ndim == 3:
            role = "experts"
        elif isinstance(owner, nn.Linear | Conv1D) and weight.ndim == 2:
            role = "attention" if name.startswith(attention) else "mlp"
        counts[role] += weight.numel()
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return Parameters(
        embedding=embedding.numel(),
        head=0 if head is embedding else head.numel(),
        active_experts=counts["experts"] if moe is None else counts["experts"] * moe.active // moe.experts,
        **counts,
    )


def _moe(config: Any, intermediate: int) -> MoE | None:
    """Read the numbers of experts, whose names differ between the library's configs."""

    def first(*names: str) -> int | None:
        return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)

    experts, active = first("num_local_experts", "num_experts", "n_routed_experts"), first("num_experts_per_tok")
    if not experts or not active:
        return None
    return MoE(
        experts=experts,
        active=min(active, experts),
        intermediate=first("moe_intermediate_size") or intermediate,
        shared=first("n_shared_experts", "num_shared_experts") or 0,
        dense_layers=first("first_k_dense_replace") or 0,
    )
