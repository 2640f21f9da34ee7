"""A decoder block in plain torch that shows the inputs of its matrices, for models with the tensors of Llama.

Shapes: S sequences, L positions, C channels, H heads, K kv heads, D head dim, R rotary dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dovetail.core.config_json import ConfigJson
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import ModelSpec
from dovetail.core.layers.rotary import build_rope
from dovetail.core.rope import RopeConfig, read_rope

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
LAYER = "model.layers.{}."
EMBEDDING = "model.embed_tokens.weight"
NORMS = ("input_layernorm", "post_attention_layernorm")

INPUTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Name of an input -> the matrices that multiply it."""
LINEARS = tuple(name for names in INPUTS.values() for name in names)

Seen = Callable[[str, torch.Tensor], None]
"""Takes the name of an input, or k or v, and its values [S, L, ...]."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """Shape of all blocks."""

    spec: ModelSpec
    eps: float
    rope: RopeConfig

    @classmethod
    def read(cls, spec: ModelSpec) -> Decoder:
        """Raises ConfigError for a model whose blocks differ from Llama's."""
        if spec.architecture not in FAMILIES:
            raise ConfigError(f"app=quantize calibrates {', '.join(FAMILIES)}; config.json states {spec.architecture}")
        assert spec.hf is not None, "a spec of a checkpoint has its config.json"
        config = ConfigJson(spec.hf, "config.json")
        eps = config.number("rms_norm_eps", 1e-6, at_most=1.0)
        return cls(spec, eps, read_rope(config, spec.head_dim, spec.max_len, None))

    def table(self, length: int, device: torch.device) -> torch.Tensor:
        """Return cos | sin of positions [0, length)."""
        return build_rope(self.rope, length, device).table

    def run(
        self,
        index: int,
        weights: Mapping[str, torch.Tensor],
        x_SLC: torch.Tensor,
        table_LR: torch.Tensor,
        seen: Seen = lambda name, values: None,
    ) -> torch.Tensor:
        """Return the output of block `index`. `weights`: its tensors, by the names within a layer."""

        def linear(name: str, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

        normed = self._norm(x_SLC, weights["input_layernorm.weight"])
        seen("qkv", normed)
        q, k, v = (linear(name, normed).unflatten(-1, (-1, self.spec.head_dim)) for name in INPUTS["qkv"])
        if "self_attn.q_norm.weight" in weights:
            q, k = (self._norm(x, weights[f"self_attn.{n}_norm.weight"]) for n, x in (("q", q), ("k", k)))
        q, k = _rotate(q, table_LR), _rotate(k, table_LR)
        seen("k", k)
        seen("v", v)
        attended = self._attend(q, k, v, self.spec.windows[index])
        seen("o", attended)
        x_SLC = x_SLC + linear("self_attn.o_proj", attended)
        normed = self._norm(x_SLC, weights["post_attention_layernorm.weight"])
        seen("gate_up", normed)
        gated = F.silu(linear("mlp.gate_proj", normed)) * linear("mlp.up_proj", normed)
        seen("down", gated)
        return x_SLC + linear("mlp.down_proj", gated)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), self.eps).to(x.dtype)

    def _attend(self, q_SLHD: torch.Tensor, k_SLKD: torch.Tensor, v_SLKD: torch.Tensor, window: int) -> torch.Tensor:
        """Return causal attention [S, L, H * D]; `window` = 0: to all earlier positions."""
        positions_L = torch.arange(q_SLHD.shape[1], device=q_SLHD.device)
        back_LL = positions_L[:, None] - positions_L
        mask_LL = back_LL >= 0 if not window else (back_LL >= 0) & (back_LL < window)
        q, k, v = (x.transpose(1, 2) for x in (q_SLHD, k_SLKD, v_SLKD))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_LL, enable_gqa=True)
        return y.transpose(1, 2).flatten(2)


def _rotate(x_SLHD: torch.Tensor, table_LR: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs of channels (i, i + R / 2)."""
    rotary = table_LR.shape[1]
    cos, sin = table_LR[: x_SLHD.shape[1], None].chunk(2, dim=-1)
    first, second = x_SLHD[..., :rotary].float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_SLHD.dtype)
    return torch.cat((turned, x_SLHD[..., rotary:]), dim=-1)
