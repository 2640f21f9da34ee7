"""Time of one plan on its way to the ranks, on this machine's CPU. Prints microseconds; asserts nothing.

python benchmarks/plan_encoding.py [rows]
"""

from __future__ import annotations

import sys
import timeit
from collections.abc import Callable

from dovetail.core.engine.encoding import decode_plan, encode_plan
from dovetail.core.engine.mirror import PlanMirror
from dovetail.core.interfaces import Join, Row, RowFlag, StepPlan


def decode_step(rows: int) -> StepPlan:
    flags = int(RowFlag.SAMPLE | RowFlag.DECODE)
    return StepPlan(1, [Row(slot, (70_000 + slot) << 8, 1, 1, 900 + 17 * slot, 0, flags) for slot in range(rows)])


def best_us(call: Callable[[], object], number: int = 2000) -> float:
    return min(timeit.repeat(call, number=number, repeat=9)) / number * 1e6


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    plan = decode_step(rows)
    data = encode_plan(plan)
    assert decode_plan(data) == (plan, 0)
    mirror = PlanMirror()
    mirror.apply(StepPlan(0, [], joins=[Join(row.slot, row.uid, row.epoch, 0) for row in plan.rows]))
    print(f"{rows} decode rows, {len(data)} bytes, best of 9 x 2000 calls")
    print(f"  encode  {best_us(lambda: encode_plan(plan)):7.1f} us")
    print(f"  decode  {best_us(lambda: decode_plan(data)):7.1f} us")
    print(f"  mirror  {best_us(lambda: mirror._check_rows(plan)):7.1f} us")


if __name__ == "__main__":
    main()
