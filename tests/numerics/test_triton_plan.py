"""Plans of attention=triton: which program reads which keys of which row.

Kernels run compiled on a GPU, or in Triton's interpreter if TRITON_INTERPRET=1 is set before Triton is imported
(tests/test_in_interpreter.py starts such a process).
"""

from __future__ import annotations

import os
from itertools import accumulate

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("kernels need a GPU or TRITON_INTERPRET=1", allow_module_level=True)


from dovetail.core.interfaces import (  # noqa: E402
    BatchMeta,
    HostBounds,
)
from dovetail.plugins.attention.triton import launch_plan  # noqa: E402
from dovetail.plugins.attention.triton.tiles import (  # noqa: E402
    EMPTY,
    WARP_KEYS,
    DecodeTile,
    Geometry,
    Tile,
)

from .attention_cases import Case, make_step  # noqa: E402
from .interpreter import mend  # noqa: E402
from .triton_tiles import FixedTile, SmallTiles, WholeRows, make  # noqa: E402

if INTERPRETED:
    mend()

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


@pytest.mark.parametrize(("programs", "window"), [(0, 0), (64, 0), (64, 40)])
def test_items_cover_every_key_of_many_rows_once(programs, window, monkeypatch):
    """More rows than a program of plan_items processes at once, decode rows and prompts, and tokens of no row."""
    monkeypatch.setattr(launch_plan, "ROWS_AT_ONCE", 16)
    random = torch.Generator().manual_seed(3)
    decodes, counts, padding = 35, (1,) * 35 + tuple(torch.randint(1, 90, (20,), generator=random).tolist()), 5
    lengths = tuple(n + int(torch.randint(2500, (), generator=random)) for n in counts)
    starts, total = [0, *accumulate(counts)], sum(counts) + padding
    meta = BatchMeta(
        row_start_B1=torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        kv_len_B=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        **dict.fromkeys(("slots_B", "positions_T", "rows_T", "page_table_BP", "write_T"), torch.zeros(0)),
        page_tokens=16,
    )
    geometry = Geometry(2, 1, 16, window, torch.float32, torch.float32, meta.page_tokens)
    tiles = SmallTiles(programs) if programs else WholeRows()
    plan = launch_plan.make_plan(tiles, geometry, meta, HostBounds(counts, lengths, decodes), total, lambda: None)
    seen = [torch.zeros(count, length, dtype=torch.int32) for count, length in zip(counts, lengths, strict=True)]
    fed, parts = torch.zeros(total, dtype=torch.int32), 0
    for made in plan.lists:
        for row, first, n, at, seen_from, lo, hi, part, length, splits, _ in made.items.tolist():
            if row < 0:
                continue
            fed[first : first + n] += lo <= max(seen_from, 0) < max(hi, lo + 1)
            parts += part >= 0
            assert at >= 0, "a place of the table of rotary angles, even of tokens without a row"
            assert (part >= 0) == (splits > 1)
            if first < starts[-1]:
                assert length == lengths[row] and starts[row] <= first and first + n <= starts[row + 1]
                seen[row][first - starts[row] : first - starts[row] + n, lo:hi] += 1
                assert at == lengths[row] - counts[row] + first - starts[row]
    assert fed.eq(1).all(), "each token is in one tile"
    assert bool(parts) == bool(programs)
    for count, length, times in zip(counts, lengths, seen, strict=True):
        for i, keys in enumerate(times):
            own = length - count + i
            assert keys[max(own - window + 1, 0) if window else 0 : own + 1].eq(1).all()


@pytest.mark.parametrize(("page_tokens", "window"), [(16, 0), (48, 0), (256, 0), (32, 100)])
def test_items_of_single_tokens_have_their_first_pages(page_tokens, window):
    """Items list the pages of their first blocks. Ranges respect the minimum from the longest row's cube root."""
    lengths = (1, 700, 64, 65, 3000, 333)
    counts, tile = (1,) * len(lengths), DecodeTile(8, WARP_KEYS, 2, 3, 64, least=32, slabs=1, root=8)

    table = torch.randint(1, 1000, (len(lengths), -(-max(lengths) // page_tokens) + 1), dtype=torch.int32)
    meta = BatchMeta(
        row_start_B1=torch.arange(len(lengths) + 1, dtype=torch.int32, device=DEVICE),
        kv_len_B=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        page_table_BP=table.to(DEVICE),
        **dict.fromkeys(("slots_B", "positions_T", "rows_T", "write_T"), torch.zeros(0)),
        page_tokens=page_tokens,
    )
    geometry = Geometry(4, 2, 64, window, torch.float16, torch.float16, meta.page_tokens)
    host = HostBounds(counts, tuple(length + 9 for length in lengths), len(lengths))
    (made,) = launch_plan.make_plan(FixedTile(tile), geometry, meta, host, len(lengths) + 2, lambda: None).lists
    assert (made.mail == EMPTY).all() and made.mail.numel() == made.items.shape[0] * 2 * tile.box_words(64)
    grain = tile.grain(page_tokens)
    pages = made.first_pages.view(made.items.shape[0], -1).cpu()
    assert pages.shape[1] * grain == tile.stages * tile.span
    ranges = [0] * len(lengths)
    for item, noted in zip(made.items.tolist(), pages.tolist(), strict=True):
        row, first, _, _, _, lo, hi, _, length, splits, _ = item
        if row < 0 or first >= len(lengths):
            continue
        ranges[row] += 1
        keys = range(lo, lo + len(noted) * grain, grain)
        want = [table[row, key // page_tokens].item() if key < length else 0 for key in keys]
        assert noted == want, (row, lo, hi)
        # Ranges divide a row evenly in whole blocks, so they may be half of the minimum, less one block.
        assert splits == 1 or hi - lo > 8 * 3000 ** (1 / 3) / 2 - tile.span or hi == length
    work = [min(length, window + 1 + tile.span) if window else length for length in lengths]
    assert all(1 <= found <= keys / (8 * max(work) ** (1 / 3)) + 1 for found, keys in zip(ranges, work, strict=True))


@pytest.mark.parametrize(("tile", "words"), [(DecodeTile(8, WARP_KEYS, 2, 3, 2), 1), (Tile(16, 64, 4, 2, 2), 0)])
def test_mailboxes_are_filled_after_the_plan_even_if_no_row_is_split(tile, words, monkeypatch):
    """attend_decode reads the plan without waiting for its preceding kernel, so that must not be plan_items."""

    launched = []

    class Planning:
        def __getitem__(self, grid):
            launched.append("plan")
            return plan_items[grid]

    def full(size, *args, **options):
        launched.append(size[0])
        return filled(size, *args, **options)

    plan_items, filled = launch_plan.plan_items, torch.full
    monkeypatch.setattr(launch_plan, "plan_items", Planning())
    monkeypatch.setattr(torch, "full", full)
    step = make_step(Case(lengths=(5, 9), counts=(1, 1), num_decode=2), make(), DEVICE)
    geometry = Geometry(4, 2, 64, 0, torch.float16, torch.float16, step.ctx.meta.page_tokens)
    launch_plan.make_plan(FixedTile(tile), geometry, step.ctx.meta, step.ctx.host, 2, lambda: None)
    assert launched == ["plan", words]
