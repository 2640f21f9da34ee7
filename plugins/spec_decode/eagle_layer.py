"""The draft layer of EAGLE (Li et al. 2024) and EAGLE-3 (Li et al. 2025), with the tensor names of SafeAILab/EAGLE.

Shapes: T tokens, C hidden channels, F channels of a feature, D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from dovetail.core.checkpoint import LazyTensor, located
from dovetail.core.errors import TensorError, shown
from dovetail.core.interfaces import (
    PLAIN,
    AttentionLayer,
    BuildContext,
    Bundle,
    ForwardContext,
    KVGroup,
    ModelSource,
    Partial,
    Plane,
    TensorHeader,
)
from dovetail.core.layers import (
    ColumnParallel,
    KVScales,
    Linear,
    LMHead,
    QKVParallel,
    RMSNorm,
    RowParallel,
    Stored,
    Taker,
    VocabTable,
    WeightSet,
    build_rope,
    local_heads,
)
from dovetail.core.memory.sizing import group_layers
from dovetail.core.ops import silu_and_mul
from dovetail.plugins.spec_decode.eagle_files import EagleShape
from dovetail.plugins.spec_decode.head import Head, apply, encoded, replicated


class Block:
    """Attention and an MLP: one layer of a head."""

    def __init__(
        self,
        build: BuildContext,
        shape: EagleShape,
        biased: Callable[[str], bool],
        layer: str,
        width: int,
        group: KVGroup,
        index: int = 0,
    ) -> None:
        """`layer`: prefix of its tensors. `width`: inputs of the attention matrices, in hidden states. `index`: number
        of the layer in the head."""
        self.build, spec = build, build.spec
        own, names = f"layers.{index}", tuple(f"{layer}.self_attn.{name}_proj" for name in "qkv")
        sizes = spec.heads, spec.kv_heads, spec.head_dim
        bias = biased(f"{names[0]}.bias")
        self.qkv = QKVParallel(f"{own}.attn.qkv", names, build, width * spec.hidden, *sizes, bias=bias)
        inner = spec.heads * spec.head_dim
        self.o = RowParallel(f"{own}.attn.o", f"{layer}.self_attn.o_proj", build, inner, spec.hidden, defers=True)
        ups = tuple(f"{layer}.mlp.{name}_proj" for name in ("gate", "up"))
        self.up = ColumnParallel(f"{own}.mlp.gate_up", ups, build, spec.hidden, (spec.intermediate,) * 2)
        down = f"{layer}.mlp.down_proj"
        self.down = RowParallel(f"{own}.mlp.down", down, build, spec.intermediate, spec.hidden, defers=True)
        self.mlp_norm = RMSNorm(f"{layer}.post_attention_layernorm", build, spec.hidden, shape.eps)
        self.rope = build_rope(shape.rope, build.max_len, build.device)
        self.kv_scales = KVScales(f"{layer}.self_attn", index, build, spec.kv_heads, self.qkv.kv_heads)
        self.attention = AttentionLayer(
            index=index,
            group=group.id,
            local=index,
            heads=self.qkv.heads,
            kv_heads=self.qkv.kv_heads,
            head_dim=spec.head_dim,
            scale=spec.head_dim**-0.5,
            k_scale=self.kv_scales.k,
            v_scale=self.kv_scales.v,
        )
        build.tune_attention(self.attention)

    def linears(self) -> Iterator[Linear]:
        yield from (self.qkv, self.o, self.up, self.down)

    def others(self) -> Iterator[Taker]:
        yield from self.mlp_norm.weights()
        yield from self.kv_scales.weights()

    def run(self, x: Bundle, residual_TC: torch.Tensor, ctx: ForwardContext) -> tuple[Partial, torch.Tensor]:
        """Return the output of the MLP and the residual to add."""
        attention, build = ctx.attn[self.attention.group], self.build
        attended = build.attention.write_and_attend(
            self.attention, attention, self.qkv(x), self.rope, None, self.o.inputs
        )
        boundary = build.collective.boundary
        normed, residual = boundary(self.o(attended), residual_TC, self.mlp_norm, self.up.inputs)
        return self.down(silu_and_mul(self.up(normed), emit=self.down.inputs)), residual


class EagleLayer(Head):
    """Base of both: attention and an MLP over the embedding of a token and the feature before it."""

    layer: str
    """Prefix of the first layer's tensors."""
    widths: int
    """Inputs of its attention matrices, in hidden states."""

    def __init__(self, build: BuildContext, shape: EagleShape, biased: Callable[[str], bool]) -> None:
        """`biased`: whether the files have a tensor of this name, such as a bias."""
        super().__init__(build)
        spec = build.spec
        _, kv_heads = local_heads(spec.heads, spec.kv_heads, build.collective.size)
        planes = tuple(Plane(name, (kv_heads, spec.head_dim), build.kv_dtype) for name in ("k", "v"))
        layers = (0,) * spec.layers
        self.groups: tuple[KVGroup, ...] = group_layers(layers, planes, build.page_tokens, build.first_group)
        fused = 2 * spec.hidden if shape.fused == 1 else shape.fused * spec.hidden
        self.fc = replicated("fc", build, fused, spec.hidden, bias=biased("fc.bias"))
        self.block = Block(build, shape, biased, self.layer, self.widths, self.groups[0])

    def linears(self) -> Iterator[Linear]:
        yield self.fc
        yield from self.block.linears()

    def others(self) -> Iterator[Taker]:
        yield from self.block.others()

    def check_values(self, source: ModelSource) -> None:
        """Check small tensors whose values must fit the target. Raises ConfigError naming file and tensor."""

    def fuse(self, features_TF: torch.Tensor) -> torch.Tensor:
        """Return what `forward` takes for features of the target, [T, C]."""
        return features_TF

    def forward(
        self, embeds_TC: torch.Tensor, features_TC: torch.Tensor, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer over tokens and the (fused) feature before each. Return the feature that it predicts, and the
        states for `logits`, [T, C] each. Capturable; no host sync."""
        raise NotImplementedError

    def logits(self, states_BC: torch.Tensor) -> torch.Tensor | None:
        """Return logits over the target's vocabulary, read-only and valid until the next call; None = the target's head
        makes them."""
        return None

    def reserve(self, rows: int) -> None:
        """Allocate what `logits` of up to so many rows would otherwise write anew in each call."""


class Eagle1Layer(EagleLayer):
    """EAGLE and EAGLE-2: the fused pair is the residual; no norm precedes attention. The output is a feature, which the
    target's head turns into logits."""

    layer, widths = "layers.0", 1

    def forward(
        self, embeds_TC: torch.Tensor, features_TC: torch.Tensor, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pair_TC = apply(self.fc, torch.cat((embeds_TC, features_TC), -1))
        mixed, residual = self.block.run(encoded(self.block.qkv, pair_TC), pair_TC, ctx)
        collective = self.build.collective
        states_TC = collective.reduce(mixed) + collective.whole(residual)
        return states_TC, states_TC


class Eagle3Layer(EagleLayer):
    """EAGLE-3: attention reads the normed embedding beside the normed feature, which is the residual. Logits are over a
    draft vocabulary, which `d2t` maps to the target's."""

    layer, widths = "midlayer", 2
    ignored = (*Head.ignored, "t2d")

    def __init__(self, build: BuildContext, shape: EagleShape, biased: Callable[[str], bool]) -> None:
        super().__init__(build, shape, biased)
        spec = build.spec
        self.embed_norm = RMSNorm(f"{self.layer}.input_layernorm", build, spec.hidden, shape.eps)
        self.feature_norm = RMSNorm(f"{self.layer}.hidden_norm", build, spec.hidden, shape.eps)
        self.norm = RMSNorm("norm", build, spec.hidden, shape.eps)
        self.table = VocabTable("lm_head", build, spec.vocab, spec.hidden, lookup=False, logits=True)
        self.head = LMHead(self.table, build)
        self.target_vocab = shape.target_vocab
        self.ids_D: torch.Tensor | None = None
        """int64: the target's id of each draft id; None = both vocabularies are the same."""
        if spec.vocab < shape.target_vocab:
            self.ids_D = torch.arange(spec.vocab, device=build.device)
        self._logits_MV: torch.Tensor | None = None
        """Logits of the latest call of `logits`; -inf outside of the draft vocabulary, where nothing writes."""

    def others(self) -> Iterator[Taker]:
        yield from super().others()
        for norm in (self.embed_norm, self.feature_norm, self.norm):
            yield from norm.weights()
        yield from self.table.weights()
        mapped = self.ids_D is not None
        yield WeightSet((Stored("d2t", (self.build.spec.vocab,), "zeros", optional=not mapped),), _check_map, self._map)

    def fuse(self, features_TF: torch.Tensor) -> torch.Tensor:
        return apply(self.fc, features_TF)

    def forward(
        self, embeds_TC: torch.Tensor, features_TC: torch.Tensor, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed_TC = [
            norm(x)[0][PLAIN].values for norm, x in ((self.embed_norm, embeds_TC), (self.feature_norm, features_TC))
        ]
        first = encoded(self.block.qkv, torch.cat(normed_TC, -1))
        mixed, residual = self.run_later(*self.block.run(first, features_TC, ctx), ctx)
        collective = self.build.collective
        normed, residual = collective.boundary(mixed, residual, self.norm)
        return collective.whole(residual), normed[PLAIN].values

    def run_later(self, mixed: Partial, residual_TC: torch.Tensor, ctx: ForwardContext) -> tuple[Partial, torch.Tensor]:
        """Run the layers after the first one; EAGLE-3 has none."""
        return mixed, residual_TC

    def logits(self, states_BC: torch.Tensor) -> torch.Tensor:
        logits_BD = self.head(states_BC)
        if self.ids_D is None:
            return logits_BD
        if self._logits_MV is None or len(logits_BD) > len(self._logits_MV):
            logits_BV = logits_BD.new_full((len(logits_BD), self.target_vocab), float("-inf"))
        else:
            logits_BV = self._logits_MV[: len(logits_BD)]
        return logits_BV.index_copy_(1, self.ids_D, logits_BD)

    def reserve(self, rows: int) -> None:
        if self.ids_D is not None:
            shape, build = (rows, self.target_vocab), self.build
            self._logits_MV = torch.full(shape, float("-inf"), dtype=build.dtype, device=build.device)

    def check_values(self, source: ModelSource) -> None:
        if source.weights is None:
            return
        with located(source.weights):
            self._map({name: opener() for name, opener in source.weights.open() if name == "d2t"})

    def _map(self, tensors: Mapping[str, LazyTensor]) -> None:
        """Read d2t: what to add to each draft id."""
        if self.ids_D is None or "d2t" not in tensors:
            return
        ids_D = torch.arange(len(self.ids_D)) + tensors["d2t"][:].long().cpu()
        outside = (ids_D < 0) | (ids_D >= self.target_vocab)
        if outside.any():
            at = int(outside.nonzero()[0])
            raise TensorError(
                "d2t", f"maps draft id {at} to {int(ids_D[at])}; the target's ids are below {self.target_vocab}"
            )
        if len(ids_D.unique()) < len(ids_D):
            raise TensorError("d2t", "maps several draft ids to one id of the target")
        self.ids_D.copy_(ids_D)


def _check_map(headers: Mapping[str, TensorHeader]) -> None:
    for name, header in headers.items():
        if header.dtype not in ("I64", "I32"):
            raise TensorError(name, f"is {shown(header.dtype)} in the checkpoint; it must be I64 or I32")
