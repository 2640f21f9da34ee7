"""Trees of a fixed shape: the best for the ranks, the file of ranks, and the growth of such a tree."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from dovetail.core.errors import ConfigError
from dovetail.plugins.spec_decode.shape import TYPICAL_RANKS, best_shape, read_ranks, shape_of, write_ranks
from dovetail.plugins.spec_decode.tree import FixedTree, Siblings


def most_accepted(ranks: tuple[tuple[float, ...], ...], drafts: int, depth: int) -> float:
    """Return the expected number of accepted drafts of the best tree, by Sequoia's dynamic program: `siblings` chooses
    how many drafts of a budget are in the subtree of each sibling."""

    @cache
    def siblings(budget: int, rank: int, level: int) -> float:
        shares = ranks[min(level, len(ranks)) - 1]
        if not budget or level > depth or rank >= len(shares):
            return 0.0
        return max(
            shares[rank] * (1 + siblings(own - 1, 0, level + 1)) + siblings(budget - own, rank + 1, level)
            for own in range(1, budget + 1)
        )

    return siblings(drafts, 0, 1)


@pytest.mark.parametrize(("drafts", "depth"), [(5, 5), (9, 3), (16, 4)])
def test_it_is_the_tree_of_the_dynamic_program(drafts: int, depth: int) -> None:
    ranks = tuple(
        tuple((0.8 * torch.rand(4).softmax(0)).sort(descending=True).values.tolist()) for _ in range(depth - 1)
    )
    shape = best_shape(ranks, drafts, depth)
    assert sum(shape.expected) == pytest.approx(most_accepted(ranks, drafts, depth))
    assert len(shape.parents) == drafts and max(shape.levels) <= depth
    assert all(parent < draft for draft, parent in enumerate(shape.parents))
    found = sorted(zip(shape.parents, shape.ranks, strict=True))
    assert all(rank == 0 or (parent, rank - 1) in found for parent, rank in found), "siblings are the first ranks"


def test_a_rank_above_the_one_before_counts_as_equal() -> None:
    assert best_shape(((0.3, 0.5),), 2, 2).expected == (0.3, 0.3)


def test_ranks_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_ranks(tmp_path / "ranks.json", [[0.5, 0.25], [0.125]], "spec_decode=x", 7)
    assert read_ranks(str(tmp_path / "ranks.json")) == ((0.5, 0.25), (0.125,))
    assert shape_of(str(tmp_path / "ranks.json"), 3, 2) == best_shape(((0.5, 0.25), (0.125,)), 3, 2)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file.* Set it to joint, sequoia, or a file that benchmarks/draft_ranks.py wrote"),
        ("{", "no file of ranks: Invalid JSON"),
        ('{"ranks": []}', "no file of ranks: .*at least 1 item"),
        ('{"ranks": [[0.5, 0.6]]}', r"level 1 has the shares \[0.5, 0.6\]: .* at most 1 together"),
        ('{"ranks": [[0.5, -0.1]]}', "must be from 0 to 1"),
        ('{"ranks": [[NaN]]}', "must be from 0 to 1"),
        ('{"ranks": [[0.5]], "more": 1}', "no file of ranks: Extra inputs"),
        ('{"ranks": [[0.5, 0.1]]}', "make 6 drafts in 2 levels, fewer than tree=8: set spec_decode.tree=6 or less"),
    ],
)
def test_a_file_that_is_none_is_refused(content: str | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "ranks.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=says) as error:
        shape_of(str(path), 8, 2)
    assert f"spec_decode.tree_shape={path}: " in str(error.value)


@pytest.mark.parametrize("shared", [False, True])
def test_drafts_are_the_siblings_of_their_rank(shared: bool) -> None:
    """Token = 10 times the parent's token, and the rank. `shared`: siblings of a level are the same behind all."""
    shape = best_shape(TYPICAL_RANKS, 14, 3)
    logits, inner = [0], [1]

    def first(count: int) -> Siblings:
        logits.append(1)
        return torch.arange(1, count + 1).expand(2, -1), torch.zeros(2, count)

    def expand(level: int, tokens_BN: torch.Tensor, before_BN: torch.Tensor, count: int) -> Siblings:
        rows, drafts = tokens_BN.shape
        assert level == 1 or int(before_BN.max()) < inner[-1]
        inner.append(drafts)
        logits.append(1 if shared else drafts)
        root_BN1 = torch.full((rows, drafts, 1), level) if shared else tokens_BN[..., None]
        return 10 * root_BN1 + torch.arange(1, count + 1), torch.zeros(rows, drafts, count)

    tree = FixedTree(shape, torch.device("cpu"), shared=shared).grow(first, expand)
    assert tree.drawn_BK is not None
    texts: list[int] = []
    for parent, rank, level in zip(shape.parents, shape.ranks, shape.levels, strict=True):
        before = 0 if parent < 0 else level - 1 if shared else texts[parent]
        texts.append(10 * before + rank + 1)
    assert tree.tokens_BK.tolist() == [texts] * 2
    assert tree.parents_BK.tolist() == [list(shape.parents)] * 2 and tree.count_B.tolist() == [14] * 2
    begin = [sum(logits[: level + 1]) for level in range(1 + max(shape.levels))]
    drawn = tree.drawn_BK[0].tolist()
    assert max(drawn) < sum(logits)
    for draft, level in enumerate(shape.levels):
        assert begin[level - 1] <= drawn[draft] < begin[level]
        same = [other for other in range(14) if drawn[other] == drawn[draft]]
        assert all(shape.levels[other] == level for other in same)
        assert shared or {shape.parents[other] for other in same} == {shape.parents[draft]}


def test_siblings_that_do_not_exist_are_copies_of_the_first() -> None:
    shape = best_shape(((0.5, 0.3, 0.1),), 3, 1)
    tree = FixedTree(shape, torch.device("cpu")).grow(
        lambda count: (torch.tensor([[4, -1, -1], [-1, -1, -1]])[:, :count], torch.zeros(2, count)),
        lambda level, tokens_BN, before_BN, count: pytest.fail("one level has no children"),
    )
    assert tree.tokens_BK.tolist() == [[4, 4, 4], [-1, -1, -1]]
