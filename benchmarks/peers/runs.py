"""The runs of `compare.py table`: models, formats and workloads beside vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Run:
    """One run of compare.py."""

    model: str
    title: str
    options: tuple[str, ...]
    overrides: tuple[str, ...]
    gpus: int = 1


def _workloads(*names: str, whole_only: str = "") -> tuple[str, ...]:
    return ("--workloads", ",".join(names), *(("--whole-only", whole_only) if whole_only else ()))


def _online(**settings: str) -> tuple[str, ...]:
    names = ("online", "chat_online")
    options = (
        word
        for name in names
        for key, value in settings.items()
        for word in ("--set", f"{name}:workload.{key}={value}")
    )
    return (*_workloads(*names), *options)


def _vllm(**args: Any) -> tuple[str, ...]:
    return ("--args", json.dumps(args)) if args else ()


_GREEDY = ("latency", "batch64", "batch256", "throughput", "long", "shared_prefix")
_CHATS = ("chat", "190x150/400-sampled", "multi_turn", "agents")
_OFFLINE = _workloads(*_GREEDY, *_CHATS)
_ROWS = _workloads("1x512/128", "24x512/128", "100x512/128", "200x512/128", "chat")
_FEW = _workloads("1x512/256", "8x512/256", "64x512/256")
_PROMPT = ("1x8192/2",)
"""The time of its first token counts."""
# Medians of three rounds, since vLLM's kernels of experts compile in the first runs of a number of rows.
_EXPERTS = (
    *_workloads("1x512/256", "64x512/256", "256x512/256", "1000x512/256", *_PROMPT, whole_only="1000x512/256"),
    *("--rounds", "3"),
)
_ONLINE = _online(seconds="8", at_least="8")
_ONLINE_70B = _online(seconds="4", at_least="8", rates="[1,2,4,8,16]")

_FP8: dict[str, Any] = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
_FUSED: dict[str, Any] = {"compilation_config": {"pass_config": {"fuse_allreduce_rms": True}}}
_BLOCKS: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}
_MXFP4: dict[str, Any] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
"""quantization_config of the published checkpoints of DeepSeek-V3 and gpt-oss."""


def _stored(config: Mapping[str, Any], **args: Any) -> tuple[str, ...]:
    return _vllm(hf_overrides={"quantization_config": config}, kv_cache_dtype="fp8", **args)


# Otherwise vLLM compiles DeepGEMM's kernels for all numbers of rows, and for 51 graphs, which was not done after eight
# minutes. The workloads have 1, 16, 64, 256 and, of 1000 requests, 512 rows at a time.
_IN_BLOCKS = (
    *_stored(_BLOCKS, compilation_config={"cudagraph_capture_sizes": [1, 16, 64, 128, 256, 512]}),
    *("--env", "VLLM_DEEP_GEMM_WARMUP=skip"),
)


_FORMATS = {"fp8": ("FP8", _vllm(**_FP8)), "bf16": ("bf16", _vllm())}
"""Part of a preset's name -> title, options of vLLM."""
_70B_FP8 = ("+preset=h200_fp8_tp1", "model=llama3_70b", "engine.max_len=9216", "engine.max_seqs=256")
_8B_FP8 = ("+preset=h200_fp8_tp1", "model=llama3_8b", "engine.max_len=9216", "engine.max_seqs=512")
_8B_BF16 = ("+preset=h200_bf16_tp1", *_8B_FP8[1:])
_VLLM_FP8_TP8 = _vllm(**_FP8, **_FUSED)
_TP8 = ("model=llama3_70b", "engine.max_len=9216", "engine.max_seqs=512")
_LLAMA3 = {
    "70b_bf16_tp8": Run(
        "70b_bf16_tp8", "70B bf16 on eight", (*_vllm(**_FUSED), *_OFFLINE), ("+preset=h200_bf16_tp8", *_TP8), gpus=8
    ),
    "70b_fp8_tp8": Run(
        "70b_fp8_tp8",
        "70B FP8 on eight",
        (*_VLLM_FP8_TP8, *_OFFLINE),
        ("+preset=h200_fp8_tp8", *_TP8),
        gpus=8,
    ),
    "70b_fp8": Run(
        "70b_fp8", "70B FP8", (*_vllm(**_FP8), *_workloads(*_GREEDY, *_CHATS, whole_only="throughput")), _70B_FP8
    ),
    "8b_bf16": Run("8b_bf16", "8B bf16", _OFFLINE, _8B_BF16),
    "8b_fp8": Run("8b_fp8", "8B FP8", (*_vllm(**_FP8), *_OFFLINE), _8B_FP8),
    "70b_fp8_online": Run("70b_fp8", "70B FP8", (*_vllm(**_FP8), *_ONLINE_70B), _70B_FP8),
    "8b_bf16_online": Run("8b_bf16", "8B bf16", _ONLINE, _8B_BF16),
    "8b_fp8_online": Run("8b_fp8", "8B FP8", (*_vllm(**_FP8), *_ONLINE), _8B_FP8),
}
_DENSE = {
    f"{shape}_{name}": Run(
        f"{shape}_{name}",
        f"{title} {format_title}",
        (*options, *_ROWS),
        (f"+preset=h200_{name}_tp1", f"model={shape}", "engine.max_len=4096", "engine.dtype=bfloat16"),
    )
    for shape, title in {
        "llama2_13b": "Llama 2 13B", "qwen25_7b": "Qwen 2.5 7B", "mistral_7b": "Mistral 7B"
    }.items()
    for name, (format_title, options) in _FORMATS.items()
}  # fmt: skip

UNIFORM = ("--env", "VLLM_MOE_ROUTING_SIMULATION_STRATEGY=uniform_random")
"""Makes vLLM's routers choose any experts, as model.routing=uniform does ours: random ones may all choose the same."""


_ROUTED = {
    name: Run(
        name,
        title,
        (*options, *UNIFORM, *_EXPERTS),
        (f"+preset={preset}", f"model={model}", "model.load=dummy", "model.routing=uniform", "engine.max_len=9216"),
    )
    for name, title, preset, model, options in (
        ("deepseek_v3_rank", "DeepSeek-V3, a rank", "h200_fp8_v3_rank", "deepseek_v3_rank", _IN_BLOCKS),
        ("deepseek_v3_4layers", "DeepSeek-V3, 4 layers", "h200_fp8_v3_rank", "deepseek_v3_4layers", _IN_BLOCKS),
        ("gpt_oss_120b", "gpt-oss 120B", "h200_gpt_oss_120b", "gpt_oss_120b", _stored(_MXFP4)),
        ("mixtral_8x7b_fp8", "Mixtral 8x7B FP8", "h200_fp8_moe_tp1", "mixtral_8x7b", _vllm(**_FP8)),
        ("qwen3_30b_a3b_bf16", "Qwen3-30B-A3B bf16", "h200_bf16_tp1", "qwen3_30b_a3b", _vllm()),
        ("qwen3_30b_a3b_fp8", "Qwen3-30B-A3B FP8", "h200_fp8_moe_tp1", "qwen3_30b_a3b", _vllm(**_FP8)),
        ("deepseek_v2_lite_bf16", "DeepSeek-V2-Lite bf16", "h200_bf16_tp1", "deepseek_v2_lite", _vllm()),
        ("deepseek_v2_lite_fp8", "DeepSeek-V2-Lite FP8", "h200_fp8_moe_tp1", "deepseek_v2_lite", _vllm(**_FP8)),
        ("gpt_oss_20b", "gpt-oss 20B", "h200_gpt_oss_120b", "gpt_oss_20b", _stored(_MXFP4)),
    )
}

_SIMULATED = "spec_decode.simulate_acceptance=3.3"
_DRAFTERS: dict[str, tuple[str, ...]] = {
    "none": (),
    "ngram": ("spec_decode=ngram",),
    "draft_model": (
        "spec_decode=draft_model",
        "model@spec_decode.model=llama32_1b",
        "quant@spec_decode.quant=fp8",
        _SIMULATED,
    ),
    "eagle3": (
        "spec_decode=eagle3_llama3_8b",
        "quant@spec_decode.quant=fp8",
        "spec_decode.quant.head=fp8",
        _SIMULATED,
    ),
}
"""Overrides of Dovetail; those of vLLM follow from them. Drafts of random weights are hardly ever accepted."""
PLAIN = "_none"
"""End of the name of a run without drafts, beside which the others of its model are shown."""
_DRAFTED = {
    f"8b_fp8_drafts_{name}": Run(
        "8b_fp8_drafts",
        f"8B FP8, {name}{', SIMULATED acceptance' * (_SIMULATED in overrides)}",
        (*_vllm(**_FP8), *_FEW),
        ("+preset=h200_fp8_tp1", "model=llama3_8b", "engine.max_len=1024", *overrides),
    )
    for name, overrides in _DRAFTERS.items()
}


def _codes(inputs: Mapping[str, Any] | None, form: str = "pack-quantized", **weights: Any) -> tuple[str, ...]:
    """vLLM's options for weights as compressed-tensors stores them, of 4 bits by default, with a plain head."""
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "symmetric": True, **weights},
        "input_activations": inputs,
    }
    return _stored(
        {
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": group},
        }
    )


_INT4: dict[str, Any] = {"type": "int", "strategy": "group", "group_size": 128, "dynamic": False}
_NVFP4: dict[str, Any] = {"type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": False}
_INT8: dict[str, Any] = {"type": "int", "num_bits": 8, "strategy": "channel", "dynamic": False}
_INT8_TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
_E4M3_TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
_STORED_FORMATS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "w4a16": ("W4A16", _codes(None, **_INT4), ("+preset=h200_int4_tp1",)),
    "w4a8": ("W4A8", _codes(_E4M3_TOKENS, **_INT4), ("+preset=h200_w4a8_tp1",)),
    "nvfp4": ("NVFP4", _codes(None, "nvfp4-pack-quantized", **_NVFP4), ("+preset=h200_fp8_tp1", "quant=fp4")),
    "int8": ("INT8", _codes(_INT8_TOKENS, "int-quantized", **_INT8), ("+preset=h200_fp8_tp1", "quant=int8")),
    "fp8_block": ("FP8 in blocks", _IN_BLOCKS, ("+preset=h200_fp8_tp1", "quant=fp8_block")),
    "nf4": ("NF4", ("--stored", "nf4", *_vllm(kv_cache_dtype="fp8")), ("+preset=h200_fp8_tp1", "quant=nf4")),
    "gguf": (
        "GGUF, Q4_K_M",
        ("--stored", "gguf", *_vllm(kv_cache_dtype="fp8")),
        ("+preset=h200_fp8_tp1", "quant=gguf"),
    ),
}
"""Name -> title, options of vLLM, overrides of Dovetail."""
_QUANTIZED = {
    f"{name}_{form}": Run(
        f"{name}_{form}",
        f"{title} {form_title}",
        (*options, *_workloads("1x512/256", "16x512/256", "64x512/256", "256x512/256", *_PROMPT)),
        (*preset, f"model={model}", "engine.max_len=9216"),
    )
    for name, title, model in (("70b", "70B", "llama3_70b"), ("8b", "8B", "llama3_8b"))
    for form, (form_title, options, preset) in _STORED_FORMATS.items()
}

RUNS: dict[str, Run] = _LLAMA3 | _ROUTED | _QUANTIZED | _DENSE | _DRAFTED
"""The longest first."""
README = ("8b_bf16", "8b_fp8", "70b_fp8")
MODELS = tuple(dict.fromkeys((*README, *(run.model for run in RUNS.values()))))
"""The order of the tables."""
PARTS = ("offline", "online")
"""A model's runs: requests that all arrive at once, and servers under load."""


def runs_of(models: Sequence[str], parts: Sequence[str]) -> list[str]:
    """Return the names of all runs of some models. In place of a model, a run may be named."""
    return [
        name
        for name, run in RUNS.items()
        if (run.model in models or name in models) and PARTS[name.endswith("_online")] in parts
    ]
