"""The decoder block: attention, MLP and norms. Shapes: T tokens, C channels."""

from dovetail.core.interfaces import PLAIN, AttentionLayer, Hidden, KVGroup, Plane
from dovetail.core.layers import ColumnParallel, QKVParallel, RMSNorm, RowParallel, build_rope
from dovetail.core.ops import silu_and_mul
from dovetail.core.rope import RopeConfig


class Block:
    kv_groups = ()

    def __init__(self, config, build):
        super().__init__(config, build)
        spec, dim = build.spec, build.spec.head_dim
        self.norms = [RMSNorm(f"norm.{i}", build, spec.hidden, 1e-6) for i in range(3)]
        self.qkv = QKVParallel("attn.qkv", ("q", "k", "v"), build, spec.hidden, spec.heads, spec.kv_heads, dim)
        self.o = RowParallel("attn.o", "o", build, spec.hidden, spec.hidden)
        self.up = ColumnParallel("mlp.up", ("gate", "up"), build, spec.hidden, (spec.intermediate,) * 2)
        self.down = RowParallel("mlp.down", "down", build, spec.intermediate, spec.hidden)
        self.layers = (*self.norms, self.qkv, self.o, self.up, self.down)
        self.rope = build_rope(RopeConfig(dim), build.max_len, build.device)
        planes = tuple(Plane(name, (self.qkv.kv_heads, dim), build.kv_dtype) for name in ("k", "v"))
        self.kv_groups = (KVGroup(0, layers=(0,), planes=planes, page_tokens=build.page_tokens),)
        self.layer = AttentionLayer(0, 0, 0, self.qkv.heads, self.qkv.kv_heads, dim, scale=dim**-0.5)

    def finish(self):
        for linear in (self.qkv, self.o, self.up, self.down):
            linear.finish()

    def forward(self, embeds_TC, ctx, taps=()):
        collective, attention, attn = self.build.collective, self.build.attention, ctx.attn[0]
        x, residual = collective.boundary(embeds_TC, None, self.norms[0], self.qkv.inputs)
        x = self.o(attention.write_and_attend(self.layer, attn, self.qkv(x), self.rope, emit=self.o.inputs))
        x, residual = collective.boundary(x, residual, self.norms[1], self.up.inputs)
        x = self.down(silu_and_mul(self.up(x), emit=self.down.inputs))
        states, residual = collective.boundary(x, residual, self.norms[2])
        return Hidden(states[PLAIN].values, {0: collective.whole(residual)} if 0 in taps else {})
