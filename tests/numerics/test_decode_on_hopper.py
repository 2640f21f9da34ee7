"""The kernel for decode rows on Hopper against float64: rows of any length, in one range or in hundreds, and of several
tokens."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from dovetail.core.interfaces import PLAIN, HostBounds, QKNorm, Rope
from dovetail.plugins.attention.config import TritonConfig

from .attention_cases import Case, error, expected, make_step

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.language.extra.cuda import globaltimer  # noqa: E402

from dovetail.core.ops.kernels.launch import announce, dependent, wait  # noqa: E402
from dovetail.plugins.attention.triton.backend import Triton  # noqa: E402
from dovetail.plugins.attention.triton.gpu import has_hopper  # noqa: E402
from dovetail.plugins.attention.triton.launch_plan import LaunchPlan  # noqa: E402
from dovetail.plugins.attention.triton.tiles import EMPTY, WARP_KEYS, DecodeTile, Shape, Tile, Tiles  # noqa: E402

GPU = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() and has_hopper(GPU)), reason="needs a Hopper GPU"),
]
BF16, FP16, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
WHOLE = 1 << 20
"""Warps, blocks in flight, programs per SM, minimum keys per range, slabs per block."""
CUTS = {
    "whole": (4, 3, 1, WHOLE, 1),
    "halves": (8, 2, 1, 512, 1),
    "ranges": (4, 3, 2, 128, 2),
    "many ranges": (4, 1, 8, 64, 1),
    "a block at a time": (8, 1, 2, 256, 2),
}
NEAR = {BF16: 6e-3, FP16: 1.5e-3}


class Given(Tiles):
    def __init__(self, cut: tuple[int, int, int, int, int]) -> None:
        self.cut = cut

    def decode(self, shape: Shape, tokens: int, programs: float) -> Tile:
        assert shape.decodes
        warps, stages, programs, least, slabs = self.cut
        heads = 8 if shape.group * tokens <= 8 else 16
        each = max(1, min(tokens, heads // shape.group))
        return DecodeTile(heads, WARP_KEYS, warps, stages, programs, least=least, slabs=slabs, tokens=each)


def rows(*lengths: int, padding: int = 0) -> dict:
    return {"lengths": lengths, "counts": (1,) * len(lengths), "num_decode": len(lengths), "padding": padding}


def backend(cut: tuple[int, int, int, int, int] | None) -> Triton:
    made = Triton(TritonConfig())
    if cut:
        made.tiles = Given(cut)
    return made


def check(case: Case, cut: tuple[int, int, int, int, int] | None = None) -> None:
    step = make_step(case, made := backend(cut), GPU)
    got, again = (made.attend(step.layer, step.ctx, step.q_THD)[PLAIN].values for _ in range(2))
    assert error(got, expected(step)) < NEAR[case.dtype]
    assert (got[sum(case.counts) :] == 0).all()
    assert torch.equal(got, again)
    for plan in step.ctx.state.values():
        for items in plan.lists:
            if isinstance(items.tile, DecodeTile):
                assert (items.mail == EMPTY).all(), "mailboxes that are not empty again"


SOME = (1, 2, 63, 64, 65, 128, 129, 500, 1024, 3000)
LLAMA = Case(**rows(*SOME), heads=(32, 8), dim=128, page_tokens=32, dtype=BF16)


@pytest.mark.parametrize("kv_dtype", [None, E4M3])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_rows_of_any_length(cut, kv_dtype):
    case = replace(LLAMA, kv_dtype=kv_dtype)
    if kv_dtype is None and cut[0] * cut[1] * cut[4] > 16:
        cut = (*cut[:1], 1, *cut[2:])
    check(replace(case, padding=3), cut)
    check(replace(case, **rows(*(random.randint(1, 2000) for _ in range(70)))), cut)


@pytest.mark.parametrize("kv_dtype", [None, E4M3])
@pytest.mark.parametrize("least", [64, 128, 512])
def test_ranges_meet_in_groups(least, kv_dtype):
    """Up to 300 ranges per row: full and partial groups of eight, and a single group."""
    for lengths in ((20000,), (1150, 9000, 520, 64), (4096 + 64, 512 + 64)):
        check(replace(LLAMA, **rows(*lengths), heads=(8, 1), kv_dtype=kv_dtype), (4, 2, 4, least, 1))


@pytest.mark.parametrize("kv_dtype", [None, E4M3])
def test_values_that_are_no_numbers_arrive_too(kv_dtype):
    """If a range sent EMPTY, the receiver would wait forever."""
    case = replace(LLAMA, **rows(9000, 700), heads=(8, 1), kv_dtype=kv_dtype)
    step = make_step(case, made := backend((4, 2, 4, 64, 1)), GPU)
    for plane in made.pools[0].planes.values():
        plane.view(torch.uint8).fill_(0xFF)
    assert made.attend(step.layer, step.ctx, step.q_THD)[PLAIN].values.isnan().all()


@pytest.mark.parametrize("window", [1, 100, 1024])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_windows(cut, window):
    check(replace(LLAMA, **rows(*SOME, 9000), window=window, kv_dtype=E4M3), cut)
    check(replace(LLAMA, **rows(9000, 300), window=window, dim=64, dtype=FP16), cut)


@pytest.mark.parametrize("kv_dtype", [None, E4M3])
@pytest.mark.parametrize("scores", [{"sinks": True}, {"soft_cap": 0.7}, {"soft_cap": 2.0, "sinks": True}])
def test_sinks_and_capped_scores(scores, kv_dtype):
    """In rows of one range and of many, and where several programs have the query heads of a kv head."""
    for cut in (None, CUTS["many ranges"]):
        check(replace(LLAMA, **rows(*SOME, 9000, padding=3), kv_dtype=kv_dtype, **scores), cut)
        check(replace(LLAMA, heads=(40, 2), dim=80, window=128, kv_dtype=kv_dtype, **scores), cut)


@pytest.mark.parametrize("heads", [(8, 8), (6, 3), (15, 3), (32, 8), (7, 1), (8, 1), (20, 2), (16, 1)])
@pytest.mark.parametrize(("dim", "dtype", "kv_dtype"), [(64, FP16, None), (128, BF16, None), (128, FP16, E5M2)])
def test_heads(heads, dim, dtype, kv_dtype):
    for head_scales in (False, True) if kv_dtype else (False,):
        case = replace(LLAMA, heads=heads, dim=dim, dtype=dtype, kv_dtype=kv_dtype, head_scales=head_scales)
        check(case)
        check(case, CUTS["many ranges"])


@pytest.mark.parametrize("heads", [(4, 4), (20, 4), (7, 1), (71, 1), (40, 2)])
@pytest.mark.parametrize("dim", [48, 64, 80, 96, 192, 256])
@pytest.mark.parametrize("kv_dtype", [None, E4M3])
def test_head_dims_and_groups_that_are_padded(heads, dim, kv_dtype):
    case = replace(LLAMA, heads=heads, dim=dim, kv_dtype=kv_dtype, padding=2)
    for cut in (None, (2, 2, 4, 64, 1), CUTS["many ranges"]):
        check(case, cut)


DRAFTS = {"counts": (5, 1, 2, 3, 8, 5, 1, 4, 7, 6), "lengths": (5, 1, 63, 66, 65, 128, 129, 500, 1027, 3000)}


@pytest.mark.parametrize("kv_dtype", [None, E4M3])
@pytest.mark.parametrize("heads", [(32, 8), (8, 8), (6, 3), (7, 1), (64, 8), (5, 1)])
@pytest.mark.parametrize("cut", [None, CUTS["ranges"], CUTS["many ranges"]], ids=["rule", "ranges", "many ranges"])
def test_several_tokens_of_a_row(cut, heads, kv_dtype):
    """More tokens than a tile has, ranges that end between two of them, windows, sinks, padding, and empty rows."""
    if kv_dtype is None and cut and cut[0] * cut[1] * cut[4] > 16:
        cut = (*cut[:1], 1, *cut[2:])
    case = replace(LLAMA, **DRAFTS, heads=heads, kv_dtype=kv_dtype, padding=3)
    few = replace(case, counts=(5,), lengths=(700,), num_decode=1)
    # A few rows go to the kernel for all GPUs, which writes their keys, too.
    many = replace(case, counts=case.counts * 14, lengths=case.lengths * 14, num_decode=140)
    # By the rule it has 8-bit pages alone, and more query heads of all tokens than its smaller tile.
    ruled = kv_dtype is E4M3 and max(case.counts) * heads[0] // heads[1] > 8
    for some in (few, case, many):
        tile = make_plan(some, cut).lists[0].tile
        if cut is not None or some is many:
            assert isinstance(tile, DecodeTile) is (cut is not None or ruled)
        check(some, cut)
        check(replace(some, window=70, sinks=True, soft_cap=2.0), cut)
        check(replace(some, window=2), cut)
    check(replace(many, slack=900, empty_rows=2, dim=80), cut)


def make_plan(case: Case, cut: tuple[int, int, int, int, int] | None) -> LaunchPlan:
    step = make_step(case, made := backend(cut), GPU)
    made.attend(step.layer, step.ctx, step.q_THD)
    (plan,) = step.ctx.state.values()
    return plan


@pytest.mark.parametrize("kv_dtype", [None, E4M3])
def test_tokens_of_rows_with_drafts_are_those_of_single_rows(kv_dtype):
    """Each draft's output is that of a row that ends with it, though other programs compute it."""
    case = replace(LLAMA, counts=(4,) * 70, lengths=tuple(random.randint(4, 900) for _ in range(70)), num_decode=70)
    step = make_step(replace(case, kv_dtype=kv_dtype), made := backend(None), GPU)
    got_RCO = made.attend(step.layer, step.ctx, step.q_THD)[PLAIN].values.view(70, 4, -1)
    for at in range(4):
        meta = replace(
            step.ctx.meta,
            row_start_B1=torch.arange(71, dtype=torch.int32, device=GPU),
            kv_len_B=step.ctx.meta.kv_len_B - (3 - at),
        )
        host = HostBounds((1,) * 70, case.lengths, 70)
        ctx = made.plan_device(meta, host, None)
        q_RHD = step.q_THD.view(70, 4, *step.q_THD.shape[1:])[:, at].contiguous()
        want_RO = made.attend(step.layer, ctx, q_RHD)[PLAIN].values
        assert error(got_RCO[:, at], want_RO.double()) < NEAR[BF16]


@pytest.mark.parametrize("page_tokens", [1, 8, 16, 48, 64, 256])
def test_pages(page_tokens):
    for kv_dtype in (None, E4M3):
        for cut in (None, (8, 1, 2, 256, 1)):
            check(replace(LLAMA, page_tokens=page_tokens, kv_dtype=kv_dtype), cut)


def test_steps_whose_bounds_are_capacities():
    """Rows as in a captured graph: shorter than planned for, without tokens, then prompts."""
    case = replace(LLAMA, slack=3000, empty_rows=2, padding=5)
    prompts = replace(case, lengths=(1500, 33, 4097, 800, 2061), counts=(1, 1, 1, 700, 513), num_decode=3)
    for some in (case, prompts, replace(case, kv_dtype=E4M3), replace(prompts, kv_dtype=E4M3)):
        check(some)
        check(some, (4, 2, 2, 128, 1))


@pytest.mark.parametrize("kv_dtype", [None, E4M3, E5M2])
@pytest.mark.parametrize(
    ("heads", "dim", "norm", "rotary"),
    [
        ((32, 8), 128, False, 128), ((32, 8), 128, True, 128), ((32, 8), 128, False, 64), ((32, 8), 128, True, 0),
        ((71, 1), 64, False, 64), ((16, 16), 256, True, 64), ((14, 2), 80, True, 32),
    ],
)  # fmt: skip
def test_writes_and_attends_as_the_kernel_for_all_gpus(heads, dim, norm, rotary, kv_dtype):
    """The new key and value are in their slots, nothing else changed, and outputs agree up to rounding."""
    case = replace(LLAMA, heads=heads, dim=dim, kv_dtype=kv_dtype, head_scales=kv_dtype is E5M2)
    # The score of the new key is capped separately.
    case = replace(case, soft_cap=2.0 * norm, sinks=norm)
    for cut in (None, *CUTS.values()) if dim <= 128 else (None, CUTS["many ranges"]):
        if cut and kv_dtype is None and cut[0] * cut[1] * cut[4] > 16:
            continue
        made, other = backend(cut), Triton(TritonConfig(gluon=False))
        step = make_step(case, made, GPU)
        other.bind(made.pools)
        query_heads, kv_heads = case.heads
        qkv = torch.randn(len(SOME), (query_heads + 2 * kv_heads) * dim, device=GPU).to(BF16)
        rope = Rope(torch.randn(4096, rotary, device=GPU)) if rotary else None
        weights = [torch.rand(dim, device=GPU).to(BF16) + 0.5 for _ in "qk"]
        args = (qkv, rope, QKNorm(weights[0], weights[1], 1e-5) if norm else None)
        planes = made.pools[0].planes
        before = {name: plane.clone() for name, plane in planes.items()}
        found = []
        for one in (made, other):
            ctx = one.plan_device(step.ctx.meta, step.ctx.host, None)
            out = one.write_and_attend(step.layer, ctx, *args)[PLAIN].values.double()
            found.append((out, {name: plane.view(torch.uint8).clone() for name, plane in planes.items()}))
            for name, plane in planes.items():
                plane.view(torch.uint8).copy_(before[name].view(torch.uint8))
        assert error(found[0][0], found[1][0]) < NEAR[BF16]
        for name, plane in before.items():
            different = (found[0][1][name] != found[1][1][name]).sum().item()
            # The norm's sum is computed in another order.
            assert different <= (len(SOME) * kv_heads if norm else 0)
            assert not torch.equal(found[0][1][name], plane.view(torch.uint8)), "nothing was written"


@triton.jit
def late(from_ptr, to_ptr, size, nanoseconds, PDL: tl.constexpr, BLOCK: tl.constexpr):
    """Kernel that allows the next launch long before it writes."""
    announce(PDL)
    wait(PDL)
    began = globaltimer()
    while globaltimer() - began < nanoseconds:
        pass
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(to_ptr + at, tl.load(from_ptr + at, mask=at < size), mask=at < size)


@pytest.mark.parametrize("kv_dtype", [None, E4M3])
def test_the_preceding_kernel_is_awaited_and_data_of_the_last_step_is_not_used(kv_dtype):
    """Consecutive steps with different rows at the same addresses, run eagerly and as a CUDA graph."""
    step = make_step(replace(LLAMA, kv_dtype=kv_dtype, slack=max(SOME)), made := backend(None), GPU)
    meta, host, rope = step.ctx.meta, step.ctx.host, Rope(torch.randn(4096, 128, device=GPU))
    heads, kv_heads = LLAMA.heads
    given = torch.randn(len(SOME), (heads + 2 * kv_heads) * 128, device=GPU).to(BF16)
    qkv = torch.empty_like(given)

    def run(nanoseconds: int) -> torch.Tensor:
        ctx = made.plan_device(meta, host, None)
        for _ in range(3):
            qkv.fill_(float("nan"))
            late[(triton.cdiv(given.numel(), 1024),)](
                given, qkv, given.numel(), nanoseconds, BLOCK=1024, **dependent(qkv)
            )
            out = made.write_and_attend(step.layer, ctx, qkv, rope)[PLAIN].values
        return out

    want = run(0).double()
    torch.cuda.synchronize()
    assert want.isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(20_000)
    for turn in range(1, 7):
        for x in (meta.page_table_BP, meta.kv_len_B, given):
            x.copy_(x.flip(0))
        if turn > 3:
            got = run(20_000)
        else:
            graph.replay()
            got = captured
        assert error(got, want.flip(0) if turn % 2 else want) < NEAR[BF16], turn


def test_a_graph_finds_its_mailboxes_empty_each_time():
    """Replay with rows other than at capture, of which more or fewer are split."""
    case = replace(LLAMA, **rows(20000, 9000, 300), heads=(8, 1), kv_dtype=E4M3)
    step = make_step(case, made := backend(None), GPU)

    def run() -> torch.Tensor:
        ctx = made.plan_device(step.ctx.meta, step.ctx.host, None)
        for _ in range(3):
            out = made.attend(step.layer, ctx, step.q_THD)[PLAIN].values
        return out

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for lengths in (case.lengths, (1, 700, 299), (19999, 64, 300)):
        step.ctx.meta.kv_len_B.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        shorter = replace(case, lengths=lengths)
        some = replace(step, case=shorter, keys=cut_to(step.keys, lengths), values=cut_to(step.values, lengths))
        assert error(got, expected(some)) < NEAR[BF16]


def cut_to(whole: list[torch.Tensor], lengths: tuple[int, ...]) -> list[torch.Tensor]:
    return [x[:length] for x, length in zip(whole, lengths, strict=True)]
