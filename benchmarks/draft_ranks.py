"""How often drafts of each rank among their siblings are accepted, and the file from which trees of a fixed shape are
chosen (spec_decode.tree_shape).

    python benchmarks/draft_ranks.py --text README.md --out ranks.json -- spec_decode=draft_model spec_decode.tree=48 \
        spec_decode.lookahead=5

Generates behind prompts that are cut from the text, and counts which sibling is accepted behind each accepted draft of
a fixed tree, by level. Overrides after `--` choose model, drafter and GPU; the tree must have a fixed shape and bounds
what is counted: the wider it is, the more ranks are measured. Levels with few counts are left out: the last one in the
file serves deeper ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dovetail import LLM, SamplingParams
from dovetail.core.compose import Composition, compose
from dovetail.core.errors import ConfigError, DovetailError
from dovetail.core.interfaces import AcceptedPath
from dovetail.plugins.spec_decode.shape import Shape, best_shape, read_ranks, write_ranks

LEAST = 50
"""Least parents of a level that are counted."""


class RankCounts:
    """Counts of parents and of accepted children by level and rank, on the device, so that graphs count too. R rows, D
    longest path, n most siblings."""

    def __init__(self, shape: Shape, slots: int) -> None:
        self._shape, self._slots = shape, slots
        self._levels, self._siblings = max(shape.levels), 1 + max(shape.ranks)
        self._on_device: tuple[torch.Tensor, ...] = ()

    def _start(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return (parents with so many children, accepted children), [D, n]; children of each node and rank of each
        node, [1 + K], where node 0 is the root."""
        shape = self._shape
        children = [shape.parents.count(node) for node in range(-1, len(shape.parents))]
        counts = torch.zeros(2, self._levels, self._siblings, dtype=torch.int64, device=device)
        nodes = (torch.tensor(values, device=device) for values in (children, [0, *shape.ranks]))
        return *counts.unbind(0), *nodes

    def count(self, path: AcceptedPath) -> None:
        if not self._on_device:
            self._on_device = self._start(path.slots_R.device)
        reached_Dn, accepted_Dn, children_W, rank_W = self._on_device
        real_R, rank_n = path.slots_R < self._slots, torch.arange(self._siblings, device=path.slots_R.device)
        for level in range(self._levels):
            at_R = path.index_RD[:, level].clamp(0, len(children_W) - 1)
            next_R = path.index_RD[:, level + 1].clamp(0, len(children_W) - 1)
            visited_R1 = (real_R & (path.accepted_R >= level))[:, None]
            reached_Dn[level] += (visited_R1 & (rank_n < children_W[at_R, None])).sum(0)
            found_R1 = (real_R & (path.accepted_R > level))[:, None]
            accepted_Dn[level] += (found_R1 & (rank_n == rank_W[next_R, None])).sum(0)

    def clear(self) -> None:
        """Forget the steps that warmed up."""
        for counts_Dn in self._on_device[:2]:
            counts_Dn.zero_()

    def ranks(self) -> tuple[list[list[float]], int]:
        """Return the share of parents whose child of each rank was accepted, by level, and the parents of level 1."""
        if not self._on_device:
            return [], 0
        reached_Dn, accepted_Dn = (counts_Dn.tolist() for counts_Dn in self._on_device[:2])
        found = []
        for parents_n, accepted_n in zip(reached_Dn, accepted_Dn, strict=True):
            measured = [n for n in range(self._siblings) if parents_n[n] >= LEAST]
            if not measured:
                break
            found.append([accepted_n[n] / parents_n[n] for n in measured])
        return found, reached_Dn[0][0]


@contextmanager
def counted(drafter_class: Any, counts: RankCounts) -> Iterator[None]:
    """Count the accepted paths of all drafters of this class."""
    keep: Callable[[Any, AcceptedPath], None] = drafter_class.keep

    def keep_and_count(self: Any, path: AcceptedPath) -> None:
        counts.count(path)
        keep(self, path)

    drafter_class.keep = keep_and_count
    try:
        yield
    finally:
        drafter_class.keep = keep


def shape_of(composition: Composition) -> Shape:
    """Return the shape of the drafter's tree. Raises ConfigError if it has none."""
    part = composition.part("spec_decode")
    shape: Shape | None = getattr(part.config, "shape", None)
    if shape is None:
        raise ConfigError(
            f"spec_decode={part.name} drafts no trees of a fixed shape: set spec_decode.tree=48 "
            "spec_decode.tree_shape=sequoia"
        )
    return shape


def cut(tokens: list[int], prompts: int, length: int) -> list[list[int]]:
    """Return prompts at equal distances in a text."""
    if len(tokens) < length + prompts:
        raise ConfigError(
            f"the text has {len(tokens)} tokens, and {prompts} prompts of {length} need more: give another"
        )
    step = (len(tokens) - length) // prompts
    return [tokens[step * i : step * i + length] for i in range(prompts)]


def measure(composition: Composition, args: argparse.Namespace) -> tuple[list[list[float]], int]:
    """Generate, and return the ranks."""
    counts = RankCounts(shape_of(composition), composition.engine.max_seqs)
    with counted(composition.part("spec_decode").target(), counts), LLM(composition=composition) as llm:
        counts.clear()
        tokens = list(llm.tokenizer.encode(args.text.read_text(encoding="utf-8")))
        params = SamplingParams(temperature=args.temperature, seed=1, max_tokens=args.tokens, ignore_eos=True)
        llm.generate(cut(tokens, args.prompts, args.prompt_tokens), params)
        return counts.ranks()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, required=True, help="text from which prompts are cut")
    parser.add_argument("--out", type=Path, required=True, help="file of ranks to write")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="tokens to generate behind each prompt")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("words", nargs="*", help="overrides, after --")
    args = parser.parse_args(argv)
    fixed = ["engine.drafts=always", "spec_decode.tree_shape=sequoia", "executor=inproc"]
    given = {word.partition("=")[0] for word in args.words}
    try:
        composition = compose([*(word for word in fixed if word.partition("=")[0] not in given), *args.words])
        ranks, parents = measure(composition, args)
        if not ranks:
            raise ConfigError(f"under {LEAST} steps verified trees: generate more (--prompts, --tokens)")
        write_ranks(args.out, ranks, " ".join(args.words), parents)
        for level, shares in enumerate(ranks, 1):
            print(f"level {level}:", *(f"{share:.3f}" for share in shares))
        for drafts in (16, 32, 64):
            shape = best_shape(read_ranks(str(args.out)), drafts, composition.part("spec_decode").config.lookahead)
            expected = f"{1 + sum(shape.expected):.2f} tokens per step"
            print(f"best tree of {len(shape.parents)} drafts: {max(shape.levels)} levels, {expected} expected")
    except (DovetailError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
