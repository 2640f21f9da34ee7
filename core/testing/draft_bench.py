"""Bench for drafters: a drafter with the device state, pages and attention that the engine gives it, without a target.

Shapes: B rows, S slots, K drafts, V vocabulary, T tokens of a step, C channels, J joining sequences.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces import (
    AcceptedPath,
    CatchUp,
    Draft,
    DraftContext,
    Drafter,
    FedTokens,
    Hidden,
    HostBounds,
    KVGroup,
    TargetView,
)
from dovetail.core.memory.pools import make_pools
from dovetail.core.ops.trees import TreeState
from dovetail.core.worker.batch import lay_out
from dovetail.core.worker.device_state import DeviceState
from dovetail.core.worker.drafts import Drafts
from dovetail.core.worker.row_sections import pack_catch_up

Histories = Mapping[int, Seq[int]]
"""slot -> known tokens."""


@dataclass(frozen=True)
class Guesses:
    """Drafts of one row, without the ignored entries."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...] | None = None
    """Index of each draft's parent, -1 = the last known token; None = a chain."""
    probs_KV: torch.Tensor | None = None
    """Probabilities from which each was drawn, if they are verified by rejection."""

    @property
    def longest(self) -> list[int]:
        """Indices of the drafts of the longest path, the last one of equally long ones."""
        paths: list[list[int]] = [[]]
        for draft in range(len(self.tokens)):
            parent = draft - 1 if self.parents is None else self.parents[draft]
            paths.append([*paths[parent + 1], draft])
        return max(reversed(paths), key=len)

    def same(self, other: Guesses) -> bool:
        if (self.parents, self.tokens) != (other.parents, other.tokens):
            return False
        if (self.probs_KV is None) != (other.probs_KV is None):
            return False
        return self.probs_KV is None or torch.allclose(self.probs_KV, other.probs_KV, atol=1e-5)


class _Watched(Drafter):
    """Keeps the latest draft of another drafter."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter.config)
        self.inner = drafter
        self.draft: Draft | None = None
        self.observed: tuple[FedTokens, Hidden] | None = None
        """Latest arguments of `observe`."""
        self.guard: AbstractContextManager[object] = nullcontext()
        """Context of each proposal."""
        self.changed = False
        """Whether `propose` changed one of its inputs."""

    @property
    def lookahead(self) -> int:
        return self.inner.lookahead

    @property
    def depth(self) -> int:
        return self.inner.depth

    def keep(self, path: AcceptedPath) -> None:
        self.inner.keep(path)

    def kv_groups(self) -> tuple[KVGroup, ...]:
        return self.inner.kv_groups()

    def join(self, slots_J: torch.Tensor, computed_J: torch.Tensor) -> None:
        self.inner.join(slots_J, computed_J)

    def catch_up(self, fed: FedTokens, lengths_B: torch.Tensor) -> None:
        self.inner.catch_up(fed, lengths_B)

    def observe(self, fed: FedTokens, hidden: Hidden) -> None:
        self.observed = fed, hidden
        self.inner.observe(fed, hidden)

    def propose(self, ctx: DraftContext) -> Draft:
        given = ctx.slots_B, ctx.tokens_SL, ctx.lengths_B, ctx.k_B, ctx.key_S
        before = [tensor.clone() for tensor in given]
        with self.guard:
            self.draft = self.inner.propose(ctx)
        now = ctx.slots_B, ctx.tokens_SL, ctx.lengths_B, ctx.k_B, ctx.key_S
        self.changed |= not all(map(torch.equal, before, now))
        return self.draft


class Bench:
    """A bound drafter with the state, pages and attention that the engine gives it."""

    def __init__(self, drafter: Drafter, view: TargetView) -> None:
        self.drafter, self.view = drafter, view
        self.lookahead = drafter.lookahead
        self.groups = drafter.kv_groups()
        self.vocab, self.slots, self.page = view.build.spec.vocab, view.max_seqs, view.build.page_tokens
        self.rows: list[int] = []
        """Slots of the sequences that are seated."""
        self.watched = _Watched(drafter)

    def seat(
        self,
        histories: Histories,
        *,
        poison: int = 0,
        keys: torch.Tensor | None = None,
        chunk: int = 0,
        shared: int = 0,
        follow: bool = True,
    ) -> None:
        """Give each history a slot of a new device state, and feed it in chunks of `chunk` tokens (0 = whole) up to its
        last token. Tokens that the drafter must not read depend on `poison`, and its pages hold NaN. keys: int64
        [slots]; None = each key depends on the sequence's tokens alone. `shared`: pages that the second sequence takes
        over from the first, which is fed before. `follow`: whether the drafter follows the prompts; with
        `shared`, the first one."""
        view, generator = self.view, torch.Generator().manual_seed(poison)
        self.state = state = DeviceState(
            slots=self.slots,
            max_len=view.max_len,
            lookahead=self.lookahead,
            groups=self.groups,
            device=view.build.device,
            seed=0,
            draft_probs=self.vocab if self.drafter.verify == "rejection" else 0,
            draft_depth=self.drafter.depth,
        )
        self.drafts = Drafts(self.watched, state, view.build.attention, self.vocab)
        state.tokens_SL.random_(self.vocab, generator=generator)
        state.key_S.random_(1 << 60, generator=generator)
        state.temperature_S.fill_(1.0)
        pages = ceil_div(state.tokens_SL.shape[1], self.page)
        pools = make_pools(self.groups, {group.id: pages * self.slots for group in self.groups}, view.build.device)
        for pool in pools.values():
            for plane in pool.planes.values():
                plane.fill_(float("nan"))
        view.build.attention.bind(pools)
        for group in self.groups:
            order = torch.randperm(pages * self.slots, generator=generator) + 1
            state.tables[group.id][: self.slots] = order.view(self.slots, -1).int()
        self.rows = list(histories)
        for slot, history in histories.items():
            state.tokens_SL[slot, : len(history)] = torch.tensor(history, dtype=torch.int32)
            state.key_S[slot] = _key(history) if keys is None else keys[slot]
        if shared:
            first, second = self.rows
            self._feed({first: histories[first]}, 0, chunk, follow=follow)
            for table in state.tables.values():
                table[second, :shared] = table[first, :shared]
            computed = shared * self.page
            self._feed({second: histories[second]}, computed, chunk, known=computed if follow else 0)
        else:
            self._feed(histories, 0, chunk, follow=follow)

    def _feed(self, histories: Histories, computed: int, chunk: int, *, known: int = 0, follow: bool = True) -> None:
        """Announce the sequences, and feed them as the chunks of a prompt. `computed`: tokens in the target's pages,
        and `known` in the drafter's. `follow`: FedTokens.follow."""
        state, slots = self.state, list(histories)
        begin = max(computed - self.drafter.follows_features, 0)
        state.given_S[slots], state.computed_S[slots] = computed, begin
        self.drafts.join(torch.tensor([slots, [known] * len(slots)]))
        rest = {slot: len(history) - 1 - begin for slot, history in histories.items()}
        while any(rest.values()):
            counts = {slot: min(left, chunk or left) for slot, left in rest.items() if left}
            self.step(counts, 0, follow=follow)
            for slot, count in counts.items():
                state.computed_S[slot] += count
                rest[slot] -= count

    @torch.inference_mode()
    def step(self, counts: Mapping[int, int], decodes: int, *, follow: bool = True) -> None:
        """Show the drafter a step that feeds `counts` tokens by slot; the first `decodes` rows are decode rows. The
        hidden states depend on the tokens up to theirs. `follow`: whether it follows chunks of prompts."""
        state, slots_B = self.state, torch.tensor(list(counts))
        row_start_B1 = torch.tensor([0, *counts.values()]).cumsum(0).int()
        host = HostBounds(tuple(counts.values()), (state.tokens_SL.shape[1],) * len(counts), decodes)
        total, attention = sum(counts.values()), self.view.build.attention
        follow = follow and decodes < len(counts)
        groups = self.drafts.groups_to_lay_out(self.groups, follow=follow)
        tokens, attn = lay_out(slots_B, row_start_B1, total, host, state, groups, attention)
        states = []
        for token, slot in enumerate(tokens.slots_T.tolist()):
            known = state.tokens_SL[slot].tolist()
            if tokens.tree is None or int(tokens.rows_T[token]) >= decodes:
                path = known[: int(tokens.cache_T[token]) + 1]
            else:
                path = _path(known, int(tokens.tree.root_T[token]), int(tokens.tree.ancestors_T[token]))
            seed = zlib.crc32(str(path).encode())
            states.append(torch.randn(self.view.build.spec.hidden, generator=torch.Generator().manual_seed(seed)))
        hidden_TC = torch.stack(states)
        taps = {layer: hidden_TC + layer for layer in self.drafter.taps}
        self.drafts.observe(slots_B, row_start_B1, decodes, tokens, attn, Hidden(hidden_TC, taps), follow=follow)

    @torch.inference_mode()
    def catch_up(self, chunks: Seq[CatchUp]) -> None:
        """Let the drafter feed earlier tokens of seated sequences."""
        self.drafts.catch_up(chunks, torch.tensor(pack_catch_up(chunks)))

    @torch.inference_mode()
    def guess(self, k: int | None = None, most: Seq[int] | None = None) -> list[Guesses]:
        """Return the drafts of the seated sequences, in their order. `most`: drafts that each verifies at most."""
        k, state = self.lookahead if k is None else k, self.state
        lengths = {slot: int(state.computed_S[slot]) + 1 for slot in self.rows}
        if self.drafter.needs_host_tokens:
            known = [state.tokens_SL[slot, :length].tolist() for slot, length in lengths.items()]
            return [Guesses(tuple(self.drafter.propose_host(tokens, k))) for tokens in known]
        self.drafts.propose(
            torch.tensor(self.rows), torch.tensor(most or [k] * len(self.rows)), k, bound=self.view.max_len
        )
        found = []
        for slot, length in lengths.items():
            count = int(state.drafts_S[slot])
            tokens = tuple(state.tokens_SL[slot, length : length + count].tolist())
            parents = None if state.trees is None else tuple(state.trees.parents_SK[slot, :count].tolist())
            q_KV = None
            if state.draft_probs_SKV is not None:
                drawn_K = torch.arange(count) if state.drawn_SK is None else state.drawn_SK[slot, :count]
                q_KV = state.draft_probs_SKV[slot, drawn_K]
            found.append(Guesses(tokens, parents, q_KV))
        return found

    def _keep_paths(self, accepted: Mapping[int, Seq[int]], trees: TreeState) -> None:
        """Show the drafter the paths whose tokens were accepted, as the engine does."""
        state, slots = self.state, list(accepted)
        paths = torch.zeros(len(slots), 1 + trees.depth, dtype=torch.int64)
        for row, (slot, tokens) in enumerate(accepted.items()):
            length, count = int(state.computed_S[slot]) + 1, int(state.drafts_S[slot])
            ids, parents = state.tokens_SL[slot, length:].tolist(), trees.parents_SK[slot].tolist()
            for depth, token in enumerate(tokens[:-1]):
                at = int(paths[row, depth])
                paths[row, depth + 1] = 1 + next(i for i in range(count) if (ids[i], parents[i]) == (token, at - 1))
        number_R = torch.tensor([len(tokens) - 1 for tokens in accepted.values()])
        slots_R = torch.tensor(slots, dtype=torch.int64)
        self.drafts.keep(AcceptedPath(slots_R, state.computed_S[slots_R].clone(), paths, number_R))

    def verify(self, accepted: Mapping[int, Seq[int]], *, drafts: bool = True, beside: Seq[int] = ()) -> None:
        """Show the drafter the step that feeds each row's last token and, with `drafts`, its drafts; then append the
        tokens that the step accepted and sampled. `beside`: prompt of a sequence that the step feeds to a free slot."""
        state = self.state
        counts = dict.fromkeys(self.rows, 1 + self.lookahead * drafts)
        free = next((slot for slot in range(self.slots) if slot not in counts), None)
        if beside and free is not None:
            state.tokens_SL[free, : len(beside)] = torch.tensor(beside, dtype=torch.int32)
            state.given_S[free] = state.computed_S[free] = 0
            self.drafts.join(torch.tensor([free, 0]))
            counts[free] = len(beside)
        self.step(counts, len(self.rows))
        if drafts and state.trees is not None:
            self._keep_paths(accepted, state.trees)
        for slot, tokens in accepted.items():
            length = int(state.computed_S[slot]) + 1
            state.tokens_SL[slot, length : length + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
            state.computed_S[slot] += len(tokens)
            state.key_S[slot] = _key(state.tokens_SL[slot, : length + len(tokens)].tolist())
        state.drafts_S.zero_()


def _path(known: list[int], root: int, bits: int) -> list[int]:
    """Return the tokens up to the root and those of a path of drafts behind it."""
    return [*known[: root + 1], *(token for i, token in enumerate(known[root + 1 :]) if i < 64 and bits >> i & 1)]


def _key(history: Seq[int]) -> int:
    return zlib.crc32(str(list(history)).encode())
