"""Kernels of draft trees against their torch references, and those against loops, compiled or interpreted."""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("kernels need a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from dovetail.core.interfaces import KVGroup, Plane  # noqa: E402
from dovetail.core.interfaces.spec_decode import AcceptedPath  # noqa: E402
from dovetail.core.memory.pools import make_pools  # noqa: E402
from dovetail.core.ops.kernels.siblings import best_tokens_triton  # noqa: E402
from dovetail.core.ops.kernels.trees import (  # noqa: E402
    accept_tree_triton,
    keep_path_triton,
    place_tree_triton,
    write_tree_triton,
)
from dovetail.core.ops.random import Purpose  # noqa: E402
from dovetail.core.ops.siblings import best_tokens_reference  # noqa: E402
from dovetail.core.ops.step import best_reference, lay_out_tokens_reference  # noqa: E402
from dovetail.core.ops.trees import (  # noqa: E402
    TreeState,
    accept_tree_reference,
    keep_path_reference,
    place_tree_reference,
    write_tree_reference,
)

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
SLOTS, ROWS, CAPACITY, VOCAB = 7, 5, 200, 9


def draw(*shape: int, low: int = 0, high: int = VOCAB) -> torch.Tensor:
    return torch.randint(low, high, shape, device=DEVICE)


@pytest.fixture(params=[(5, 3), (64, 6)], ids=["5 drafts", "64 drafts"])
def written(request):  # type: ignore[no-untyped-def]
    """Trees of random shape, some of which end early: (state after each way to write them, inputs)."""
    torch.seed()
    drafts, depth = request.param
    # Most parents precede their draft by little, so that some drafts are too deep.
    parents_BK = (torch.arange(drafts, device=DEVICE) - draw(ROWS, drafts, low=1, high=9)).clamp_min(-1)
    parents_BK[1, drafts // 2] = drafts - 1
    drafts_BK, count_B = draw(ROWS, drafts, high=2), torch.full((ROWS,), drafts, device=DEVICE)
    drafts_BK[2, drafts - 2], count_B[3] = VOCAB, drafts - 1
    slots_B, lengths_B = torch.randperm(SLOTS - 1, device=DEVICE)[:ROWS], draw(ROWS, low=1, high=CAPACITY - drafts)
    most_B = torch.full((ROWS,), drafts, device=DEVICE)
    tokens_SL = draw(SLOTS, CAPACITY).int()
    states = []
    for write in (write_tree_triton, write_tree_reference):
        tokens, number_S, state = tokens_SL.clone(), draw(SLOTS) * 0, TreeState.empty(SLOTS, drafts, depth, DEVICE)
        write(drafts_BK, parents_BK, count_B, slots_B, lengths_B, most_B, tokens, number_S, state, VOCAB)
        states.append((tokens, number_S, state))
    return states, parents_BK, slots_B, lengths_B


def test_write_tree(written):  # type: ignore[no-untyped-def]
    (got, want), parents_BK, slots_B, _ = written
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert torch.equal(got[2].parents_SK, want[2].parents_SK) and torch.equal(got[2].bits_SK, want[2].bits_SK)
    assert len(set(want[1][slots_B].tolist())) > 1, "some trees end early"
    state = want[2]
    for row, slot in enumerate(slots_B.tolist()):
        for draft in range(int(want[1][slot])):
            path, up = {draft}, int(parents_BK[row, draft])
            while up >= 0:
                path.add(up)
                up = int(parents_BK[row, up])
            assert len(path) <= state.depth
            assert {i for i in range(64) if int(state.bits_SK[slot, draft]) >> i & 1} == path


def test_place_tree(written):  # type: ignore[no-untyped-def]
    ((_, number_S, state), _), _, slots_B, lengths_B = written
    computed_S, width = draw(SLOTS, high=50), 1 + state.bits_SK.shape[1]
    counts = (width, 1, 3, 20, 2)
    starts = torch.tensor((0, *counts), dtype=torch.int32, device=DEVICE).cumsum(0).int()
    tokens_SL = draw(SLOTS, CAPACITY).int()
    chains = lay_out_tokens_reference(slots_B, starts, computed_S, tokens_SL, sum(counts) + 3, number_S, 3)
    got, want = (place(chains, computed_S, state, 3) for place in (place_tree_triton, place_tree_reference))
    for mine, theirs in (
        (got.positions_T, want.positions_T),
        (got.index_T, chains.positions_T),
        (got.tree.root_T, want.tree.root_T),
        (got.tree.ancestors_T, want.tree.ancestors_T),
    ):
        assert torch.equal(mine, theirs)
    first = int(number_S[slots_B[0]])
    depths = [(bits % (1 << 64)).bit_count() for bits in state.bits_SK[slots_B[0]].tolist()]
    start = int(computed_S[slots_B[0]])
    assert want.positions_T[1 : 1 + first].tolist() == [start + depth for depth in depths[:first]]


def test_accept_tree(written):  # type: ignore[no-untyped-def]
    """Two tokens, so that siblings are often equal and paths long."""
    states, parents_BK, slots_B, lengths_B = written
    drafts = parents_BK.shape[1]
    slots_R, base_R = torch.cat((slots_B, slots_B.new_full((2,), SLOTS - 1))), torch.cat((lengths_B, lengths_B[:2]))
    limit_R, drawn_RW = draw(len(slots_R), high=drafts + 1), draw(len(slots_R), 1 + drafts, low=-1, high=2)
    limit_R[:3] = drafts
    computed_S, results = draw(SLOTS), []
    for accept, (tokens, number_S, state) in zip((accept_tree_triton, accept_tree_reference), states, strict=True):
        before, computed = tokens.clone(), computed_S.clone()
        found, taken_RD, path = accept(drawn_RW, slots_R, base_R, limit_R, tokens, computed, number_S.clone(), state)
        results.append((found.accepted_R, found.lengths_R, found.drafted_R, path.root_R, tokens[:-1], computed[:-1]))
        rows = zip(slots_R.tolist(), base_R.tolist(), found.accepted_R.tolist(), strict=True)
        for row, (slot, base, accepted) in enumerate(rows):
            at, expected = 0, [int(drawn_RW[row, 0])]
            most = min(int(number_S[slot]), int(limit_R[row]))
            while True:
                ids, ups = before[slot, base:].tolist(), state.parents_SK[slot].tolist()
                following = (i for i in range(most) if ups[i] == at - 1 and ids[i] == drawn_RW[row, at])
                if (draft := next(following, None)) is None or len(expected) > state.depth:
                    break
                at = draft + 1
                expected.append(int(drawn_RW[row, at]))
                assert int(path.index_RD[row, len(expected) - 1]) == at
            assert taken_RD[row, : accepted + 1].tolist() == expected
            if slot < SLOTS - 1:
                assert tokens[slot, base : base + accepted + 1].tolist() == [max(token, 0) for token in expected]
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_keep_path(dtype):  # type: ignore[no-untyped-def]
    torch.seed()
    group = KVGroup(0, (0, 1, 2), (Plane("k", (2, 12), dtype), Plane("v", (2, 24), dtype)), page_tokens=4)
    slots_R = torch.tensor([2, 0, 3, 3], device=DEVICE)
    accepted_R = torch.tensor([4, 2, 1, 0], device=DEVICE)
    path_RD = torch.stack([draw(20, low=1).cumsum(0)[:5] - 1 for _ in slots_R])
    path_RD[:, 0] = 0
    path_RD[0, 1] = 1  # It stays.
    root_R = torch.tensor([13, 5, 0, 0], device=DEVICE)
    table_SP = (torch.randperm(60, device=DEVICE) + 1).view(4, 15).int()
    table_SP[3] = 0
    kept = []
    planes = [torch.randn(3, 61, 4, *plane.shape, device=DEVICE).to(dtype) for plane in group.planes]
    for keep in (keep_path_triton, keep_path_reference):
        pool = make_pools([group], {0: 60}, DEVICE)[0]
        for plane, values in zip(pool.planes.values(), planes, strict=True):
            plane.copy_(values)
        keep(pool, table_SP, AcceptedPath(slots_R, root_R, path_RD, accepted_R))
        kept.append([plane.float()[:, 1:] for plane in pool.planes.values()])
    assert all(map(torch.equal, *kept))

    def at(planes, slot, index):  # type: ignore[no-untyped-def]
        return [plane.float()[:, int(table_SP[slot, index // 4]), index % 4] for plane in planes]

    for row, depth in ((0, 4), (1, 2)):
        moved = at(planes, int(slots_R[row]), int(root_R[row] + path_RD[row, depth]))
        now = [plane[:, int(table_SP[slots_R[row], (root_R[row] + depth) // 4]) - 1] for plane in kept[0]]
        for before, after in zip(moved, now, strict=True):
            assert torch.equal(before, after[:, int(root_R[row] + depth) % 4])


@pytest.mark.parametrize(("vocab", "count", "random"), [(5000, 4, False), (2100, 3, True), (5, 7, True)])
def test_best_tokens(vocab, count, random):  # type: ignore[no-untyped-def]
    """Against the reference, and the draw, which is the best one. Some rows are greedy, filtered or not finite."""
    torch.seed()
    rows = 6
    logits_NV = torch.randn(rows, vocab, device=DEVICE) * 2
    logits_NV[4, vocab // 2] = float("nan")
    position_N, key_N = draw(rows, high=1000), draw(rows, high=1 << 60)
    temperature_N = torch.tensor([0.0, 0.7, 1.0, 1.3, 1.0, 0.5], device=DEVICE)
    least_N = torch.full((rows,), float("-inf"), device=DEVICE)
    least_N[3] = logits_NV[3].topk(2).values[-1]
    given = logits_NV, position_N, temperature_N, key_N, random, count, least_N if random else None
    (tokens, shares), (want_tokens, want_shares) = best_tokens_triton(*given), best_tokens_reference(*given)
    assert torch.equal(tokens, want_tokens)
    assert torch.allclose(shares, want_shares, atol=1e-4)
    assert torch.equal(tokens[:, 0], best_reference(logits_NV, position_N, temperature_N, key_N, random, given[-1])[1])
    assert (tokens[4] == -1).all()
    if random:
        assert tokens[3, 1] >= 0 and (tokens[3, 2:] == -1).all(), "two tokens can be drawn"
        drafted = best_tokens_triton(*given, Purpose.DRAFT)[0]
        assert torch.equal(drafted, best_tokens_reference(*given, Purpose.DRAFT)[0])
        assert torch.equal(drafted[0], tokens[0]) and not torch.equal(drafted, tokens), "the noise is of its own"
