"""How many routed experts a decode step reads, beside the number that uniform routing selects.

    python benchmarks/distinct_experts.py 1 64 256 -- +preset=h200_fp8_moe_tp1 model.load=dummy engine.max_len=1024
    python benchmarks/distinct_experts.py 1 64 256 -- +preset=h200_fp8_moe_tp1 model.load=dummy model.routing=uniform

Routers with random weights may send all rows to the same experts, whose weights are then read once: a step of theirs is
too fast to compare. The script counts the tokens of each expert and layer in single steps of so many rows. That takes a
further kernel in each layer, so it times nothing. Options after `--` choose the model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from profile_step import GREEDY, decoding

from dovetail.core.compose import compose
from dovetail.core.engine.engine import Engine, start_engine
from dovetail.core.errors import ConfigError, DovetailError
from dovetail.core.expert_load import expert_load
from dovetail.core.layers.experts import Experts


@contextmanager
def counted() -> Iterator[list[torch.Tensor]]:
    """Yield the counters of the routed experts of layers that are built meanwhile: int64 [experts] each."""
    loads: list[torch.Tensor] = []
    build = Experts.__init__

    def init(self: Experts, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        if self.loads_E is None:
            device = next(iter(self.params.values())).device
            self.loads_E = torch.zeros(self.shape.experts, dtype=torch.int64, device=device)
        loads.append(self.loads_E[: len(self.loads_E) - self.always])

    Experts.__init__ = init  # type: ignore[method-assign]
    try:
        yield loads
    finally:
        Experts.__init__ = build  # type: ignore[method-assign]


def loads_of_steps(engine: Engine, loads: list[torch.Tensor], rows: int, context: int, steps: int) -> torch.Tensor:
    """Return the tokens of each expert in single steps, int64 [steps * layers, experts]."""
    found = []
    with decoding(engine, rows, context, GREEDY, steps) as go:
        for _ in range(steps):
            torch._foreach_zero_(loads)
            go(1)
            found.append(torch.stack(loads).cpu())
    return torch.cat(found)


def main(argv: list[str]) -> None:
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=int, nargs="+")
    parser.add_argument("--context", type=int, default=64, help="prompt tokens of each sequence")
    parser.add_argument("--steps", type=int, default=8, help="steps that are counted")
    args = parser.parse_args(argv[:cut])
    # With one step in flight, the counters have that step alone.
    composition = compose([*argv[cut + 1 :], f"engine.max_seqs={max(args.rows)}", "engine.depth=1", "executor=inproc"])
    model = composition.part("model")
    moe = (model.facts() or model.target().spec(model.config)).moe
    if moe is None:
        raise ConfigError(f"model={model.name} has no experts; choose one that has, such as model=qwen3_30b_a3b")
    with counted() as loads:
        engine = start_engine(composition)
    print("rows   distinct experts of a layer: mean, least, most   uniform   tokens of the busiest expert, mean")
    for rows in args.rows:
        found = loads_of_steps(engine, loads, rows, args.context, args.steps)
        distinct = (found > 0).sum(1)
        busiest = found.max(1).values.float().mean()
        mean, least, most = distinct.float().mean(), distinct.min(), distinct.max()
        expected = expert_load(moe, rows, 1).distinct
        print(f"{rows:4}   {mean:31.1f} {least:7} {most:6} {expected:9.1f} {busiest:38.1f}")
    engine.shutdown()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except DovetailError as error:
        print(f"distinct_experts.py: {error}", file=sys.stderr)
        sys.exit(2)
