"""Kernel launches. Decisions depend on shapes alone, so all ranks take the same. Shapes: T tokens, C channels."""

from __future__ import annotations

from typing import Any

import torch

from dovetail.core.arithmetic import ceil_div, power_of_2
from dovetail.core.interfaces import ActFormat, Bundle
from dovetail.core.interfaces.rows import shard_rows
from dovetail.core.ops.formats import EmitPlan, plan_emit, scales_of_row
from dovetail.core.ops.kernels.formats import EncodeTarget, collect
from dovetail.core.ops.kernels.launch import dependent
from dovetail.core.ops.padding import empty_rows
from dovetail.plugins.collective.symm_mem.kernels import BOX_WORDS, argmax_over_ranks, one_shot, two_shot
from dovetail.plugins.collective.symm_mem.mailbox import TWO_SHOT_PROGRAMS, Mailbox
from dovetail.plugins.collective.symm_mem.sharded_kernels import sharded

WORD = 4
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALL_ROW, LARGE_ROW = 1024, 4096
"""Words per row of a flat tensor: small where those rows fit the programs of one launch, else large. Each further size
would be a further kernel to compile."""
ROWS = 256
"""Rows of argmax per program."""
PARTS = 4
"""Programs that send a row in one_shot, while there are few rows."""
LEAST_WORDS = 128
"""Minimum words a program waits for: one for each thread of four warps. With fewer, several warps would hold copies of
one word, and each would leave the wait loop on its own."""
REGISTERS, MOST_REGISTERS = 1 << 16, 255
"""Registers of an SM, and the most of a thread."""
ONE_SHOT_REGISTERS = 128
"""Registers of a thread of one_shot. By itself the assembler stays below 100 for rows of 1024 words, and spills."""
MOST_WORDS = 32
"""Most words a thread polls at once."""
IN_FLIGHT = 1 << 15
"""Most words of all ranks that a program of one_shot waits for at once. With more it spills registers, which costs more
than the second hop of two_shot."""


class Reducer:
    def __init__(self, mail: Mailbox, rank: int, size: int) -> None:
        self.mail, self.rank, self.size = mail, rank, size
        self.most_argmax = mail.boxes * ROWS
        # Arguments of all kernels that send through these boxes.
        shared = {"stop_ptr": mail.stopped, "rank": rank, "WORLD": size}
        self._one_shot_boxes = dict(
            peers_ptr=mail.one_shot_peers, mail_ptr=mail.one_shot, half_ptr=mail.one_shot_halves, **shared
        )
        self._two_shot_boxes = dict(
            peers_ptr=mail.two_shot_peers, mail_ptr=mail.two_shot, half_ptr=mail.two_shot_halves, **shared
        )
        self._longest = min(BOX_WORDS, 1 << (IN_FLIGHT // size).bit_length() - 1)
        """Most words of a row of one_shot."""

    def serves(self, x: torch.Tensor) -> bool:
        return x.dtype in DTYPES and 0 < x.nbytes < 2**31 and x.nbytes % WORD == 0

    def fuses(self, x: torch.Tensor) -> bool:
        """Whether `boundary` serves rows like these."""
        row = x.shape[-1] * x.element_size()
        return self.serves(x) and x.ndim == 2 and row <= BOX_WORDS * WORD and row % (16 * self.size) == 0

    def reduce(self, x: torch.Tensor, algorithm: str) -> torch.Tensor:
        """Sum over ranks in place and return `x`, which is contiguous."""
        words, boxes = x.nbytes // WORD, self.mail.boxes
        small = words <= boxes * SMALL_ROW
        if algorithm == "one_shot" and words <= boxes * self._longest:
            row = SMALL_ROW if small else self._longest
            self._one_shot(x, x, words, row, split=1)
        else:
            row = (SMALL_ROW if small else LARGE_ROW) // self.size * self.size
            self._two_shot(x, x, words, row)
        return x

    def boundary(
        self,
        x_TC: torch.Tensor,
        residual_TC: torch.Tensor | None,
        weight_C: torch.Tensor,
        eps: float,
        emit: tuple[ActFormat, ...],
        algorithm: str,
        after: tuple[torch.Tensor, float] | None = None,
    ) -> tuple[Bundle, torch.Tensor]:
        """Sum over ranks and add the residual. Return the RMSNorm in the formats of `emit`, and the sum. `after`: as in
        core.ops.rms_norm."""
        x_TC = x_TC.contiguous()
        tokens, columns = x_TC.shape
        plan = plan_emit(emit)
        target = EncodeTarget.allocate(plan.fused, tokens, columns, x_TC.dtype, x_TC.device)
        plain = empty_rows(tokens, columns, x_TC.dtype, x_TC.device) if plan.plain else None
        summed = torch.empty_like(x_TC)
        block = _waited(target.block(whole_row=True), x_TC)
        words, row = x_TC.nbytes // WORD, columns * x_TC.element_size() // WORD
        fused = {
            "residual_ptr": None if residual_TC is None else _ready(residual_TC),
            **after_arguments(after),
            "weight_ptr": weight_C,
            "plain_ptr": plain,
            "eps": eps,
            "NORM": True,
            "VALUES": block,
            **target.arguments(block),
        }
        in_registers = block * x_TC.element_size() <= self._longest * WORD
        if algorithm == "one_shot" and tokens <= self.mail.boxes and in_registers:
            split = PARTS if tokens * PARTS <= self.mail.boxes else 1
            self._one_shot(x_TC, summed, words, row, split, fused)
        else:
            self._two_shot(x_TC, summed, words, row, fused)
        return collect(emit, plan.rest, plain, target), summed

    def serves_sharded(self, x_TC: torch.Tensor, emit: tuple[ActFormat, ...]) -> bool:
        """Whether `sharded_boundary` serves it. A row must fit into registers and its output into a box. The output
        must be floats: there the word that is never sent means zeros."""
        plan, row = plan_emit(emit), x_TC.shape[-1] * x_TC.element_size()
        floats = plan.fused is None or (plan.fused.dtype or x_TC.dtype).is_floating_point
        in_registers = power_of_2(row) <= self._longest * WORD
        fits = in_registers and row % 16 == 0 and sum(_row_words(plan, x_TC)) <= BOX_WORDS
        return self.mail.gather is not None and self.serves(x_TC) and x_TC.ndim == 2 and fits and floats

    def sharded_boundary(
        self,
        x_TC: torch.Tensor,
        residual_SC: torch.Tensor | None,
        weight_C: torch.Tensor,
        eps: float,
        emit: tuple[ActFormat, ...],
        after: tuple[torch.Tensor, float] | None = None,
    ) -> tuple[Bundle, torch.Tensor]:
        """`boundary` with a residual sharded by rows. Return the whole bundle and this rank's rows of the sum."""
        x_TC = x_TC.contiguous()
        tokens, columns = x_TC.shape
        rows = shard_rows(tokens, self.size)
        plan, mail = plan_emit(emit), self.mail
        target = EncodeTarget.allocate(plan.fused, tokens, columns, x_TC.dtype, x_TC.device, sums=False)
        plain = empty_rows(tokens, columns, x_TC.dtype, x_TC.device) if plan.plain else None
        summed_SC = x_TC.new_empty(rows, columns)
        block = _waited(target.block(whole_row=True), x_TC)
        plain_words, value_words, _ = _row_words(plan, x_TC)
        words = columns * x_TC.element_size() // WORD
        warps, arguments = _warps(words // 256, most=16), target.arguments(block)
        wide = power_of_2(max(value_words, 1))
        sharded[(min(mail.boxes, rows),)](
            _words(x_TC),
            summed_SC,
            None if residual_SC is None else _ready(residual_SC),
            weight_ptr=weight_C,
            plain_ptr=plain,
            **after_arguments(after),
            plain_words_ptr=None if plain is None else _words(plain),
            values_words_ptr=None if target.values is None else _words(target.values),
            **self._one_shot_boxes,
            gather_peers_ptr=mail.gather_peers,
            gather_ptr=mail.gather,
            tokens=tokens,
            shard_rows=rows,
            length=words,
            values_length=value_words,
            values_at=plain_words,
            scale_at=plain_words + value_words,
            eps=eps,
            **arguments,
            PER=WORD // x_TC.element_size(),
            VALUES=block,
            VALUES_WORDS=wide,
            PLAIN_ROWS=self._ranks_per_poll(block * x_TC.element_size() // WORD, warps),
            VALUES_ROWS=self._ranks_per_poll(wide, warps),
            SCALE_ROWS=self._ranks_per_poll(block // arguments["GROUP"], warps),
            num_warps=warps,
            **dependent(x_TC),
        )
        return collect(emit, plan.rest, plain, target), summed_SC

    def _ranks_per_poll(self, words: int, warps: int) -> int:
        """Return how many ranks' rows of `words` words a program polls together: all ranks' or as many as fit into
        registers, but enough for one word per thread (see LEAST_WORDS)."""
        fitting = max(1, MOST_WORDS * 32 * warps // words)
        return max(min(power_of_2(self.size), fitting), 32 * warps // words)

    def argmax(self, value_N: torch.Tensor, index_N: torch.Tensor) -> torch.Tensor:
        """Implement Collective.argmax."""
        rows = len(index_N)
        out_N = torch.empty_like(index_N)
        argmax_over_ranks[(ceil_div(rows, ROWS),)](
            value_N,
            index_N,
            out_N,
            **self._one_shot_boxes,
            rows=rows,
            BLOCK=ROWS,
            num_warps=4,
            **dependent(value_N),
        )
        return out_N

    def _one_shot(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        words: int,
        row: int,
        split: int,
        fused: dict[str, Any] | None = None,
    ) -> None:
        arguments = fused or _alone(row, x)
        # A program holds words of all ranks of a whole block, which is longer than the row if that is no power of two.
        block = arguments["VALUES"] * x.element_size() // WORD
        one_shot[ceil_div(words, row), split](
            _words(x),
            out,
            **arguments,
            **self._one_shot_boxes,
            size=words,
            length=row,
            SPLIT=split,
            PER=WORD // x.element_size(),
            num_warps=_warps(block // 256, most=16),
            maxnreg=ONE_SHOT_REGISTERS,
            **dependent(x),
        )

    def _two_shot(
        self, x: torch.Tensor, out: torch.Tensor, words: int, row: int, fused: dict[str, Any] | None = None
    ) -> None:
        part_length, warps = row // self.size, _warps(row // 512, most=8)
        # With longer rows the registers of an SM hold one program.
        each = TWO_SHOT_PROGRAMS if row <= LARGE_ROW else 1
        two_shot[(min(each * self.mail.boxes, ceil_div(words, row)),)](
            _words(x),
            out,
            **(fused or _alone(row, x)),
            **self._two_shot_boxes,
            size=words,
            length=row,
            part_length=part_length,
            PER=WORD // x.element_size(),
            PART=max(power_of_2(part_length), 32 * warps),
            num_warps=warps,
            maxnreg=min(MOST_REGISTERS, REGISTERS // (each * 32 * warps)),
            **dependent(x),
        )


def _row_words(plan: EmitPlan, x_TC: torch.Tensor) -> tuple[int, int, int]:
    """Return the words of a row that `sharded_boundary` gathers: plain values, encoded values, scales."""
    columns, fmt = x_TC.shape[-1], plan.fused
    plain = columns * x_TC.element_size() // WORD if plan.plain else 0
    if fmt is None:
        return plain, 0, 0
    return plain, columns * (fmt.dtype or x_TC.dtype).itemsize // WORD, scales_of_row(fmt, columns)


def _alone(row: int, x: torch.Tensor) -> dict[str, Any]:
    """Return arguments for a kernel that stores only the sum."""
    block = power_of_2(row) * WORD // x.element_size()
    return {
        "residual_ptr": None,
        **after_arguments(None),
        "weight_ptr": None,
        "plain_ptr": None,
        "eps": 0.0,
        "NORM": False,
        "VALUES": block,
        **EncodeTarget(None, 0).arguments(block),
    }


def after_arguments(after: tuple[torch.Tensor, float] | None) -> dict[str, Any]:
    """Return the arguments of a kernel for a norm before the residual is added: weight and epsilon."""
    weight_C, eps = after or (None, None)
    return {"after_ptr": weight_C, "after_eps": eps}


def _waited(block: int, x: torch.Tensor) -> int:
    """Return the block size in values, with at least LEAST_WORDS words."""
    return max(block, LEAST_WORDS * WORD // x.element_size())


def _warps(wanted: int, most: int) -> int:
    """Clamp to [4, most] and round up to a power of two."""
    return max(4, min(most, power_of_2(wanted)))


def _ready(x: torch.Tensor) -> torch.Tensor:
    """Return `x` contiguous and aligned to 16 bytes, as vector loads need it."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _words(x: torch.Tensor) -> torch.Tensor:
    return _ready(x).view(-1).view(torch.int32)
