"""Train the bundled model, then distil its draft model from it.

    python train.py

Reads what prepare.py wrote and leaves two Hugging Face folders, tiny/ and tiny_draft/, under
--out. Keeps the weights of the epoch with the lowest held-out loss.
"""

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
END_OF_TEXT = 0
ROPE_THETA = 10000.0

SHAPES = {
    "tiny": dict(
        hidden_size=256, intermediate_size=688, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, head_dim=32,
    ),
    "tiny_draft": dict(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    ),
}


@dataclass
class Recipe:
    epochs: int
    learning_rate: float
    dropout: float
    weight_decay: float
    batch: int = 16
    warmup: float = 0.02
    snippets: float = 0.25


# ---------------------------------------------------------------------------- data


class Corpus:
    """The two token streams, on the device, cut into windows."""

    def __init__(self, folder, context, device):
        self.context = context
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        with np.load(folder / "train.npz") as train, np.load(folder / "heldout.npz") as heldout:
            self.train = torch.from_numpy(train["tokens"].astype(np.int32)).to(device)
            self.heldout = torch.from_numpy(heldout["tokens"].astype(np.int32)).to(device)
            self.heldout_bytes = int(heldout["bytes"])
        self.definitions = self.find_definitions()

    def find_definitions(self):
        """Positions of the newline right before each top-level definition or import."""
        words = ("def", "class", "import", "from", "@", "async")
        opening = torch.zeros(self.tokenizer.get_vocab_size(), dtype=torch.bool)
        newline = opening.clone()
        for token, index in self.tokenizer.get_vocab().items():
            opening[index] = token in words
            newline[index] = set(token) == {"Ċ"}
        before, after = self.train[:-1].cpu().long(), self.train[1:].cpu().long()
        return torch.nonzero(newline[before] & opening[after]).squeeze(1).to(self.train.device)

    def batches(self, recipe):
        """One epoch: every token about once, in windows laid out anew each time.

        A share of the windows slides back to the nearest top-level definition and opens with
        the end-of-text token, so that the model learns to continue a prompt out of nowhere.
        """
        device = self.train.device
        shift = int(torch.randint(self.context, ()))
        starts = torch.arange(shift, len(self.train) - self.context - 1, self.context, device=device)
        starts = starts[torch.randperm(len(starts), device=device)]
        nearest = (torch.searchsorted(self.definitions, starts) - 1).clamp(min=0)
        snippet = torch.rand(len(starts), device=device) < recipe.snippets
        starts = torch.where(snippet, self.definitions[nearest], starts)
        offsets = torch.arange(self.context + 1, device=device)
        for i in range(0, len(starts) - recipe.batch + 1, recipe.batch):
            chosen = slice(i, i + recipe.batch)
            windows = self.train[starts[chosen, None] + offsets].long()
            windows[:, 0].masked_fill_(snippet[chosen], END_OF_TEXT)
            yield windows[:, :-1], windows[:, 1:]

    def steps_per_epoch(self, recipe):
        return (len(self.train) - self.context - 1) // self.context // recipe.batch


@torch.no_grad()
def heldout_loss(model, stream, context, batch=16):
    """Nats per token over the whole stream, in windows that do not overlap."""
    total, model_was_training = 0.0, model.training
    model.eval()
    starts = torch.arange(0, len(stream) - 1, context)
    for group in starts.split(batch):
        rows = [stream[i : i + context + 1].long() for i in group.tolist()]
        tails = [rows.pop()] if len(rows[-1]) <= context else []
        for windows in ([torch.stack(rows)] if rows else []) + [tail[None] for tail in tails]:
            logits = model(input_ids=windows[:, :-1]).logits.float()
            targets = windows[:, 1:].flatten()
            total += F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum").item()
    model.train(model_was_training)
    return total / (len(stream) - 1)


# ---------------------------------------------------------------------------- model


def build(name, vocabulary):
    config = LlamaConfig(
        vocab_size=vocabulary,
        max_position_embeddings=2048,
        rope_parameters=dict(rope_type="default", rope_theta=ROPE_THETA),
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT,
        eos_token_id=END_OF_TEXT,
        pad_token_id=None,
        use_cache=False,
        attn_implementation="sdpa",
        **SHAPES[name],
    )
    return LlamaForCausalLM(config)


def add_dropout(model, probability):
    """Llama has no dropout of its own: put some on what each block adds to the residual stream."""

    def drop(module, inputs, output):
        return F.dropout(output, probability, module.training)

    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.down_proj.register_forward_hook(drop)
    model.model.embed_tokens.register_forward_hook(drop)


def optimizers(model, recipe, kind="adamw"):
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    if kind == "muon":
        embedding = model.model.embed_tokens.weight
        hidden = [p for p in matrices if p is not embedding]
        return [
            torch.optim.Muon(hidden, lr=recipe.learning_rate, weight_decay=recipe.weight_decay,
                             adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW([dict(params=[embedding], weight_decay=0.1), dict(params=vectors, weight_decay=0.0)],
                              lr=recipe.learning_rate, betas=(0.9, 0.95), fused=True),
        ]
    return [torch.optim.AdamW(
        [dict(params=matrices, weight_decay=recipe.weight_decay), dict(params=vectors, weight_decay=0.0)],
        lr=recipe.learning_rate, betas=(0.9, 0.95), fused=True,
    )]


def schedule(progress, warmup):
    """Linear warm-up, then a cosine down to zero, as a share of the peak learning rate."""
    if progress < warmup:
        return progress / warmup
    return 0.5 + 0.5 * math.cos(math.pi * (progress - warmup) / (1 - warmup))


def train(name, corpus, recipe, teacher=None, compiled=True, kind="adamw", log=None):
    """Return the best model by held-out loss, and that loss."""
    device = corpus.train.device
    model = build(name, corpus.tokenizer.get_vocab_size()).to(device)
    add_dropout(model, recipe.dropout)
    opts = optimizers(model, recipe, kind)
    forward = torch.compile(model) if compiled else model
    teach = torch.compile(teacher) if teacher is not None and compiled else teacher
    precision = torch.autocast(device.type, dtype=torch.bfloat16)

    def loss_of(inputs, targets):
        logits = forward(input_ids=inputs).logits.float()
        if teacher is None:
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        with torch.no_grad():
            goal = teach(input_ids=inputs).logits.float()
        return F.kl_div(
            logits.log_softmax(-1).flatten(0, 1), goal.log_softmax(-1).flatten(0, 1),
            log_target=True, reduction="batchmean",
        )

    steps = recipe.epochs * corpus.steps_per_epoch(recipe)
    best, best_weights, done, began = math.inf, None, 0, time.time()
    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        bar = progress.add_task(f"training {name}", total=steps, state="compiling")
        for epoch in range(recipe.epochs):
            running = torch.zeros((), device=device)
            for count, (inputs, targets) in enumerate(corpus.batches(recipe), 1):
                scale = schedule(done / steps, recipe.warmup)
                for opt in opts:
                    for group in opt.param_groups:
                        group["lr"] = recipe.learning_rate * scale
                with precision:
                    loss = loss_of(inputs, targets)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                for opt in opts:
                    opt.step()
                    opt.zero_grad()
                running += loss.detach()
                done += 1
                progress.update(bar, completed=done)
            with precision:
                heldout = heldout_loss(model, corpus.heldout, corpus.context)
            state = f"epoch {epoch + 1} train {running.item() / count:.3f} held-out {heldout:.4f}"
            progress.update(bar, state=state)
            if log is not None:
                print(f"{state} {time.time() - began:.0f}s", file=log, flush=True)
            if heldout < best:
                best = heldout
                best_weights = {k: v.detach().clone() for k, v in model.state_dict().items()}
    model.load_state_dict(best_weights)
    return model.eval(), best


# ---------------------------------------------------------------------------- output


def save(model, corpus, folder):
    """Write a Hugging Face folder with bfloat16 weights.

    config.json spells the rotary base and the data type both ways: as transformers 5 reads
    them, and as everything before it did.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    length = config.max_position_embeddings
    names = dict(bos_token_id=END_OF_TEXT, eos_token_id=END_OF_TEXT, pad_token_id=END_OF_TEXT)
    write_json(folder / "config.json", dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        hidden_act="silu",
        attention_bias=False,
        attention_dropout=0.0,
        mlp_bias=False,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=length,
        rope_theta=ROPE_THETA,
        rope_scaling=None,
        rope_parameters=dict(rope_type="default", rope_theta=ROPE_THETA),
        initializer_range=config.initializer_range,
        tie_word_embeddings=True,
        use_cache=True,
        torch_dtype="bfloat16",
        dtype="bfloat16",
        **names,
    ))
    write_json(folder / "generation_config.json", names)
    write_json(folder / "tokenizer_config.json", dict(
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        add_bos_token=True,
        add_eos_token=False,
        clean_up_tokenization_spaces=False,
        model_max_length=length,
        model_input_names=["input_ids", "attention_mask"],
    ))
    corpus.tokenizer.save(str(folder / "tokenizer.json"))
    weights = {
        name: tensor.to(torch.bfloat16).contiguous().cpu()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=HERE / ".data")
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / "plugins/model/bundled")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--epochs", type=int, default=30, help="for the model")
    parser.add_argument("--draft-epochs", type=int, default=30, help="for its draft model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true", help="run without torch.compile")
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    corpus = Corpus(args.data, args.context, device)
    compiled = not args.no_compile

    recipe = Recipe(args.epochs, learning_rate=3e-3, dropout=0.1, weight_decay=0.1)
    tiny, loss = train("tiny", corpus, recipe, compiled=compiled)
    save(tiny, corpus, args.out / "tiny")
    report("tiny", tiny, corpus, loss)

    recipe = Recipe(args.draft_epochs, learning_rate=4e-3, dropout=0.0, weight_decay=0.1)
    draft, loss = train("tiny_draft", corpus, recipe, teacher=tiny, compiled=compiled)
    save(draft, corpus, args.out / "tiny_draft")
    report("tiny_draft", draft, corpus, loss)


def report(name, model, corpus, loss):
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{name}: {count:,} parameters, held-out loss {loss:.4f} nats/token")


if __name__ == "__main__":
    main()
