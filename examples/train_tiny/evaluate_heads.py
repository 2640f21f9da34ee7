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
from rich.progress import track

from dovetail import LLM, SamplingParams

HERE = Path(__file__).parent
SHAPES = {
    "K=4": ["spec_decode.lookahead=4"],
    "K=7": ["spec_decode.lookahead=7"],
    "16 nodes": ["spec_decode.lookahead=5", "spec_decode.tree=16"],
    "32 nodes": ["spec_decode.lookahead=6", "spec_decode.tree=32"],
}
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
    fixed = ["engine.drafts=always", "engine.max_len=512", "engine.max_seqs=16", f"engine.device={device}"]
    found = {}
    with LLM("tiny", overrides=[f"spec_decode={drafter}", *SHAPES[shape], *fixed]) as llm:
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
            depth = int(SHAPES[shape][0].rpartition("=")[2])
            found[temperature] = 1 + accepted.sum() / reached[0], (accepted / np.maximum(reached, 1))[:depth]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=HERE / ".data", help="folder that prepare.py wrote")
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
