"""Step time from hardware rates, phase by phase: the roofline model (Williams, Waterman, Patterson 2009)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from dovetail.core.compose import EngineConfig
from dovetail.core.errors import ConfigError
from dovetail.core.expert_load import expert_load
from dovetail.core.interfaces import CostModel, Formats, ModelSpec, Row, RowWork, StepTerms
from dovetail.core.interfaces.plan import SAMPLE
from dovetail.plugins.cost.config import RooflineConfig

MOST_EXACT_ROWS = 128
"""Rows up to which a weight of 4 bits is not rounded to E4M3. core.ops.packed_tiles has the same number, but its
package imports torch."""
ROUNDING_SHARE = 0.2
"""Time by which a kernel that rounds weights as it multiplies exceeds the library's, with some hundreds of rows."""


def _mean_rows(sums: Mapping[tuple[int, int], Sequence[int]]) -> Iterator[RowWork]:
    """Yield rows with the same sum of bounds. `sums`: (tokens, sampled) -> [rows, sum of bounds]."""
    for (tokens, sampled), (rows, bounds) in sums.items():
        mean, more = divmod(bounds, rows)
        yield RowWork(tokens, mean, sampled, rows - more)
        yield RowWork(tokens, mean + 1, sampled, more)


class Roofline(CostModel):
    """Linear layers + attention of chunks + attention of decode rows + all-reduces + sampling + kernels x overhead.

    Reads and matmuls of the linear layers overlap as in StepTerms.seconds. Attention takes the longer of both. Times
    are those of one of engine.tp ranks, and pipeline stages add up. Weights are read once per step, KV once per row.
    In FP8 matmuls of many rows, weights of fewer than 8 bits are rounded as they are multiplied (ROUNDING_SHARE) or
    before, to memory, whichever takes less time; or not at all (cost.decode_share), if quant.many_rows=exact.
    Activations stay in cache and are not counted. Experts on different ranks (engine.ep) take as long as those of the
    busiest rank; their exchange counts as two all-reduces, and between lanes as a gather and a scatter of every lane's
    rows, padded to those of the fullest lane.
    """

    config: RooflineConfig

    def bind(self, spec: ModelSpec, engine: EngineConfig, formats: Formats) -> None:
        super().bind(spec, engine, formats)
        c, p, tp = self.config, self._parameters, engine.tp
        self._products = self._flops(formats.product)
        plain = self._flops(formats.dtype)
        self._attention = plain * c.attention_share
        self._bandwidth = c.bandwidth * 1e12
        self._kv_bandwidth = self._bandwidth * c.kv_share
        # FLOPs on one rank; a multiply-add is two.
        self._linear_flops = 2 * (p.attention + p.mlp) / tp
        self._expert_flops = 2 * p.active_experts / tp
        self._many_rows_seconds, self._many_rows_flops = 0.0, self._linear_flops
        rounds = formats.product == "fp8" and formats.weight_bits < 8
        if rounds and formats.rounds and not formats.copy_bits:
            moved = (p.attention + p.mlp) * (formats.weight_bits / 8 + 1)
            self._many_rows_seconds = moved / tp / self._bandwidth
        elif rounds and not formats.rounds:
            self._many_rows_flops /= c.decode_share
        self._head_seconds = 2 * (p.head or p.embedding) / tp / self._flops(formats.head_product or formats.dtype)
        self._windows = Counter(spec.windows or (0,) * spec.layers)
        self._kv_bytes = spec.kv_bytes_per_token(formats.kv_bytes, tp) / spec.layers
        if (mla := spec.mla) is None:
            self._chunk_flops = self._decode_flops = 4 * spec.heads * spec.head_dim / tp
        else:
            # A decode row attends to the latent itself, a chunk to the heads expanded from it.
            self._chunk_flops = 2 * spec.heads * (mla.nope_dim + mla.rope_dim + mla.v_dim) / tp
            self._decode_flops = 2 * spec.heads * (2 * mla.kv_rank + mla.rope_dim) / tp
        self._fixed = c.step_us * 1e-6 + spec.layers * c.kernels * c.kernel_us * 1e-6
        self._sample_seconds = c.logits_passes * spec.vocab * 4 / tp / self._bandwidth
        self._hop = spec.hidden * formats.dtype_bytes / (c.link * 1e9)

    def step_seconds(self, rows: Iterable[RowWork]) -> float:
        return self.terms(rows).seconds

    @property
    def eager_seconds(self) -> float:
        return self.spec.layers * self.config.kernels * self.config.launch_us * 1e-6

    def lanes_terms(self, lanes: Sequence[Sequence[RowWork]]) -> Sequence[StepTerms]:
        total = sum(row.tokens * row.times for rows in lanes for row in rows)
        return [self._terms(rows, total / len(lanes)) for rows in lanes]

    def terms(self, rows: Iterable[RowWork]) -> StepTerms:
        return self._terms(rows)

    def _terms(self, rows: Iterable[RowWork], mean: float | None = None) -> StepTerms:
        """`mean`: tokens of the mean lane; None = all lanes have as many as this one."""
        tokens = sampled = 0
        chunk_flops = chunk_bytes = decode_flops = decode_bytes = 0.0
        for row in rows:
            tokens += row.tokens * row.times
            sampled += row.sampled * row.times
            pairs, read = self._attended(row)
            # A row that samples at every token is a decode row: one token and its drafts.
            if row.sampled == row.tokens:
                decode_flops += row.times * pairs * self._decode_flops
                decode_bytes += row.times * read
            else:
                chunk_flops += row.times * pairs * self._chunk_flops
                chunk_bytes += row.times * read
        if not tokens:
            return StepTerms()
        mean = tokens if mean is None else mean
        more_bytes, more_flops = self._excess(mean)
        weights = (self._read_bytes(mean) + more_bytes) / self.engine.tp / self._bandwidth
        many = tokens > MOST_EXACT_ROWS
        linear_flops = self._many_rows_flops if many else self._linear_flops
        flops = tokens * linear_flops + mean * self._expert_flops + more_flops
        products = flops / self._products + sampled * self._head_seconds
        products += min(self._many_rows_seconds, ROUNDING_SHARE * flops / self._products) if many else 0.0
        chunks = max(chunk_flops / self._attention, chunk_bytes / self._kv_bandwidth)
        decodes = max(decode_flops / self._attention, decode_bytes / self._kv_bandwidth)
        sampling = sampled * self._sample_seconds
        return StepTerms(weights, products, chunks, decodes, self._communication(tokens), self._fixed, sampling)

    def works(self, rows: Iterable[Row]) -> Iterable[RowWork]:
        """Rows with equally many tokens are added up, unless windows make the cost depend on each length."""
        if len(self._windows) > 1 or 0 not in self._windows:
            return super().works(rows)
        sums: dict[tuple[int, int], list[int]] = {}
        for _, _, _, count, bound, draft, flags in rows:
            if (found := sums.get((count, sampled := draft + 1 if flags & SAMPLE else 0))) is None:
                found = sums[count, sampled] = [0, 0]
            found[0] += 1
            found[1] += bound
        return _mean_rows(sums)

    def _excess(self, tokens: float) -> tuple[float, float]:
        """Return (bytes over the replica's ranks, FLOPs of a rank) that experts of the busiest rank add to the mean.
        `tokens`: those of the mean lane."""
        p, moe, ep = self._parameters, self.spec.moe, self.engine.ep or 1
        if moe is None or ep == 1:
            return 0.0, 0.0
        lanes = self.engine.lanes
        load = expert_load(moe, round(tokens * lanes), ep)
        read = self.formats.expert_bytes(p.experts * load.distinct * ep / moe.experts / load.reads) / lanes
        return (load.reads - 1) * read, (load.products - 1) * tokens * self._expert_flops

    def _attended(self, row: RowWork) -> tuple[float, float]:
        """Return (query-key pairs, KV bytes read) of one row over all layers."""
        pairs = read = 0.0
        for window, layers in self._windows.items():
            if not window or row.bound <= window:
                pairs += layers * row.tokens * (row.bound - (row.tokens - 1) / 2)
                read += layers * row.bound
            else:
                pairs += layers * row.tokens * window
                read += layers * min(row.bound, window + row.tokens - 1)
        return pairs, read * self._kv_bytes

    def _communication(self, tokens: int) -> float:
        c, engine = self.config, self.engine
        seconds = (engine.pp - 1) * (c.link_us * 1e-6 + tokens * self._hop)
        if engine.tp > 1:
            share = 2 * (engine.tp - 1) / engine.tp
            seconds += 2 * self.spec.layers * (c.link_us * 1e-6 + share * tokens * self._hop)
        if engine.lanes > 1 and (moe := self.spec.moe) is not None:
            others = (engine.tp * engine.lanes - 1) / engine.tp
            seconds += 2 * (self.spec.layers - moe.dense_layers) * (c.link_us * 1e-6 + others * tokens * self._hop)
        return seconds

    def _flops(self, product: str) -> float:
        """Return the FLOP/s of matmuls in this format."""
        tflops = self.config.tflops
        if product not in tflops:
            raise ConfigError(
                f"cost.tflops has no rate for matmuls in {product}; it has {', '.join(tflops)}. "
                f"Add cost.tflops.{product}=<TFLOP/s> if the device has them"
            )
        return tflops[product] * 1e12
