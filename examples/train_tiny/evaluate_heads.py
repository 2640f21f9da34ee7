"""Measure how many tokens a step brings with each bundled drafter, on held-out text.

    python evaluate_heads.py

Prompts are cut from the held-out text at random; each is continued by a few tokens only, since the
model's greedy text soon repeats itself. Prints a table in Markdown for each temperature: tokens
that a row gets in a step, and the share of drafts accepted at each position among those that
follow accepted ones.
"""

import argparse
from pathlib import Path

import numpy as np
from prepare import prepared
from rich.progress import track

from dovetail import LLM, SamplingParams

HERE = Path(__file__).parent
SHAPES = {"K=4": (4, None), "K=7": (7, None), "16 nodes": (5, 16), "32 nodes": (6, 32)}
"""Name -> (levels of drafts, nodes of a tree; None = a chain)."""
TREES = ("draft_model", "eagle", "eagle3")
DRAFTERS = ("ngram", *TREES, "medusa")
TEMPERATURES = (0.0, 0.7, 1.0)


def runs(drafters):
    """Return (drafter, name of the shape) of each run."""
    for drafter in drafters:
        for shape in SHAPES if drafter in TREES else ("K=4", "K=7") if drafter == "ngram" else ("K=4",):
            yield drafter, shape


def measure(drafter, shape, prompts, tokens, device):
    """Return for each temperature the tokens of a row and step, and the acceptance by position."""
    levels, nodes = SHAPES[shape]
    overrides = [f"spec_decode={drafter}", f"spec_decode.lookahead={levels}", "engine.drafts=always"]
    overrides += ["engine.max_len=512", "engine.max_seqs=16", f"engine.device={device}"]
    if nodes is not None:
        overrides.append(f"spec_decode.tree={nodes}")
    found = {}
    with LLM("tiny", overrides=overrides) as llm:
        for temperature in TEMPERATURES:
            params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True, seed=1)
            before = llm.counters
            reached, accepted = np.array(before.reached_at), np.array(before.accepted_at)
            llm.generate(prompts, params)
            after = llm.counters
            reached, accepted = (
                np.array(now) - (then if len(then) else 0)
                for now, then in ((after.reached_at, reached), (after.accepted_at, accepted))
            )
            found[temperature] = 1 + accepted.sum() / reached[0], (accepted / np.maximum(reached, 1))[:levels]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=prepared, default=str(HERE / ".data"), help="folder that prepare.py wrote")
    parser.add_argument("--only", nargs="+", choices=DRAFTERS, default=DRAFTERS, help="measure these drafters")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32, help="output tokens of each prompt")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    with np.load(args.data / "heldout.npz") as heldout:
        stream = heldout["tokens"].astype(int)
    starts = np.random.default_rng(args.seed).integers(0, len(stream) - args.prompt_tokens, args.prompts)
    prompts = [stream[at : at + args.prompt_tokens].tolist() for at in starts]
    wanted = list(runs(args.only))
    found = {run: measure(*run, prompts, args.tokens, args.device) for run in track(wanted, "drafters")}
    for temperature in TEMPERATURES:
        print(f"\nTemperature {temperature:g}:\n\n| drafter | drafts | tokens a step | accepted by position |")
        print("| --- | --- | --- | --- |")
        for (drafter, shape), by_temperature in found.items():
            mean, shares = by_temperature[temperature]
            print(f"| `{drafter}` | {shape} | {mean:.2f} | {' '.join(f'{share:.2f}' for share in shares)} |")


if __name__ == "__main__":
    main()
