"""Contract suite for attention backends. Authors subclass:

class TestMine(AttentionContract):
    def make(self):
        return MyBackend(MyConfig())

Tests run the backend over shuffled pages, poisoned where nothing was written, and compare it with a float64 loop.
Shapes: T tokens, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces import MLA, PLAIN, AttentionBackend, BatchMeta, HostBounds, TreeMask
from dovetail.core.ops.formats import encode_reference
from dovetail.core.testing.attention_arena import MAX_LEN, SCALE, Arena, Step
from dovetail.core.testing.attention_latent import LatentTests
from dovetail.core.testing.attention_write import WriteTests
from dovetail.core.testing.formats import SCALED_ROWS
from dovetail.core.testing.numeric import (
    TOLERANCE,
    assert_near,
    fresh,
    fresh_random,
    same_bits,
)

__all__ = ["AttentionContract"]

Rows = Sequence[tuple[str, int]]

BATCHES: dict[str, Sequence[tuple[Rows, int]]] = {
    "prompts": [([("a", 9), ("b", 5), ("c", 17), ("d", 1)], 0)],
    "chunks": [([("a", 7)], 0), ([("a", 6), ("b", 3)], 0), ([("b", 11), ("a", 4)], 0)],
    "decode": [([("a", 9), ("b", 5), ("c", 17)], 0), *[([("c", 1), ("a", 1), ("b", 1)], 3)] * 4],
    "mixed": [
        ([("a", 9), ("b", 6)], 0),
        ([("b", 1), ("a", 1), ("c", 5)], 2),
        ([("a", 1), ("b", 1), ("c", 12), ("d", 3)], 2),
        ([("c", 1), ("a", 1), ("d", 8), ("b", 1)], 2),
    ],
    "drafts": [
        ([("a", 9), ("b", 6), ("c", 17)], 0),
        ([("a", 4), ("b", 4), ("c", 4)], 3),
        ([("c", 1), ("a", 5), ("b", 2), ("d", 8)], 3),
    ],
}
"""Consecutive steps: rows (sequence, tokens) and the number of decode rows among them."""

each_batch = pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)


class AttentionContract(WriteTests, LatentTests):
    """Tests of the rules in dovetail.core.interfaces.attention that a backend must follow."""

    device = "cpu"
    """Device to test on, for instance "cuda"."""
    dtype = torch.float32
    """Dtype of q, k, v and the output."""
    kv_dtypes: tuple[torch.dtype, ...] = ()
    """Supported KV dtypes other than `dtype`; 8-bit ones are scaled."""
    tolerance: float | None = None
    """Maximum error of a token's output relative to its norm; None = by dtype."""
    heads: tuple[tuple[int, int], ...] = ((4, 4), (6, 2), (4, 1))
    """(query heads, kv heads) to test: multi-head, grouped, multi-query."""
    head_dims: tuple[int, ...] = (16, 24)
    """Head dims to test."""
    page_tokens: tuple[int, ...] = (4, 8)
    """Page sizes to test."""
    windows = True
    """Whether it supports sliding windows (capability kinds: window)."""
    scores: tuple[str, ...] = ()
    """Changes of scores that it supports (capability scores): "soft_cap", "sinks"."""
    tree = True
    """Whether it supports tree masks (capability tree)."""
    mixed_graphs = False
    """Whether one captured graph serves mixed steps (capability graphs: "mixed")."""
    mla: tuple[MLA, ...] = ()
    """Sizes of compressed latents to test (capability kinds: mla); () = it does not implement attend_mla."""
    mla_heads: tuple[int, ...] = (4, 6)
    """Query heads to test with latents."""
    mla_kv_dtypes: tuple[torch.dtype, ...] = ()
    """Supported dtypes of latents other than `dtype`; float8_e4m3fn is scaled."""
    poison = float("nan")
    """Content of page slots that nothing has written."""
    seed: int | None = None
    """Random seed; None = a fresh one for each test. A failure names the seed to set here."""

    def make(self) -> AttentionBackend:
        """Return a fresh backend. The only method to override."""
        raise NotImplementedError("return your backend: MyBackend(MyConfig())")

    # Visibility

    @each_batch
    def test_equals_the_loop(self, batch: Sequence[tuple[Rows, int]]) -> None:
        for number, heads in enumerate(self.heads):
            arena = self._arena(heads=heads, head_dim=self.head_dims[number % len(self.head_dims)])
            for rows, num_decode in batch:
                arena.run(arena.plan(rows, num_decode=num_decode))

    def test_random_batches(self) -> None:
        """Random batches such as a scheduler may plan, with loose bounds, padding and rejected drafts."""
        fresh(self)
        rng = fresh_random()
        for _ in range(3):
            arena = self._arena(heads=self.heads[1 % len(self.heads)], windows=self._windows(0, 7))
            for _ in range(4):
                known = [name for name, length in arena.paging.lengths.items() if length and rng.random() < 0.7]
                decode = [(name, rng.randint(1, 4)) for name in known]
                others = [name for name in "abcdefgh" if name not in known]
                new = rng.sample(others, min(len(others), rng.randint(not decode, 3)))
                prefill = [(name, rng.randint(1, 13)) for name in new]
                arena.run(arena.plan(decode + prefill, num_decode=len(decode), slack=5, padding=rng.randint(0, 2)))
                for name, count in decode:
                    arena.paging.rewind(name, rng.randint(0, count - 1))

    def test_host_bounds_may_be_loose(self) -> None:
        """The host has upper bounds of lengths; the device has the exact ones."""
        if self.make().exact_lengths == "host":
            pytest.skip('exact_lengths = "host": the engine gives exact bounds')
        for everywhere in (False, True):
            arena = self._arena()
            arena.run(arena.plan([("a", 9), ("b", 6)], slack=11, slack_everywhere=everywhere))
            rows = [("b", 3), ("a", 1), ("c", 7)]
            arena.run(arena.plan(rows, num_decode=2, slack=11, slack_everywhere=everywhere))

    def test_padded_draft_positions_do_not_reach_valid_ones(self) -> None:
        """Decode rows are padded to the longest draft. Lengths include the padding, which holds garbage."""
        arena = self._arena()
        arena.run(arena.plan([("a", 9), ("b", 6), ("c", 15)]))
        valid = {"a": 4, "b": 1, "c": 2}
        step = arena.plan([(name, 4) for name in valid], num_decode=3, slack=6)
        counted: list[int] = []
        garbage: list[int] = []
        for token, _, name, at in step.row_tokens():
            (counted if at - step.paged.starts["abc".index(name)] < valid[name] else garbage).append(token)
        for layer in arena.layers:
            qkv = arena.random_qkv(step)
            qkv[garbage] *= 1e3
            arena.check(layer, step, arena.write(layer, step, qkv), counted)
        for name, count in valid.items():
            arena.paging.rewind(name, 4 - count)
        arena.run(arena.plan([("c", 2), ("a", 1), ("b", 3)], num_decode=3))

    def test_indices_are_counted_back_from_the_length(self) -> None:
        """The index of a token in the cache is not its position, which differs from it in trees and padded drafts."""
        arena = self._arena(windows=self._windows(0, 6))
        for rows, num_decode in (([("a", 9), ("b", 25)], 0), ([("b", 1), ("a", 3), ("c", 7)], 2)):
            arena.run(arena.plan(rows, num_decode=num_decode, slack=4, gap=7))

    def test_rows_may_be_long(self) -> None:
        """Kernels split the keys of long rows over programs and merge the parts."""
        pages = 2 * ceil_div(MAX_LEN, min(self.page_tokens))
        arena = self._arena(windows=self._windows(0, 530), pages=pages)
        prompt = arena.plan([("a", 600), ("b", 520)])
        for layer in arena.layers:
            arena.write(layer, prompt)
        arena.run(arena.plan([("a", 1), ("b", 3), ("c", 5)], num_decode=2, slack=4))
        arena.run(arena.plan([("b", 1), ("a", 9)], num_decode=1))

    def test_padding_tokens_belong_to_no_row(self) -> None:
        arena = self._arena()
        arena.run(arena.plan([("a", 9), ("b", 6)], padding=3))
        arena.run(arena.plan([("b", 1), ("a", 1), ("c", 4)], num_decode=2, padding=2))

    def test_a_plan_of_capacity_serves_any_step(self) -> None:
        """While a graph of mixed steps is captured, the host's numbers are capacities; only tensors define the rows."""
        if not self.mixed_graphs:
            pytest.skip("mixed_graphs = False")
        arena = self._arena(windows=self._windows(7))
        rounds: Sequence[tuple[Rows, int]] = (
            ([("a", 9), ("b", 17)], 0),
            ([("b", 3), ("a", 1), ("c", 13)], 2),
            ([("c", 1), ("a", 1)], 2),
        )
        for rows, num_decode in rounds:
            arena.run(arena.plan(rows, num_decode=num_decode, slack=40, padding=5, spare=3))
        # Rows that verify unlike numbers of drafts.
        for rows in ([("a", 1), ("b", 4), ("c", 2)], [("c", 5), ("b", 1)]):
            arena.run(arena.plan(rows, num_decode=len(rows), slack=40, padding=5, spare=2, ragged=True))

    @pytest.mark.parametrize("window", (1, 6, 8, 100))
    def test_window_counts_the_token_itself(self, window: int) -> None:
        self._needs_windows()
        arena = self._arena(windows=(window,))
        for rows, num_decode in (
            ([("a", 9), ("b", 25)], 0),
            ([("a", 13)], 0),
            ([("b", 1), ("a", 1), ("c", 7)], 2),
            ([("c", 3), ("a", 5), ("b", 1)], 3),
        ):
            arena.run(arena.plan(rows, num_decode=num_decode, slack=4))

    def test_scores_may_be_capped(self) -> None:
        self._needs_scores("soft_cap")
        self._run_scores(soft_cap=0.5)

    def test_sinks_count_in_the_sum_alone(self) -> None:
        """A head whose sink outweighs its keys attends to almost nothing, and one with a small sink as without it."""
        self._needs_scores("sinks")
        heads, _ = self.heads[-2 % len(self.heads)]
        self._run_scores(sinks=torch.linspace(-9.0, 5.0, heads, device=self.device))

    def _needs_scores(self, what: str) -> None:
        if what not in self.scores:
            pytest.skip(f"scores = {self.scores}")

    def _run_scores(self, **options: Any) -> None:
        """Whole prompts, chunks and decode rows, in full layers and layers with a window."""
        arena = self._arena(windows=self._windows(0, 6), **options)
        for rows, num_decode in (([("a", 9)], 0), ([("a", 5), ("b", 17)], 0), ([("b", 1), ("a", 3), ("c", 7)], 2)):
            arena.run(arena.plan(rows, num_decode=num_decode, slack=4))

    def test_pages_behind_the_window_may_be_gone(self) -> None:
        """The allocator frees pages behind the window. Their table entries may then name another sequence's page."""
        self._needs_windows()
        arena = self._arena(windows=(6,))
        (group,) = arena.groups
        arena.run(arena.plan([("a", 30), ("b", 9)]))
        for rows, num_decode in (([("a", 1), ("b", 1)], 2), ([("b", 4), ("a", 3)], 2), ([("a", 7), ("b", 12)], 0)):
            for name, count in rows:
                at = arena.paging.lengths[name]
                table = arena.paging.table(group, name, at + count)
                behind = max(at - group.window + 1, 0) // group.page_tokens
                table[:behind] = [arena.paging.free[group.id][0]] * behind
            arena.run(arena.plan(rows, num_decode=num_decode, slack=3))

    def test_tree_mask_selects_visible_drafts(self) -> None:
        """Drafts see their ancestors; prompts beside them, which are longer than any tree, stay causal."""
        self._run_trees(0)

    def test_windows_count_positions_in_trees(self) -> None:
        """Siblings have one position, so an ancestor may be in the window though many keys are in between."""
        self._needs_windows()
        self._run_trees(3, 7)

    def _run_trees(self, *windows: int) -> None:
        if not self.tree:
            pytest.skip("tree = False")
        fresh(self)
        rng = fresh_random()
        for rows, num_decode in (
            ([("a", 9), ("b", 9)], 2),
            ([("a", 5), ("b", 3), ("c", 1), ("d", 27)], 3),
            ([("a", 65)], 1),
        ):
            arena = self._arena(windows=windows)
            arena.run(arena.plan([("a", 9), ("b", 6), ("c", 15), ("d", 4)]))
            positions: list[int] = []
            roots, bits = [], []
            for row, (name, count) in enumerate(rows):
                root = arena.paging.lengths[name]
                # Rows that are not decode rows have arbitrary values.
                mine = random_tree(count, rng) if row < num_decode else [rng.getrandbits(62)] * count
                roots += [root] * count
                bits += mine
                positions += [root + (b.bit_count() if row < num_decode else i) for i, b in enumerate(mine)]
            mask = TreeMask(_int64(roots, arena.device), _int64(bits, arena.device))
            change = {"tree": mask, "positions_T": _int64(positions, arena.device)}
            arena.run(arena.plan(rows, num_decode=num_decode, slack=4, change=change))

    def test_scores_may_be_large(self) -> None:
        """Softmax must subtract the maximum score before it exponentiates."""
        arena = self._arena()
        step = arena.plan([("a", 9), ("b", 5)])
        (layer, *_) = arena.layers
        qkv = arena.random_qkv(step)
        rows = qkv.view(len(qkv), -1, arena.head_dim)
        rows[:, : arena.heads] *= 30
        rows[:, arena.heads : arena.heads + arena.kv_heads] *= 30
        q_THD = arena.write(layer, step, qkv)
        got = arena.attend(layer, step, q_THD)[PLAIN].values
        # Large scores lose digits in their differences, so the tolerance is wider.
        assert_near(got, arena.expected(layer, step, q_THD), 1000 * arena.tolerance, "attention with large scores")

    def test_scale_is_the_layers_own(self) -> None:
        arena = self._arena()
        step = arena.plan([("a", 9), ("b", 5)])
        for layer in arena.layers:
            q_THD = arena.write(layer, step)
            for scale in (SCALE, 2 * SCALE):
                arena.check(replace(layer, scale=scale), step, q_THD)

    def test_kv_dtypes(self) -> None:
        if not self.kv_dtypes:
            pytest.skip("kv_dtypes = ()")
        for kv_dtype in self.kv_dtypes:
            kv_heads = self.heads[-2 % len(self.heads)][1]
            per_head = torch.linspace(0.01, 0.03, 2 * kv_heads, device=self.device).view(2, kv_heads)
            scales: list[tuple[Any, Any]] = [(1.0, 1.0)]
            if kv_dtype.itemsize == 1:
                # The last scales are so small that the largest values must saturate instead of overflowing.
                scales = [(0.013, 0.021), (per_head[0], per_head[1]), (0.004, 0.003)]
            for kv_scales in scales:
                arena = self._arena(kv_dtype=kv_dtype, kv_scales=kv_scales)
                arena.run(arena.plan([("a", 9), ("b", 6)]))
                arena.run(arena.plan([("b", 1), ("a", 1), ("c", 7)], num_decode=2))

    # Contexts

    def test_groups_have_separate_contexts(self) -> None:
        """One plan_host result serves every group; each has its own pages, page size, window and layers."""
        arena = self._arena(windows=self._windows(0, 6, 0))
        rounds: Sequence[tuple[Rows, int]] = (
            ([("a", 9), ("b", 17)], 0),
            ([("b", 1), ("a", 2), ("c", 7)], 2),
        )
        for rows, num_decode in rounds:
            step = arena.plan(rows, num_decode=num_decode)
            first = [(layer, arena.write(layer, step)) for layer in arena.layers]
            for layer, q_THD in reversed(first):
                arena.check(layer, step, q_THD)

    def test_contexts_of_several_steps_live_at_once(self) -> None:
        """The next step is planned while this one runs."""
        arena = self._arena(windows=self._windows(0, 6))
        arena.run(arena.plan([("a", 9), ("b", 17), ("c", 5)]))
        steps = [
            arena.plan([("a", 1), ("b", 1)], num_decode=2),
            arena.plan([("c", 3), ("d", 9)], num_decode=1),
            arena.plan([("e", 12)]),
        ]
        asked: list[tuple[Any, Step, torch.Tensor]] = []
        for step in reversed(steps):
            asked += [(layer, step, arena.write(layer, step)) for layer in arena.layers]
        for layer, step, q_THD in reversed(asked):
            arena.check(layer, step, q_THD)

    def test_metadata_is_read_only(self) -> None:
        arena = self._arena(windows=self._windows(0, 6))
        arena.run(arena.plan([("a", 9), ("b", 6)]))
        paged = arena.page([("a", 2), ("b", 1), ("c", 5)], num_decode=2, slack=3)
        before = {id: {name: value.clone() for name, value in tensors(meta)} for id, meta in paged.metas.items()}
        step = Step((("a", 2), ("b", 1), ("c", 5)), paged, arena.contexts(paged))
        arena.run(step)
        for id, meta in paged.metas.items():
            for name, value in tensors(meta):
                assert same_bits(value, before[id][name]), f"BatchMeta is read-only; the backend wrote to {name}"

    def test_bind_takes_new_pools(self) -> None:
        """The engine binds trial pools to measure memory, and then the real ones."""
        backend = self.make()
        for number in range(2):
            arena = self._arena(backend=backend)
            arena.run(arena.plan([("a", 9), ("b", 6)]))
            arena.run(arena.plan([("b", 1), ("a", 1), ("c", 7)], num_decode=2))
            for layer in arena.layers:
                plane = arena.paging.pools[layer.group].layer(layer.local, "k")
                empty = same_bits(plane, torch.full_like(plane, self.poison))
                assert not empty, "`write` must use the pools of the latest bind, but left them empty"
            if number == 0:
                backend.bind({})

    def test_plans_on_the_host_without_pools(self) -> None:
        """plan_host runs ahead of the device and must need nothing but the bounds."""
        self.make().plan_host(HostBounds((1, 1, 5), (9, 4, 5), 2))

    def test_nothing_waits_for_the_device(self) -> None:
        if torch.device(self.device).type != "cuda":
            pytest.skip("needs a CUDA device")
        arena = self._arena(windows=self._windows(0, 6))
        arena.run(arena.plan([("a", 9), ("b", 6)]))
        rows, num_decode = [("b", 1), ("a", 1), ("c", 7)], 2
        arena.run(arena.plan(rows, num_decode=num_decode))  # compiles kernels
        paged = arena.page([("b", 1), ("a", 1), ("d", 7)], num_decode=num_decode, slack=3)
        qkv = arena.random(9, (arena.heads + 2 * arena.kv_heads) * arena.head_dim)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            planned = arena.backend.plan_host(paged.host)
            ctxs = {id: arena.backend.plan_device(meta, paged.host, planned) for id, meta in paged.metas.items()}
            for layer in arena.layers:
                q_THD = arena.backend.write(layer, ctxs[layer.group], qkv, None)
                arena.backend.attend(layer, ctxs[layer.group], q_THD)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    # Output

    def test_emits_the_formats_asked_for(self) -> None:
        arena = self._arena()
        arena.run(arena.plan([("a", 9), ("b", 6)]))
        step, layer = arena.plan([("b", 1), ("a", 1), ("c", 7)], num_decode=2), arena.layers[0]
        q_THD = arena.write(layer, step)
        expected = arena.expected(layer, step, q_THD)
        for emit in ((PLAIN,), (SCALED_ROWS,), (PLAIN, SCALED_ROWS), (SCALED_ROWS, PLAIN)):
            bundle = arena.attend(layer, step, q_THD, emit)
            for fmt in emit:
                got = bundle[fmt]  # KeyError if the format is missing
                assert got.format is fmt, f"expected format {fmt.name}, got {got.format.name}"
                if fmt is PLAIN:
                    plain = got.scale is None and got.values.dtype == self.dtype
                    assert plain, f"plain output must have dtype {self.dtype} and no scale, got {got.values.dtype}"
                    assert_near(got.values, expected, arena.tolerance, "plain output")
                    continue
                like = encode_reference(expected.to(self.dtype), fmt)
                assert got.scale is not None and like.scale is not None, f"output in {fmt.name} must have scales"
                kinds = [(x.values.dtype, x.scale.dtype, x.scale.shape) for x in (got, like) if x.scale is not None]
                assert kinds[0] == kinds[1], "dtype of values, dtype and shape of scales: got, expected"
                assert_near(got.scale, like.scale, arena.tolerance, "scales of the output")
                decoded = got.values.double() * got.scale.double()
                assert_near(decoded, expected, arena.tolerance + TOLERANCE[torch.float16], "encoded output")

    # Helpers

    def _arena(self, *, backend: AttentionBackend | None = None, **options: Any) -> Arena:
        fresh(self)
        sizes = {"heads": self.heads[-2 % len(self.heads)], "head_dim": self.head_dims[0]}
        return Arena(backend or self.make(), **{**self._settings(), **sizes, **options})

    def _settings(self) -> dict[str, Any]:
        """Return the options of an Arena that all tests share."""
        return {
            "device": torch.device(self.device),
            "dtype": self.dtype,
            "kv_dtype": self.dtype,
            "tolerance": TOLERANCE[self.dtype] if self.tolerance is None else self.tolerance,
            "page_tokens": self.page_tokens,
            "poison": self.poison,
        }

    def _windows(self, *windows: int) -> tuple[int, ...]:
        return windows if self.windows else (0,) * len(windows)

    def _needs_windows(self) -> None:
        if not self.windows:
            pytest.skip("windows = False")


def tensors(meta: BatchMeta) -> list[tuple[str, torch.Tensor]]:
    values = [(field.name, getattr(meta, field.name)) for field in fields(meta)]
    return [(name, value) for name, value in values if isinstance(value, torch.Tensor)]


def random_tree(count: int, rng: random.Random) -> list[int]:
    """Return the bits of each token as in TreeMask. Token 0 is the root; the others have an earlier parent."""
    bits = [0]
    for draft in range(count - 1):
        bits.append(bits[rng.randrange(max(draft - 3, 0), draft + 1)] | 1 << draft)
    return bits


def _int64(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Numbers of 64 bits as int64, the upper half of them as negative ones."""
    return torch.tensor([value - (value >> 63 << 64) for value in values], device=device)
