"""Shapes of EAGLE heads, from the config.json that SafeAILab/EAGLE publishes. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dovetail.core.config_json import ConfigJson
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import ModelSpec, Parameters
from dovetail.core.rope import RopeConfig, read_rope
from dovetail.plugins.spec_decode.config import HeadFiles
from dovetail.plugins.spec_decode.head_files import MOST, read_config

MOST_LAYERS = 16
"""Most layers of a head that drafts with mask tokens."""
TAPS = "eagle_aux_hidden_state_layer_ids"
"""Key of the layers whose states an EAGLE-3 head fuses. Number n is the output of the first n layers; 0 = embedding."""


@dataclass(frozen=True, slots=True)
class EagleShape:
    """Facts about an EAGLE head."""

    spec: ModelSpec
    """The draft layers, with the draft vocabulary."""
    rope: RopeConfig
    eps: float
    target_vocab: int
    taps: tuple[int, ...] | None = None
    """Published numbers of the fused layers; None = the three that are usual for the target's depth."""
    fused: int = 1
    """States of the target that are fused per token."""
    mask_id: int = -1
    """Token whose embedding mask tokens have; -1 = the head has no mask tokens."""

    def tapped(self, layers: int) -> tuple[int, ...]:
        """Return the indices of the target's layers whose outputs are fused. `layers`: number of them. Raises
        ConfigError for layers that the target does not have."""
        if self.fused == 1:
            return ()
        numbers = (2, layers // 2, layers - 3) if self.taps is None else self.taps
        if any(not 1 <= n <= layers for n in numbers):
            raise ConfigError(
                f"spec_decode=eagle3: the head fuses the states after {', '.join(map(str, numbers))} layers, and the "
                f"model has {layers}: they must be from 1 to {layers} ({TAPS} in config.json)"
            )
        return tuple(n - 1 for n in numbers)


def read_eagle(config: HeadFiles) -> EagleShape:
    """Read the shape of an EAGLE or EAGLE-2 head."""
    return _read(read_config(config), "eagle", fused=1)


def read_eagle3(config: HeadFiles) -> EagleShape:
    """Read the shape of an EAGLE-3 head."""
    return _read(read_config(config), "eagle3", fused=3)


def read_parallel(config: HeadFiles) -> EagleShape:
    """Read the shape of a head that drafts with mask tokens (P-EAGLE)."""
    stated = read_config(config)
    shape = _read(stated, "parallel", fused=3, most_layers=MOST_LAYERS)
    mask = stated.count("ptd_token_id", at_least=0, at_most=shape.target_vocab - 1)
    p = shape.spec.parameters
    assert p is not None
    spec = replace(shape.spec, parameters=replace(p, rest=p.rest + 3 * shape.spec.hidden))
    return replace(shape, spec=spec, mask_id=mask)


def _read(config: ConfigJson, name: str, fused: int, most_layers: int = 1) -> EagleShape:
    layers = config.count("num_hidden_layers", 1, at_most=MOST["layers"])
    if layers > most_layers:
        able = "one layer" if most_layers == 1 else f"at most {most_layers} layers"
        raise config.wrong("num_hidden_layers", f"spec_decode={name} runs heads of {able}")
    config.choice("hidden_act", ("silu",), "silu")
    hidden = config.count("hidden_size", at_most=MOST["hidden"])
    heads = config.count("num_attention_heads", at_most=MOST["heads"])
    kv_heads = config.count("num_key_value_heads", heads, at_most=MOST["heads"])
    if heads % kv_heads:
        raise config.wrong("num_key_value_heads", f"it must divide the {heads} query heads")
    if hidden % heads and config.get("head_dim") is None:
        raise config.wrong("hidden_size", f"without head_dim it must be a multiple of {heads} heads")
    head_dim = config.count("head_dim", hidden // heads or 1, at_most=MOST["head_dim"])
    intermediate = config.count("intermediate_size", at_most=MOST["intermediate"])
    vocab = config.count("vocab_size", at_most=MOST["vocab"])
    draft_vocab = config.count("draft_vocab_size", vocab, at_most=vocab) if fused > 1 else vocab
    max_len = config.count("max_position_embeddings", 2048)
    taps, embeds = None, 1 if fused == 1 else 2
    if fused > 1:
        section = config.section("eagle_config") if config.get(TAPS) is None else config
        taps = section.counts(TAPS) or None
        if taps is not None and len(taps) != fused:
            raise section.wrong(TAPS, f"spec_decode={name} fuses the states of {fused} layers")
    qkv = (heads + 2 * kv_heads) * head_dim
    # Layers after the first one read one hidden state, and have one more norm.
    inputs, later = (embeds + layers - 1) * hidden, layers - 1
    spec = ModelSpec(
        architecture=name,
        vocab=draft_vocab,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        max_len=max_len,
        dtype=config.choice("torch_dtype", ("bfloat16", "float16", "float32"), "float16"),
        parameters=Parameters(
            embedding=0,
            head=draft_vocab * hidden if fused > 1 else 0,
            attention=inputs * qkv + layers * heads * head_dim * hidden,
            mlp=3 * layers * hidden * intermediate + (2 if fused == 1 else fused) * hidden * hidden,
            rest=((1 if fused == 1 else 4) + 2 * later) * hidden,
        ),
    )
    rope = read_rope(config, head_dim, max_len)
    return EagleShape(spec, rope, config.number("rms_norm_eps", 1e-6, at_most=1.0), vocab, taps, fused)
