"""Evaluate the saved models: held-out loss, draft agreement, completions.

    python evaluate.py

Uses the saved bfloat16 weights with float32 arithmetic.
"""

import argparse
import math
from functools import partial
from pathlib import Path

import numpy as np
import torch
from prepare import prepared
from rich.progress import track
from train import HERE, heldout_loss
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = (
    "def fib(n):",
    "import os\n\nclass Path",
    "def read_json(path):",
    "class Stack:\n    def __init__(self):\n",
    "def main():\n    parser = argparse.ArgumentParser(",
)
SAMPLING = dict(do_sample=True, temperature=0.7, top_p=0.9)


def load(folder, device):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()


@torch.no_grad()
def greedy_agreement(target, draft, stream, context):
    """Return the share of positions at which both models choose the same next token."""
    agreed = total = 0
    for start in range(0, len(stream) - context, context):
        window = stream[None, start : start + context].long()
        picks = [model(input_ids=window).logits.argmax(-1) for model in (target, draft)]
        agreed += (picks[0] == picks[1]).sum().item()
        total += context
    return agreed / total


def complete(model, tokenizer, prompt, **options):
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    ids = model.generate(**inputs, max_new_tokens=96, **options)[0]
    return tokenizer.decode(ids, skip_special_tokens=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=prepared, default=str(HERE / ".data"))
    parser.add_argument("--models", type=Path, default=HERE.parents[1] / "plugins/model/bundled")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--tokens", type=int, help="measure on only this many held-out tokens")
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with np.load(args.data / "heldout.npz") as heldout:
        stream = torch.from_numpy(heldout["tokens"].astype(np.int32)).to(device)
        bytes_per_token = int(heldout["bytes"]) / (len(stream) - 1)
    stream = stream[: args.tokens]

    models = {name: load(args.models / name, device) for name in ("tiny", "tiny_draft")}
    for name, model in models.items():
        loss = heldout_loss(model, stream, args.context, batch=4, watch=partial(track, description=name))
        count = sum(parameter.numel() for parameter in model.parameters())
        size = (args.models / name / "model.safetensors").stat().st_size
        print(
            f"{name:10} {count:9,} parameters {size:10,} bytes   held-out {loss:.4f} nats/token"
            f"  {loss / math.log(2) / bytes_per_token:.4f} bits/byte"
        )
    agreement = greedy_agreement(*models.values(), stream, args.context)
    print(f"draft and model choose the same next token at {agreement:.1%} of held-out positions\n")

    tokenizer = AutoTokenizer.from_pretrained(args.models / "tiny")
    for prompt in PROMPTS:
        torch.manual_seed(0)
        print("-" * 30, "greedy")
        print(complete(models["tiny"], tokenizer, prompt, do_sample=False))
        print("-" * 30, "temperature 0.7, top-p 0.9")
        print(complete(models["tiny"], tokenizer, prompt, **SAMPLING))


if __name__ == "__main__":
    main()
