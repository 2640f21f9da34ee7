"""attention=triton over compressed latents against float64: absorbed and expanded rows, split and whole.

Kernels run as in test_triton_attention.py.
"""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("kernels need a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from dovetail.core.interfaces import MLA, PLAIN  # noqa: E402
from dovetail.core.ops.kernels.latent_write import HEADS_PER_PROGRAM, latent_write_triton  # noqa: E402
from dovetail.core.ops.latents import quantize_latents  # noqa: E402
from dovetail.core.testing.attention_latent import LatentArena  # noqa: E402
from dovetail.core.testing.numeric import TOLERANCE  # noqa: E402
from dovetail.plugins.attention.config import TritonConfig  # noqa: E402
from dovetail.plugins.attention.triton import absorbed, expanded  # noqa: E402
from dovetail.plugins.attention.triton.absorbed import Absorbed, LatentTile  # noqa: E402
from dovetail.plugins.attention.triton.backend import Triton  # noqa: E402
from dovetail.plugins.attention.triton.expanded import Expanded  # noqa: E402
from dovetail.plugins.attention.triton.latent_values import project_ranges  # noqa: E402

from .interpreter import mend  # noqa: E402

if INTERPRETED:
    mend()

FP32, E4M3 = torch.float32, torch.float8_e4m3fn
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
SMALL, UNEVEN, TWO_GROUPS = MLA(0, 16, 8, 8, 8), MLA(0, 40, 4, 16, 12), MLA(0, 200, 4, 16, 12)


def arena(
    mla: MLA, heads: int, kv_dtype: torch.dtype = FP32, backend: type[Triton] = Triton, **options: int
) -> LatentArena:
    return LatentArena(
        backend(TritonConfig()),
        mla=mla,
        heads=heads,
        device=DEVICE,
        dtype=FP32,
        kv_dtype=kv_dtype,
        tolerance=TOLERANCE[FP32],
        page_tokens=(8,),
        **options,
    )


def test_more_heads_than_a_tile_and_split_rows(monkeypatch):
    """Two tiles of heads, and ranges of keys that are joined; the last row has several tokens."""
    monkeypatch.setattr(absorbed, "tile_of", lambda *_, **__: LatentTile(16, 16, 4, 1, 2, least=16))
    made = arena(SMALL, 20)
    made.run(made.plan([("a", 15)]))
    rows = made.plan([("a", 3)], num_decode=1, slack=60)
    made.run(rows)
    (runs,) = (ctx.state for ctx in rows.ctxs.values())
    ((run,),) = runs.values()
    assert isinstance(run, Absorbed) and run.plan.part_rows > 0


def test_long_rows_are_expanded_a_few_heads_at_a_time(monkeypatch):
    """A row that continues a sequence, between short ones, with E4M3 latents of two groups of columns."""
    made = arena(TWO_GROUPS, 2, E4M3)
    made.run(made.plan([("a", 5)]))
    row_bytes = 2 * 64 * (TWO_GROUPS.nope_dim + TWO_GROUPS.rope_dim) * 4
    monkeypatch.setattr(expanded, "ROOM_BYTES", 2 * row_bytes - 1)
    step = made.plan([("b", 1), ("a", 24), ("c", 3)], num_decode=1, padding=2)
    made.run(step)
    (state,) = (ctx.state for ctx in step.ctxs.values())
    (runs,) = state.values()
    assert [type(run) for run in runs] == [Absorbed, Expanded, Absorbed] and runs[1].heads == 1


def test_a_row_too_long_for_the_room_is_absorbed(monkeypatch):
    made = arena(SMALL, 2)
    monkeypatch.setattr(expanded, "ROOM_BYTES", 100)
    step = made.plan([("a", 20)])
    made.run(step)
    (state,) = (ctx.state for ctx in step.ctxs.values())
    assert [type(run) for (run,) in state.values()] == [Absorbed]


@pytest.mark.parametrize(
    ("heads", "value", "first"),
    [
        # Tiles of several tokens.
        *((2, torch.nan, 0), (2, torch.inf, 0), (2, torch.inf, SMALL.kv_rank), (2, -torch.inf, SMALL.kv_rank)),
        # Tiles of one.
        *((16, torch.nan, 0), (16, torch.inf, SMALL.kv_rank)),
    ],
)
def test_nan_and_infinity_of_a_sequence_reach_no_other(heads, value, first):
    """The ranges of all tokens are joined by one matrix product."""
    made = arena(SMALL, heads)
    made.run(made.plan([("a", 40), ("b", 9), ("c", 5)]))
    step, layer = made.plan([("a", 1), ("b", 1), ("c", 1)], num_decode=3), made.layers[0]
    q, latents = made.inputs(step)
    latents[1, first:] = value
    q_THD = made.backend.write_mla(layer, step.ctxs[layer.group], q, latents, made.rope, made.norm)
    out = made.attend(layer, step, q_THD)[PLAIN].values
    assert not out[1].isfinite().any() if first == 0 else not out[1].isfinite().all()
    assert out[[0, 2]].isfinite().all()
    ((run,),) = step.ctxs[layer.group].state.values()
    assert not run.plan.lists[0].tile.joins


@pytest.mark.parametrize("heads", [2, 16], ids=["tiles of several tokens", "tiles of one"])
def test_an_infinite_value_with_a_finite_score_reaches_no_other(heads):
    """A latent of minus infinity has no weight, and zero times infinity is NaN."""
    made = arena(SMALL, heads)
    made.run(made.plan([("a", 40), ("b", 9), ("c", 5)]))
    step, layer = made.plan([("a", 1), ("b", 1), ("c", 1)], num_decode=3), made.layers[0]
    q, latents = made.inputs(step)
    q_THD = made.backend.write_mla(layer, step.ctxs[layer.group], q, latents, made.rope, made.norm)
    ctx = step.ctxs[layer.group]
    plane = made.backend.pools[layer.group].layer(layer.local, "latent")
    plane.view(-1, plane.shape[-1])[ctx.meta.write_T[1], 0] = -torch.inf
    q_THD[1] = q_THD[1].abs()
    out = made.attend(layer, step, q_THD)[PLAIN].values
    assert not out[1].isfinite().all() and out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("many_first", [False, True])
def test_few_tokens_beside_many(many_first, monkeypatch):
    """Those of one list are joined by the kernel that projects values, those of the other by attention itself."""
    made, grids = arena(SMALL, 3, pages=100), []

    class Recorded:
        def __getitem__(self, grid):
            grids.append(grid)
            return project_ranges[grid]

    monkeypatch.setattr(absorbed, "project_ranges", Recorded())
    made.run(made.plan([("a", 40), ("b", 9)]))
    grids.clear()
    decodes, chunks = [("a", 1), ("b", 1)], [(f"c{i}", 9) for i in range(8)]
    if many_first:
        decodes, chunks = [(f"d{i}", 1) for i in range(70)], [("a", 3), ("c", 7)]
    step = made.plan([*decodes, *chunks], num_decode=len(decodes), slack=20, padding=3)
    made.run(step)
    ((run,),) = step.ctxs[0].state.values()
    assert [items.tile.joins for items in run.plan.lists] == [many_first, not many_first]
    # Programs for tokens up to the list's last one.
    assert {tokens for _, _, tokens in grids} == {6 if many_first else 1}


class Written(Triton):
    """Backend that writes by the kernel on a CPU, too."""

    def write_mla(self, layer, ctx, q, latents, rope, norm):
        return latent_write_triton(layer, ctx.meta, self.pools[layer.group], q, latents, rope, norm)


@pytest.mark.parametrize("kv_dtype", [FP32, E4M3])
@pytest.mark.parametrize("mla", [UNEVEN, MLA(0, 160, 6, 8, 8)], ids=["one group", "two groups, odd sizes"])
def test_writing_latents(mla, kv_dtype):
    """The arena checks queries and pages against float64. Padding is written to page 0."""
    made = arena(mla, HEADS_PER_PROGRAM + 1, kv_dtype, Written)
    for layer in made.layers:
        made.write(layer, made.plan([("a", 2), ("b", 1)], padding=1))
    values, scales = quantize_latents(torch.tensor([[0.0] * 8 + [1.0, -2.0]]))
    assert values.float().tolist() == [[0.0] * 8 + [224.0, -448.0]] and scales.shape == (1, 1)
