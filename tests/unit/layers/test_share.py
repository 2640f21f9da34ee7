"""A rank's share of tensors in the layouts of published checkpoints, against slices of the unpacked matrix."""

import itertools

import pytest
import torch

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import LinearShape
from dovetail.core.interfaces.tensor_record import INPUTS, OUTPUTS, Axis, TensorRecord
from dovetail.core.layers.share import Wanted, read_share
from dovetail.core.testing.model_driver import Lazy

OUT, INP, GROUP = 48, 160, 64  # the last group has 32 inputs
SHIFTS = torch.arange(0, 32, 4)
ROWS = Wanted(OUT, 16, 32), Wanted(OUT, 4, 13), Wanted(OUT, 8, 40, torch.tensor([3, 0, 30, 9])), Wanted(OUT, 0, OUT)
COLUMNS = Wanted(INP, 0, INP), Wanted(INP, 80, 160), Wanted(INP, 40, 80), Wanted(INP, 100, 103)


def pack(codes: torch.Tensor, axis: int) -> torch.Tensor:
    """Eight codes of 4 bits in an int32, the first one in the lowest bits."""
    codes = codes.movedim(axis, -1).unflatten(-1, (-1, 8)).long()
    return (codes << SHIFTS).sum(-1).to(torch.int32).movedim(-1, axis)


def unpacker(axis: int):
    def unpack(words: torch.Tensor) -> torch.Tensor:
        codes = (words.movedim(axis, -1).unsqueeze(-1) >> SHIFTS) & 15
        return codes.flatten(-2).movedim(-1, axis).to(torch.uint8)

    return unpack


def chosen(outputs: Wanted) -> torch.Tensor:
    rows = torch.arange(outputs.start, outputs.stop)
    return rows if outputs.order is None else rows[outputs.order]


def groups_of(inputs: Wanted) -> slice:
    return slice(inputs.start // GROUP, -(-inputs.stop // GROUP))


@pytest.mark.parametrize(("outputs", "inputs"), list(itertools.product(ROWS, COLUMNS)))
def test_layouts_of_checkpoints(outputs, inputs):
    codes_OI = torch.randint(0, 16, (OUT, INP))
    scale_OG, zero_OG = torch.rand(OUT, 3), torch.randint(0, 16, (OUT, 3))
    rows, columns, groups = chosen(outputs), slice(inputs.start, inputs.stop), groups_of(inputs)
    word, group = (torch.int32,), Axis("inputs", GROUP)
    layouts = {
        # compressed-tensors
        "weight_packed": (
            pack(codes_OI, 1),
            TensorRecord("", (OUTPUTS, Axis("inputs", packed=8)), word, unpack=unpacker(1)),
            codes_OI[rows][:, columns],
        ),
        "weight_scale": (scale_OG, TensorRecord("", (OUTPUTS, group)), scale_OG[rows][:, groups]),
        "weight_zero_point": (
            pack(zero_OG, 0),
            TensorRecord("", (Axis("outputs", packed=8), group), word, unpack=unpacker(0)),
            zero_OG[rows][:, groups],
        ),
        "weight_shape": (
            torch.tensor([OUT, INP]),
            TensorRecord("", (Axis("nothing", entries=2),), (torch.int64,)),
            None,
        ),
        # AWQ packs outputs, GPTQ inputs; both are transposed.
        "awq qweight": (
            pack(codes_OI.t(), 1),
            TensorRecord("", (INPUTS, Axis("outputs", packed=8)), word, unpack=unpacker(1)),
            codes_OI[rows][:, columns].t(),
        ),
        "gptq qweight": (
            pack(codes_OI.t(), 0),
            TensorRecord("", (Axis("inputs", packed=8), OUTPUTS), word, unpack=unpacker(0)),
            codes_OI[rows][:, columns].t(),
        ),
        "qzeros": (
            pack(zero_OG.t(), 1),
            TensorRecord("", (group, Axis("outputs", packed=8)), word, unpack=unpacker(1)),
            zero_OG[rows][:, groups].t(),
        ),
        "g_idx": (
            torch.arange(INP) // GROUP,
            TensorRecord("", (INPUTS,), (torch.int64,)),
            (torch.arange(INP) // GROUP)[columns],
        ),
    }
    for name, (stored, record, expected) in layouts.items():
        share = read_share(name, Lazy(stored), record, outputs, inputs)
        assert torch.equal(share, stored if expected is None else expected), name


@pytest.mark.parametrize(("outputs", "inputs"), list(itertools.product(ROWS, COLUMNS)))
def test_blocks_and_bytes(outputs, inputs):
    rows = chosen(outputs)
    scale = torch.rand(2, 2)  # blocks of 32 outputs and 128 inputs
    blocks = TensorRecord("", (Axis("outputs", 32), Axis("inputs", 128)))
    share = read_share("weight_scale_inv", Lazy(scale), blocks, outputs, inputs)
    assert torch.equal(share, scale[rows // 32][:, inputs.start // 128 : -(-inputs.stop // 128)])
    stored = torch.randint(0, 256, (OUT, 5 * 18), dtype=torch.uint8)  # 18 bytes per 32 inputs
    records = TensorRecord("", (OUTPUTS, Axis("inputs", 32, entries=18)), (torch.uint8,))
    share = read_share("weight", Lazy(stored), records, outputs, inputs)
    assert torch.equal(share, stored[rows][:, inputs.start // 32 * 18 : -(-inputs.stop // 32) * 18])


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_of_a_matrix_is_repeated(shape):
    record = TensorRecord("", (Axis("outputs", group=0), Axis("inputs", group=0)))
    share = read_share("weight_scale", Lazy(torch.full(shape, 3.0)), record, ROWS[0], COLUMNS[1])
    assert torch.equal(share, torch.full((16, 1), 3.0))


@pytest.mark.parametrize(
    ("stored", "record", "says"),
    [
        (torch.ones(48, 20), TensorRecord(""), r"'x' has shape \(48, 20\).*must be \(48, 160\)"),
        (torch.ones(48, 2), TensorRecord("", (OUTPUTS, Axis("inputs", 64))), r"\(48, 3\).*1 per 64 inputs"),
        (torch.ones(48, 160, dtype=torch.int8), TensorRecord(""), "'x' is int8 in the checkpoint; it must be float16"),
        (torch.ones(160, dtype=torch.int64), TensorRecord("", (INPUTS,), (torch.int32,)), "is int64.*must be int32"),
        (torch.ones(0, 160), TensorRecord(""), r"'x' has shape \(0, 160\)"),
    ],
)  # fmt: skip
def test_what_does_not_fit_its_record_is_refused(stored, record, says):
    with pytest.raises(ConfigError, match=says):
        read_share("x", Lazy(stored), record, ROWS[0], COLUMNS[0])


def test_scales_repeat_at_the_largest_step_that_divides():
    for ranks, group in itertools.product((1, 2, 4, 8), (0, 32, 64, 128)):
        each = 688 // ranks
        whole = torch.arange(-(-688 // group) if group else 1)
        for rank in range(ranks):
            shape = LinearShape(each, 8, (8,), whole_inp=688, first_inp=rank * each)
            step = shape.group_step(group)
            if not group:
                assert step == 0 and torch.equal(shape.spread_groups(whole, 0), whole)
                continue
            held = whole[shape.first_inp // group : -(-(shape.first_inp + each) // group)]
            spread = shape.spread_groups(held[None], group)[0].repeat_interleave(step)[:each]
            assert torch.equal(spread, torch.arange(rank * each, (rank + 1) * each) // group)
            assert step == group or (rank * each) % group
