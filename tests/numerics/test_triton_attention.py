"""attention=triton against a float64 loop: every kind of row, split and whole, with poisoned pages.

Kernels run compiled on a GPU, or in Triton's interpreter if TRITON_INTERPRET=1 is set before Triton is imported
(tests/test_in_interpreter.py starts such a process).
"""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("kernels need a GPU or TRITON_INTERPRET=1", allow_module_level=True)


from dovetail.core.interfaces import (  # noqa: E402
    MLA,
    PLAIN,
    AttentionBackend,
    AttentionLayer,
    BatchMeta,
    HostBounds,
    KVGroup,
    KVPool,
    Plane,
    Rope,
)
from dovetail.core.memory.pools import make_pools  # noqa: E402
from dovetail.core.ops.choices import Choices, temporarily  # noqa: E402
from dovetail.core.ops.formats import encode_reference  # noqa: E402
from dovetail.core.ops.kernels.kv_write import rope_kv_write_triton  # noqa: E402
from dovetail.core.ops.kv_write import rope_kv_write_reference  # noqa: E402
from dovetail.core.testing.attention import AttentionContract  # noqa: E402
from dovetail.core.testing.formats import SCALED_ROWS  # noqa: E402
from dovetail.core.testing.numeric import poisoned_memory  # noqa: E402
from dovetail.plugins.attention.config import TritonConfig  # noqa: E402
from dovetail.plugins.attention.triton import launch_plan, paged  # noqa: E402
from dovetail.plugins.attention.triton.backend import Triton  # noqa: E402
from dovetail.plugins.attention.triton.tiles import (  # noqa: E402
    Geometry,
    Shape,
    Tile,
    Tiles,
    fit,
)
from dovetail.plugins.attention.triton.tuning import OP, Runs, choice_of, key_of  # noqa: E402
from dovetail.plugins.quant.int8.format import INT8_TOKEN  # noqa: E402

from .attention_cases import Case, error, expected, make_step  # noqa: E402
from .interpreter import mend  # noqa: E402
from .triton_tiles import GatheringTiles, SmallTiles, WarpTiles, make  # noqa: E402

if INTERPRETED:
    mend()

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def check(case: Case, tiles: Tiles | None = None, tolerance: float | None = None) -> None:
    step = make_step(case, backend := make(tiles), DEVICE)
    with poisoned_memory():
        got = backend.attend(step.layer, step.ctx, step.q_THD)[PLAIN].values
    assert got.dtype == case.dtype
    limit = tolerance or {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[case.dtype]
    assert error(got, expected(step)) < limit
    real = sum(case.counts)
    assert (got[real:] == 0).all()


MIXED = Case(lengths=(70, 33, 129, 90, 61), counts=(1, 1, 1, 40, 61), num_decode=3, padding=2, slack=7)
STEPS = {
    "prompts": Case(lengths=(90, 5, 64, 1), counts=(90, 5, 64, 1)),
    "chunks": Case(lengths=(190, 75), counts=(33, 64)),
    "decode": Case(lengths=(200, 15, 64, 1), counts=(1, 1, 1, 1), num_decode=4, slack=40),
    "drafts": Case(lengths=(150, 20, 64), counts=(5, 1, 3), num_decode=3, padding=3),
    "mixed": MIXED,
    "empty rows": replace(MIXED, empty_rows=2),
    "window": replace(MIXED, window=21),
    "narrow window": replace(MIXED, window=1),
    "tree": Case(lengths=(150, 20, 90), counts=(35, 1, 40), num_decode=2, tree=True, padding=1),
    "tree and window": Case(lengths=(150, 20, 64), counts=(15, 1, 24), num_decode=2, tree=True, window=5),
}
CUTS = {
    "whole": None,
    "split": SmallTiles(),
    "few splits": SmallTiles(programs=1),
    "keys per warp": WarpTiles(programs=1),
    "keys per warp, split": WarpTiles(),
}
MOST = torch.cuda.is_available() or os.environ.get("DOVETAIL_KERNELS") == "all"
"""A case takes a second in the interpreter, so there combinations of separately tested features run only nightly."""


FEW = [
    ("prompts", "whole"),
    ("drafts", "split"),
    ("mixed", "whole"),
    ("mixed", "split"),
    ("window", "split"),
    ("tree and window", "split"),
    ("drafts", "keys per warp"),
    ("mixed", "keys per warp, split"),
    ("window", "keys per warp"),
    ("tree and window", "keys per warp, split"),
]


@pytest.mark.parametrize(("step", "cut"), [(step, cut) for step in STEPS for cut in CUTS] if MOST else FEW)
def test_equals_the_loop(step, cut):
    check(STEPS[step], CUTS[cut])


PAGES = [(tokens, window) for tokens in (4, 32, 64, 128) for window in (0, 40)]


@pytest.mark.parametrize(("page_tokens", "window"), PAGES if MOST else [(4, 40), (128, 0)])
def test_page_sizes(page_tokens, window):
    check(replace(MIXED, page_tokens=page_tokens, window=window), SmallTiles())
    check(replace(MIXED, page_tokens=page_tokens, window=window))
    if MOST:
        check(replace(MIXED, page_tokens=page_tokens, window=window), WarpTiles())


@pytest.mark.parametrize("window", [0, 40] if MOST else [40])
@pytest.mark.parametrize("step", ["prompts", "chunks", "mixed"])
def test_tensor_maps(step, window):
    """K and V are read through tensor maps, which read whole pages including poison."""
    case = replace(STEPS[step], dtype=torch.float16, page_tokens=32, dim=64, window=window)
    check(case, SmallTiles(programs=1, tma=True))


@pytest.mark.parametrize("heads", [(4, 4), (7, 1), (10, 2), (24, 1)] if MOST else [(7, 1), (10, 2)])
def test_head_groups(heads):
    check(replace(MIXED, heads=heads), SmallTiles())


@pytest.mark.parametrize("dim", [16, 40, 80, 128, 192] if MOST else [40, 192])
def test_head_dims(dim):
    check(replace(MIXED, dim=dim), SmallTiles())
    check(replace(MIXED, dim=dim, dtype=torch.float16), WarpTiles() if dim == 40 else None)
    if MOST:
        check(replace(MIXED, dim=dim, dtype=torch.float16))


LAYOUTS = {
    "Falcon 7B": ((71, 1), 64),
    "GPT-J": ((4, 4), 256),
    "StableLM 3B": ((4, 4), 80),
    "Qwen 2.5 7B": ((14, 2), 128),
    "Gemma 2": ((4, 2), 256),
    "Phi-3": ((4, 4), 96),
}
"""(query heads, KV heads) and head dim of models, with fewer KV heads than theirs."""


@pytest.mark.parametrize("kv_dtype", [None, E4M3] if MOST else [E4M3], ids=str)
@pytest.mark.parametrize("model", LAYOUTS if MOST else ["Falcon 7B"])
def test_layouts_of_models(model, kv_dtype):
    heads, dim = LAYOUTS[model]
    rows = Case(lengths=(70, 33, 31), counts=(1, 1, 19), num_decode=2, padding=1, slack=7)
    for window in (0, 21) if MOST else (21,):
        case = replace(rows, heads=heads, dim=dim, dtype=torch.float16, kv_dtype=kv_dtype, window=window)
        check(case)
        if heads[0] // heads[1] <= 64:  # the rows of its tiles for prompts
            check(case, SmallTiles())


EIGHT_BITS = [(E4M3, True), (E5M2, False), (E4M3, False), (E5M2, True)]


@pytest.mark.parametrize(("kv_dtype", "head_scales"), EIGHT_BITS if MOST else EIGHT_BITS[:2])
def test_float8_pages(kv_dtype, head_scales):
    case = replace(MIXED, kv_dtype=kv_dtype, head_scales=head_scales)
    check(case, SmallTiles())
    check(replace(case, dtype=torch.float16), WarpTiles())
    if MOST:
        check(replace(case, dtype=torch.float16))


PAGES_8 = [(E4M3, 8), (E5M2, 64), (None, 16)]


@pytest.mark.parametrize("step", ["mixed", "empty rows", "chunks"] if MOST else ["empty rows"])
@pytest.mark.parametrize(("kv_dtype", "page_tokens"), PAGES_8 if MOST else PAGES_8[:1])
def test_gathered_pages(step, kv_dtype, page_tokens, monkeypatch):
    # The interpreter copies the whole storage of a tensor.
    monkeypatch.setattr(paged, "ROOM_BYTES", 1 << 20)
    case = replace(STEPS[step], kv_dtype=kv_dtype, page_tokens=page_tokens, dtype=torch.float16, slack=90)
    check(case, GatheringTiles())
    check(replace(case, dim=64), GatheringTiles(programs=1, tma=True))


def test_decode_rows_do_not_make_a_short_prompt_long():
    """Only the prompt's tokens count: a few of them do not pay for a copy of all its keys."""
    counts = (50,) * 8 + (60,)
    meta = BatchMeta(
        row_start_B1=torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=DEVICE),
        kv_len_B=torch.tensor(counts, dtype=torch.int32, device=DEVICE),
        **dict.fromkeys(("slots_B", "positions_T", "rows_T", "write_T"), torch.zeros(0)),
        page_table_BP=torch.zeros(len(counts), 4, dtype=torch.int32, device=DEVICE),
        page_tokens=16,
    )
    geometry = Geometry(4, 1, 64, 0, torch.float16, E4M3, 16)
    plan = launch_plan.make_plan(Tiles(), geometry, meta, HostBounds(counts, counts, 8), sum(counts), lambda: None)
    assert [items.gathered for items in plan.lists] == [None, None]


@pytest.mark.parametrize("window", [0, 20])
def test_a_tuned_tile_gives_the_exact_result_of_its_trial(window):
    geometry, lengths = Geometry(4, 2, 64, window, torch.float16, torch.float16, 16), [5, 70, 33]
    runs = Runs(Triton(TritonConfig()), geometry, lengths, 2, DEVICE)
    chosen = Tile(16, 32, 2, 3, 3, least=16)
    gpu = torch.cuda.get_device_name() if DEVICE.type == "cuda" else ""
    with temporarily(Choices({(OP, gpu, key_of(geometry)): {4: choice_of(chosen)}})):
        got = [runs.attend(layer, layer == 0).float() for layer in (0, 1)]
    (items,) = next(iter(runs._ctx.state.values())).lists
    assert items.tile == fit(chosen, Shape(2, 64, torch.float16, torch.float16, 16))
    exact = runs.exact()
    assert float((got[0] - exact).norm() / exact.norm()) < 2e-3
    assert not torch.equal(got[0], got[1]), "each layer has its own keys"


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("head_scales", [False, True])
def test_float8_write(kv_dtype, head_scales):
    """The kernel stores the same values as the reference, up to ties between adjacent values."""
    tokens, heads, kv_heads, dim = 9, 6, 2, 40
    group = KVGroup(0, (0,), tuple(Plane(name, (kv_heads, dim), kv_dtype) for name in ("k", "v")), page_tokens=8)
    scales = (torch.tensor([0.125, 0.5], device=DEVICE), torch.tensor([0.25, 2.0], device=DEVICE))
    layer = AttentionLayer(0, 0, 0, heads, kv_heads, dim, 1.0, 0, *(scales if head_scales else (0.125, 0.5)))
    step = make_step(Case(lengths=(tokens,), counts=(tokens,)), make(), DEVICE)
    meta = replace(step.ctx.meta, write_T=torch.randperm(24, device=DEVICE)[:tokens])
    # Use numbers that both formats represent, since the interpreter's rounding to 8 bits loses carries.
    qkv = torch.randint(-7, 8, (tokens, (heads + 2 * kv_heads) * dim), device=DEVICE) / 4
    qkv[2] *= 1e6
    stored, rope = [], None
    if not INTERPRETED:
        qkv, rope = torch.randn_like(qkv) * 3, Rope(torch.randn(50, dim, device=DEVICE))
    for write in (rope_kv_write_reference, rope_kv_write_triton):
        pool = make_pools([group], {0: 2}, DEVICE)[0]
        q_THD = write(layer, meta, pool, qkv, rope)
        stored.append((q_THD.double(), *(pool.layer(0, name).double() for name in ("k", "v"))))
    for want, got in zip(*stored, strict=True):
        assert want.isfinite().all() and want.any()
        assert error(got, want) < (5e-3 if rope else 1e-6)


SCORES = [
    ("mixed", "split", None),
    ("window", "keys per warp, split", torch.float16),
    ("tree and window", "whole", None),
    ("chunks", "few splits", E4M3),
    ("decode", "keys per warp", E5M2),
]


@pytest.mark.parametrize(("step", "cut", "kv_dtype"), SCORES if MOST else SCORES[:2])
def test_sinks_and_capped_scores(step, cut, kv_dtype):
    """The cap is so low that most scores reach it, and a sink counts once in a row of several ranges."""
    case = replace(STEPS[step], kv_dtype=kv_dtype, dtype=kv_dtype and torch.float16 or torch.float32)
    check(replace(case, soft_cap=0.7, sinks=True), CUTS[cut])
    if MOST:
        check(replace(case, soft_cap=0.7), CUTS[cut])
        check(replace(case, sinks=True), CUTS[cut])


def test_other_kv_dtype():
    check(replace(MIXED, kv_dtype=torch.float16))


@pytest.mark.parametrize("cut", CUTS if MOST else ["split"])
@pytest.mark.parametrize("step", ["decode", "mixed"] if MOST else ["decode"])
def test_emits(step, cut):
    """Encoded output equals encoding the rounded plain output."""
    step = make_step(STEPS[step], backend := make(CUTS[cut]), DEVICE)
    want = backend.attend(step.layer, step.ctx, step.q_THD)[PLAIN].values
    for emit in ((INT8_TOKEN,), (SCALED_ROWS, PLAIN), (PLAIN, INT8_TOKEN, SCALED_ROWS)):
        with poisoned_memory():
            bundle = backend.attend(step.layer, step.ctx, step.q_THD, emit)
        for fmt in emit:
            if fmt is PLAIN:
                assert error(bundle[fmt].values, want.double()) < 1e-6
                continue
            like = encode_reference(want, fmt)
            assert error(bundle[fmt].scale, like.scale.double()) < 1e-5
            off = (bundle[fmt].values.double() - like.values.double()).abs().max()
            assert off <= (1 if fmt is INT8_TOKEN else 1e-3)


@pytest.mark.parametrize(("counts", "decodes"), [((1, 1), 2), ((20, 1), 0)])
def test_numbers_of_a_pool_past_what_32_bits_count(counts, decodes):
    """The same pages, at the start of a pool and past 2^31 elements of one layer, are written and read identically."""
    kv_heads, dim, size, lengths = 8, 64, 16, (37, 60)
    group = KVGroup(0, (0,), tuple(Plane(name, (kv_heads, dim), E4M3) for name in "kv"), page_tokens=size)
    layer = AttentionLayer(0, 0, 0, 2 * kv_heads, kv_heads, dim, dim**-0.5, 0, 0.5, 0.25)
    pages = torch.tensor([[0, 5, 3, 0], [6, 2, 1, 4]], device=DEVICE)
    before = torch.randn(2, 7, size, kv_heads, dim, device=DEVICE).to(E4M3)
    qkv = torch.randn(sum(counts), 4 * kv_heads * dim, device=DEVICE)
    starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=DEVICE)
    row_T = torch.repeat_interleave(torch.arange(2), torch.tensor(counts)).to(DEVICE)
    positions = torch.cat([torch.arange(n - c, n) for n, c in zip(lengths, counts, strict=True)]).to(DEVICE)
    host = HostBounds(counts, lengths, decodes)
    found = []
    for first in (1, 2**31 // (size * kv_heads * dim) + 1):
        planes = {name: torch.empty(1, first + 7, size, kv_heads, dim, dtype=E4M3, device=DEVICE) for name in "kv"}
        for plane, given in zip(planes.values(), before, strict=True):
            plane[0, first:] = given
        table = (pages + first).int()
        meta = BatchMeta(
            row_start_B1=starts,
            kv_len_B=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
            slots_B=torch.arange(2, device=DEVICE),
            positions_T=positions,
            rows_T=row_T,
            page_table_BP=table,
            write_T=table[row_T, positions // size].long() * size + positions % size,
            page_tokens=size,
        )
        backend = make()
        backend.bind({0: KVPool(group, planes)})
        ctx = backend.plan_device(meta, host, backend.plan_host(host))
        out = backend.write_and_attend(layer, ctx, qkv, None)[PLAIN].values
        found.append([out, *(plane[0, first:].view(torch.uint8) for plane in planes.values())])
    assert not torch.equal(found[0][1], before[0].view(torch.uint8)), "nothing was written"
    for near, far in zip(*found, strict=True):
        assert torch.equal(near, far)


def test_no_tokens():
    backend = make()
    step = make_step(Case(lengths=(5,), counts=(1,), num_decode=1), backend, DEVICE)
    bundle = backend.attend(step.layer, step.ctx, step.q_THD[:0], (PLAIN, INT8_TOKEN))
    assert bundle[PLAIN].values.shape == (0, 128) and bundle[INT8_TOKEN].values.shape == (0, 128)


class TestContract(AttentionContract):
    device = DEVICE.type
    kv_dtypes = (torch.float16,)
    scores = ("soft_cap", "sinks")
    mixed_graphs = True
    mla = (MLA(0, 16, 8, 8, 8), MLA(0, 40, 4, 16, 12))
    mla_heads = (3, 5)
    mla_kv_dtypes = (torch.float8_e4m3fn,)

    def make(self) -> AttentionBackend:
        return make()


@pytest.mark.skipif(INTERPRETED, reason="slow there, where the loop above splits rows, too")
class TestSplitContract(TestContract):
    def make(self) -> AttentionBackend:
        return make(SmallTiles())
