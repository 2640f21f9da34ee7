"""Columns of GPTQ matrices with act-order (`desc_act`). Any input may be in any group, so columns are sorted by group.

A rank of a row-parallel layer has some columns of every group. It fills each group up with columns of zeros, so that
a scale serves a whole number of steps.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from dovetail.core.arithmetic import ceil_div
from dovetail.core.errors import TensorError, shown
from dovetail.core.interfaces import PLAIN, ActFormat, LinearShape
from dovetail.core.ops.formats import triton_encode

_ENCODE_PLAIN = triton_encode("dovetail.core.ops.kernels.formats:encode_plain")
STEP = 16
"""Columns that share a scale on a rank with some columns of each group: the inputs of one tensor core instruction."""


class GroupOrder:
    """Order of a rank's columns."""

    def __init__(self, group: int, shape: LinearShape) -> None:
        self.group, self.inputs, self.whole_inp = group, shape.inp, shape.whole_inp
        self.groups = ceil_div(shape.whole_inp, group)
        self.is_whole = shape.inp == shape.whole_inp
        self.step = group if self.is_whole else STEP
        most = shape.inp if self.is_whole else shape.inp + self.groups * (STEP - 1)
        self.width = most if self.is_whole else ceil_div(most, STEP) * STEP
        """Columns with those of zeros; an upper bound for any order."""

    def of(self, name: str, group_I: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (this rank's column at each place, int64 [width]; group of each step, int64 [steps]), from the group
        of each of this rank's columns, in the tensor `name`. Column number `inputs` stands for a column of zeros."""
        group_I = group_I.cpu().long()
        if len(group_I) and not 0 <= int(group_I.min()) <= int(group_I.max()) < self.groups:
            raise TensorError(
                name, f"has groups {shown([int(group_I.min()), int(group_I.max())])}; there are {self.groups}"
            )
        order, counts = group_I.argsort(stable=True), group_I.bincount(minlength=self.groups)
        if self.is_whole:
            sizes = [min(self.group, self.whole_inp - at * self.group) for at in range(self.groups)]
            if counts.tolist() != sizes:
                raise TensorError(name, f"must have {self.group} inputs of each group; it has {shown(counts.tolist())}")
            return order, torch.arange(self.groups)
        steps = -(-counts // STEP)
        places = torch.full((self.width,), self.inputs)
        starts = (steps.cumsum(0) - steps) * STEP
        within = torch.arange(len(order)) - (counts.cumsum(0) - counts)[group_I[order]]
        places[starts[group_I[order]] + within] = order
        groups = torch.arange(self.groups).repeat_interleave(steps)
        return places, torch.nn.functional.pad(groups, (0, self.width // STEP - len(groups)))


def check_consecutive(name: str, group_I: torch.Tensor, group: int, shape: LinearShape) -> None:
    """Raise TensorError if the tensor `name` has this rank's columns in other groups than those of consecutive columns,
    as a config without act-order states. `group`: 0 = one for all."""
    columns = torch.arange(shape.first_inp, shape.first_inp + shape.inp)
    wanted_I = columns // (group or shape.whole_inp)
    if len(unlike := (group_I.cpu() != wanted_I).nonzero()):
        at = int(unlike[0])
        raise TensorError(
            name,
            f"has group {int(group_I[at])} for input {int(columns[at])}, which is in group {int(wanted_I[at])} by "
            "config.json: without act-order, groups are consecutive inputs",
        )


def with_order(fmt: ActFormat, width: int, device: torch.device) -> ActFormat:
    """Return the format of inputs whose columns are in an order that `set_order` sets."""
    order = torch.arange(width, device=device)
    if fmt is PLAIN:
        fmt = replace(fmt, encode=_ENCODE_PLAIN, reference=lambda x_TC: (x_TC, None))
    return replace(fmt, name=f"{fmt.name}_ordered", perm=order, places=order.int())


def set_order(fmt: ActFormat, order: torch.Tensor) -> None:
    assert fmt.perm is not None and fmt.places is not None
    fmt.perm.copy_(order)
    fmt.places.copy_(order.argsort(stable=True))
