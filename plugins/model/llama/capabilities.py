"""Capabilities and requirements of Llama-like models, from config.json alone."""

from __future__ import annotations

from dovetail.core.compose.capabilities import Capabilities, Host, Requires
from dovetail.core.interfaces import ModelSpec
from dovetail.plugins.model.config import LlamaConfig

LATENT_DTYPES = ("auto", "float32", "bfloat16", "float16", "fp8_e4m3")


def _channels(spec: ModelSpec) -> str:
    """Return the channels of MLPs and of experts in words."""
    dense = spec.moe is None or spec.moe.dense_layers > 0
    return " and ".join(
        [str(spec.intermediate)] * dense + ([f"{spec.moe.intermediate} expert"] if spec.moe is not None else [])
    )


def capabilities(config: LlamaConfig, host: Host) -> Capabilities:
    from dovetail.plugins.model.llama.families import mtp_layers, read_model, spec_of

    spec = spec_of(config)
    kinds = {"mla"} if spec.mla is not None else {"window" if window else "full" for window in spec.windows}
    layout = read_model(spec.hf or {}, "config.json")[1]
    scores = ("soft_cap",) * bool(layout.soft_cap) + ("sinks",) * layout.sinks
    return Capabilities(
        provides={
            "architecture": spec.architecture,
            "kinds": tuple(sorted(kinds)),
            "head_dim": spec.head_dim,
            "adapters": True,
            # Norms behind a block belong to the block before, so that none can be left out.
            "skips_layers": not layout.block.after,
            "expert_placement": spec.moe is not None,
            "mtp_layers": mtp_layers(spec.hf or {}),
        },
        requires=(
            Requires(
                kind="engine",
                key="tp",
                allowed=tuple(spec.shares()),
                reason=f"they share {spec.heads} heads, {spec.kv_heads} kv heads, {_channels(spec)} MLP channels",
            ),
            Requires(kind="engine", key="pp", at_most=1, reason="its layers run as one stage"),
            *(
                Requires(kind="engine", key="kv_dtype", allowed=LATENT_DTYPES, reason="its latents have these formats")
                for _ in range(spec.mla is not None)
            ),
            *(
                Requires(kind="attention", key="kinds", contains=kind, reason=f"it has {kind} attention layers")
                for kind in sorted(kinds)
            ),
            *(
                Requires(kind="attention", key="scores", contains=name, reason=f"its attention layers have {name}")
                for name in scores
            ),
        ),
    )
