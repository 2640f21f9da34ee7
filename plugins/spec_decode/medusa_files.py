"""Shape of Medusa heads, from the config.json and the tensors that FasterDecoding publishes. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.core.interfaces import ModelSource, ModelSpec, Parameters
from dovetail.plugins.spec_decode.config import MedusaConfig
from dovetail.plugins.spec_decode.head_files import MOST, read_config, source_of

FILE = "medusa_lm_head.safetensors"
"""Published name of the file with all heads."""


@dataclass(frozen=True, slots=True)
class MedusaShape:
    """Facts about Medusa heads. Head i predicts the token after the next i + 1."""

    heads: int
    layers: int
    """Residual blocks of each head."""
    own: bool
    """Each head has logits of its own; otherwise all use the target's."""
    hidden: int | None
    vocab: int | None
    """None = config.json does not state it; the tensors show whether they fit the target."""

    @property
    def spec(self) -> ModelSpec | None:
        """The heads as a layer whose attention has no channels, so no KV; None = their size is not stated."""
        if self.hidden is None or self.vocab is None:
            return None
        blocks = self.heads * self.layers * self.hidden
        return ModelSpec(
            architecture="medusa",
            vocab=self.vocab,
            layers=1,
            hidden=self.hidden,
            heads=1,
            kv_heads=1,
            head_dim=0,
            intermediate=self.hidden,
            max_len=1,
            dtype="float16",
            parameters=Parameters(
                embedding=0,
                head=self.heads * self.vocab * self.hidden if self.own else 0,
                attention=0,
                mlp=blocks * self.hidden,
                rest=blocks,
            ),
        )


def medusa_source(config: MedusaConfig) -> ModelSource:
    return source_of(config, (FILE,))


def read_medusa(config: MedusaConfig) -> MedusaShape:
    """Read the shape. The tensors show how many heads there are beyond those that config.json states, and whether they
    have logits of their own; without files, `medusa_shared_head` states that they have none."""
    stated, source = read_config(config), medusa_source(config)
    heads = stated.count("medusa_num_heads", at_most=MOST["heads"])
    layers = stated.count("medusa_num_layers", 1, at_least=0, at_most=MOST["layers"])
    own = not stated.flag("medusa_shared_head")
    hidden = stated.count("hidden_size", 0, at_least=0, at_most=MOST["hidden"]) or None
    vocab = stated.count("vocab_size", 0, at_least=0, at_most=MOST["vocab"]) or None
    if source.weights is not None:
        tensors = source.weights.tensors()
        # config.json of FasterDecoding/medusa-vicuna-7b-v1.3 states fewer heads than its file has.
        while f"{heads}.0.linear.weight" in tensors:
            heads += 1
        logits = tensors.get(f"0.{layers}.weight")
        own = logits is not None
        shapes = [tensor.shape for tensor in (tensors.get("0.0.linear.weight"), logits) if tensor is not None]
        hidden = hidden or next((shape[-1] for shape in shapes if len(shape) == 2), None)
    return MedusaShape(heads, layers, own, hidden, vocab)
