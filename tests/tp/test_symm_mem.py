"""Kernels of collective=symm_mem in Triton's interpreter, on processes that map each other's mailboxes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from itertools import product

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("no Triton for this platform", allow_module_level=True)

import symm_mem_rank
from symm_mem_rank import (
    BOXES,
    CANDIDATES,
    COLUMNS,
    COPIED_ROWS,
    DTYPES,
    EMITS,
    EMPTY,
    EPS,
    FLAT,
    MIXED,
    PROGRAMS,
    ROWS,
    SHARED_ROWS,
    candidates,
    mixed,
    odd,
    summand,
)

from dovetail.core.interfaces import PLAIN
from dovetail.core.ops.norm import rms_norm_reference
from dovetail.plugins.collective.symm_mem.kernels import BOX_WORDS
from dovetail.plugins.quant.fp8.format import FP8_TOKEN
from dovetail.plugins.quant.int8.format import INT8_TOKEN

SIZE = int(os.environ.get("DOVETAIL_SUMMANDS", "3"))
"""Three ranks: sums have an order, parts of a row are not a power of two, and a stop can reach a rank through a third
one."""
pytestmark = [pytest.mark.timeout(130 * SIZE), pytest.mark.nightly]
Results = list[dict[tuple[object, ...], torch.Tensor]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("ranks")
    words = 2 * BOX_WORDS * (2 * BOXES * SIZE + 2 * PROGRAMS)
    for rank in range(SIZE):
        (folder / f"mail{rank}").write_bytes(torch.full((words,), EMPTY, dtype=torch.int32).numpy().tobytes())
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, symm_mem_rank.__file__]
    ranks = [subprocess.Popen([*command, str(rank), str(SIZE), str(folder)], env=environment) for rank in range(SIZE)]
    try:
        assert [rank.wait(timeout=120 * SIZE) for rank in ranks] == [0] * SIZE
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [torch.load(folder / f"{rank}.pt") for rank in range(SIZE)]


def in_rank_order(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    total = torch.zeros(shape)
    for rank in range(SIZE):
        total = total + summand(rank, shape, dtype).float()
    return total


def test_edges_of_a_pass_have_the_same_bits_on_every_rank(results: Results) -> None:
    """The ranks have already compared the values with the expected ones."""
    for how in ("sharded", "copies"):
        assert all(result["pass", how] == results[0]["pass", how] for result in results)


def test_copied_rows_are_the_sums_in_rank_order(results: Results) -> None:
    for rows, dtype in product(COPIED_ROWS, DTYPES):
        expected = in_rank_order((rows * SIZE, COLUMNS), dtype).to(dtype)
        assert torch.equal(results[0]["copied", rows, dtype], torch.cat([expected, expected]))


def test_what_a_copy_gathered_stands_until_the_second_call_from_there(results: Results) -> None:
    expected = [torch.full((5, 3), float(10 * rank + i)) for i in range(2) for rank in range(SIZE)]
    assert torch.equal(results[0]["gathered",], torch.cat(expected))


def test_every_result_has_the_same_bits_on_every_rank(results: Results) -> None:
    for key, value in results[0].items():
        if key[-1] == "own rows" or key[0] == "pass":
            continue
        for other in results[1:]:
            bits = [x.contiguous().view(torch.uint8) for x in (value, other[key])]
            assert torch.equal(*bits), key


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_flat_sums_are_those_in_rank_order(results: Results, algorithm: str, dtype: torch.dtype) -> None:
    for count in FLAT:
        assert torch.equal(results[0][algorithm, dtype, count], in_rank_order((count,), dtype).to(dtype)), count


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_a_boundary_is_the_sum_the_residual_and_the_norm(results: Results, algorithm: str, dtype: torch.dtype) -> None:
    weight = summand(90, (COLUMNS,), dtype)
    for rows in ROWS:
        shape = rows, COLUMNS
        total, residual = in_rank_order(shape, dtype), summand(91, shape, dtype)
        after = (
            total.to(torch.float32 if algorithm == "one_shot" and rows <= BOXES else dtype).float() + residual.float()
        ).to(dtype)
        found = {what: results[0][algorithm, dtype, rows, what] for what in ("after", "plain", "int8", "scale")}
        assert torch.equal(found["after"], after)
        bundle, _ = rms_norm_reference(after, None, weight, EPS, (PLAIN, INT8_TOKEN))
        close = {"rtol": 2e-3, "atol": 1e-6} if dtype is torch.float16 else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(found["plain"], bundle[PLAIN].values, **close)
        torch.testing.assert_close(found["scale"], bundle[INT8_TOKEN].scale, rtol=2e-3, atol=0)
        assert (found["int8"].int() - bundle[INT8_TOKEN].values.int()).abs().max() <= 1


@pytest.mark.parametrize("how", ["sharded", "copied"])
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float16) for name in EMITS), ("three", torch.float32)], ids=str
)
def test_a_rank_sums_its_rows_and_gets_all_that_came_out(
    results: Results, name: str, dtype: torch.dtype, how: str
) -> None:
    weight, emit = summand(90, (COLUMNS,), dtype), EMITS[name]
    # Rows are shared by copies only if one kernel writes all formats.
    emit = emit[:2] if how == "copied" else emit
    for rows in SHARED_ROWS:
        shape = rows, COLUMNS
        residual = torch.zeros(shape, dtype=dtype) if rows == 1 else summand(91, shape, dtype)
        total = sum((summand(rank, shape, dtype).float() for rank in range(SIZE)), torch.zeros(shape))
        after = (total + residual.float()).to(dtype)
        own = torch.cat([result[how, dtype, rows, name, "own rows"] for result in results])
        assert torch.equal(own[:rows], after)
        expected, _ = rms_norm_reference(after, None, weight, EPS, emit)
        for fmt in emit:
            found = results[0][how, dtype, rows, name, fmt.name].view(expected[fmt].values.dtype).float()
            # A value halfway between two steps of the format may round either way.
            step = 0.13 if fmt is FP8_TOKEN else 4e-3 if torch.float16 in (dtype, fmt.dtype) else 1e-5
            torch.testing.assert_close(found, expected[fmt].values.float(), rtol=step, atol=2e-3)
            if fmt is not PLAIN:
                scale = results[0][how, dtype, rows, name, fmt.name, "scale"]
                torch.testing.assert_close(scale, expected[fmt].scale, rtol=4e-3, atol=0)


def test_argmax_takes_the_largest_and_of_equals_the_least_index(results: Results) -> None:
    for rows in CANDIDATES:
        value, index = (torch.stack(each) for each in zip(*(candidates(r, rows) for r in range(SIZE)), strict=True))
        value = value.nan_to_num(nan=float("-inf"), neginf=float("-inf"))
        expected = torch.where(value == value.amax(0), index, 2**31).amin(0)
        assert torch.equal(results[0]["argmax", rows], expected)


def test_a_boundary_without_residual_returns_the_sum(results: Results) -> None:
    assert torch.equal(results[0]["no residual",], in_rank_order((3, COLUMNS), torch.float32))


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_no_payload_is_taken_for_an_empty_word(results: Results, algorithm: str) -> None:
    empty, lone, nan, infinite, *ones = results[0]["odd", algorithm].tolist()
    # The empty word is a float32 of -5e-41 and arrives as 0.
    assert (empty, lone) == (0, 0) and nan != nan and infinite == float("inf")
    assert ones == [sum(odd(rank)[4 + i].item() for rank in range(SIZE)) for i in range(4)]


def test_calls_of_every_kind_do_not_meet(results: Results) -> None:
    for seed in range(MIXED):
        kind, rows = mixed(seed)
        if kind == "argmax":
            winner = max(range(SIZE), key=lambda rank: (rank + seed) % SIZE)
            expected = torch.arange(rows) + winner
        else:
            expected = torch.full((rows, COLUMNS), float(sum(rank + seed for rank in range(SIZE)))).half()
        for result in results:
            assert torch.equal(result["mixed", seed], expected), (seed, kind, rows)
