"""Time of one plan on its way to the ranks, on this machine's CPU. Prints microseconds; asserts nothing.

    python benchmarks/plan_encoding.py 1 64 256 --readers 1 7

A step of decode rows alone, as nearly all are: no sequence comes, leaves or gets a page. Encode, decode and check are
the best of nine; the ring has the time of `send`, and the one from there until the last reader, each a process, has the
bytes. Readers look without pause for a millisecond and then ever less often: the time between two plans counts (--gap).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
import timeit
from array import array
from collections.abc import Callable, Sequence
from contextlib import closing

from dovetail.core.interfaces import Join, Row, RowFlag, StepPlan
from dovetail.core.parallel.encoding import decode_plan, encode_plan
from dovetail.core.parallel.ring import RingReader, RingWriter
from dovetail.core.parallel.slot_ledger import SlotLedger
from dovetail.plugins.executor.config import MultiprocConfig

WARM_UP = 50


def decode_step(rows: int) -> StepPlan:
    flags = int(RowFlag.SAMPLE | RowFlag.DECODE)
    return StepPlan(1, [Row(slot, (70_000 + slot) << 8, 1, 1, 900 + 17 * slot, 0, flags) for slot in range(rows)])


def best_us(call: Callable[[], object], number: int = 2000) -> float:
    return min(timeit.repeat(call, number=number, repeat=9)) / number * 1e6


def through_ring(data: bytes, readers: int, plans: int, gap: float) -> tuple[list[float], list[float]]:
    """Of each plan, seconds: `send` itself, and until every reader has it."""
    began, returned = array("d"), array("d")
    with closing(RingWriter(readers, MultiprocConfig().plan_bytes)) as ring:
        command = [sys.executable, __file__, "--receive", str(ring.fd), str(plans + WARM_UP), "--readers"]
        processes = [
            subprocess.Popen([*command, str(reader)], stdout=subprocess.PIPE, pass_fds=[ring.fd])
            for reader in range(readers)
        ]
        pipes = [process.stdout for process in processes if process.stdout is not None]
        try:
            if not all(pipe.readline() for pipe in pipes):
                raise SystemExit("a reader did not start: see above")
            for _ in range(plans + WARM_UP):
                time.sleep(gap)
                began.append(time.perf_counter())
                ring.send(data)
                returned.append(time.perf_counter())
            # One clock for all processes: Linux's CLOCK_MONOTONIC.
            arrived = [array("d", pipe.read()) for pipe in pipes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
            for pipe in pipes:
                pipe.close()
    sent = [end - start for start, end in zip(began, returned, strict=True)]
    taken = [max(ends) - start for start, *ends in zip(began, *arrived, strict=True)]
    return sent[WARM_UP:], taken[WARM_UP:]


def receive(fd: int, reader: int, plans: int) -> None:
    """A reader's process: says that it is there, and at the end when each plan was."""
    arrived = array("d")
    with closing(RingReader(fd, reader)) as ring:
        print(flush=True)
        for _ in range(plans):
            data = ring.recv()
            arrived.append(time.perf_counter())
    decode_plan(data)
    sys.stdout.buffer.write(arrived.tobytes())


def shown(seconds: Sequence[float]) -> str:
    """Median and p99."""
    return f"{statistics.median(seconds) * 1e6:.1f} ({statistics.quantiles(seconds, n=100)[-1] * 1e6:.1f})"


def measure(rows: int, readers: Sequence[int], plans: int, gaps: Sequence[float]) -> None:
    plan = decode_step(rows)
    data = encode_plan(plan)
    assert decode_plan(data) == (plan, 0)
    mirror = SlotLedger()
    mirror.apply(StepPlan(0, [], joins=[Join(row.slot, row.uid, row.epoch, 0) for row in plan.rows]))
    print(f"{rows} decode rows, {len(data)} bytes, us; of the ring median (p99)")
    print(f"  encode  {best_us(lambda: encode_plan(plan)):7.1f}")
    print(f"  decode  {best_us(lambda: decode_plan(data)):7.1f}")
    print(f"  check   {best_us(lambda: mirror._check_rows(plan)):7.1f}")
    for count in readers:
        for gap in gaps:
            sent, taken = through_ring(data, count, plans, gap / 1e3)
            print(f"  ring, readers: {count}, {gap:g} ms between plans: send {shown(sent)}, received {shown(taken)}")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=int, nargs="*", default=[256])
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 7], help="ranks beside the sender")
    parser.add_argument("--plans", type=int, default=1000, help="through the ring, for each line")
    parser.add_argument("--gap", type=float, nargs="+", default=[0.5, 5.0], help="ms between two plans")
    parser.add_argument("--receive", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.receive is not None:
        fd, plans = args.receive
        receive(fd, args.readers[0], plans)
        return
    for rows in args.rows:
        measure(rows, args.readers, args.plans, args.gap)


if __name__ == "__main__":
    main(sys.argv[1:])
