"""Capabilities and requirements of decoders of transformers, from a trial on the meta device."""

from __future__ import annotations

from dovetail.core.compose.capabilities import Capabilities, Host, Requires
from dovetail.plugins.model.config import TransformersConfig


def capabilities(config: TransformersConfig, host: Host) -> Capabilities:
    # Imports torch and transformers.
    from dovetail.plugins.model.transformers.spec import decoder_of

    decoder = decoder_of(config)
    spec = decoder.spec
    scores = {"soft_cap": any(call.soft_cap for call in decoder.calls), "sinks": any(c.sinks for c in decoder.calls)}
    kinds = sorted({"window" if window else "full" for window in spec.windows})
    shared = f"they share {spec.heads} heads, {spec.kv_heads} kv heads, {spec.intermediate} MLP channels"
    return Capabilities(
        provides={
            "architecture": spec.architecture,
            "kinds": tuple(kinds),
            "head_dim": spec.head_dim,
            "adapters": True,
            "expert_placement": False,
        },
        requires=(
            Requires(kind="engine", key="tp", allowed=decoder.ranks, reason=decoder.why_one_rank or shared),
            Requires(kind="engine", key="pp", at_most=1, reason="its layers run as one stage"),
            Requires(
                kind="engine", key="overlap_tokens", at_most=0, reason="the library runs its layers without a break"
            ),
            *(
                Requires(kind="attention", key="kinds", contains=kind, reason=f"it has {kind} attention layers")
                for kind in kinds
            ),
            *(
                Requires(kind="attention", key="scores", contains=name, reason=f"its attention layers have {name}")
                for name, has in scores.items()
                if has
            ),
        ),
    )
