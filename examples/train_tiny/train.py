"""Train the bundled model, then distil its draft model from it.

    python train.py

Reads the output of prepare.py and writes two Hugging Face folders, tiny/ and tiny_draft/, under
--out. Keeps the weights of the epoch with the lowest held-out loss.
"""

import argparse
import json
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from prepare import prepared
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
END_OF_TEXT = 0
ROPE_THETA = 10000.0

SHAPES = {
    "tiny": dict(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
    ),
    "tiny_draft": dict(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    ),
}


@dataclass
class Recipe:
    epochs: int
    learning_rate: float
    dropout: float
    weight_decay: float
    embedding_rate: float = 5e-3
    batch: int = 16
    warmup: float = 0.02
    snippets: float = 0.25


class Corpus:
    """Training and held-out token streams on the device, split into windows."""

    def __init__(self, folder, context, device):
        self.context = context
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        with np.load(folder / "train.npz") as train, np.load(folder / "heldout.npz") as heldout:
            self.train = torch.from_numpy(train["tokens"].astype(np.int32)).to(device)
            self.heldout = torch.from_numpy(heldout["tokens"].astype(np.int32)).to(device)
        self.definitions = self.find_definitions()

    def find_definitions(self):
        """Return the positions of the newline before each top-level definition or import."""
        words = ("def", "class", "import", "from", "@", "async")
        opening = torch.zeros(self.tokenizer.get_vocab_size(), dtype=torch.bool)
        newline = opening.clone()
        for token, index in self.tokenizer.get_vocab().items():
            opening[index] = token in words
            newline[index] = set(token) == {"Ċ"}
        before, after = self.train[:-1].cpu().long(), self.train[1:].cpu().long()
        return torch.nonzero(newline[before] & opening[after]).squeeze(1).to(self.train.device)

    def batches(self, recipe):
        """Yield the batches of an epoch: every token about once, in windows with a random offset.

        A share of the windows starts at the preceding top-level definition with the end-of-text
        token, so that the model learns to continue a prompt without context.
        """
        device = self.train.device
        shift = int(torch.randint(self.context, ()))
        end = len(self.train) - self.context - 1
        starts = torch.arange(shift, end, self.context, device=device)
        starts = starts[torch.randperm(len(starts), device=device)]
        nearest = (torch.searchsorted(self.definitions, starts) - 1).clamp(min=0)
        snippet = torch.rand(len(starts), device=device) < recipe.snippets
        starts = torch.where(snippet, self.definitions[nearest], starts)
        offsets = torch.arange(self.context + 1, device=device)
        for step in range(self.steps_per_epoch(recipe)):
            chosen = slice(step * recipe.batch, (step + 1) * recipe.batch)
            windows = self.train[starts[chosen, None] + offsets].long()
            windows[:, 0].masked_fill_(snippet[chosen], END_OF_TEXT)
            yield windows[:, :-1], windows[:, 1:]

    def steps_per_epoch(self, recipe):
        return (len(self.train) - self.context - 1) // self.context // recipe.batch


@torch.no_grad()
def heldout_loss(model, stream, context, batch=16, watch=iter):
    """Return nats per token over the whole stream, predicted window by window. `watch` iterates over the batches."""
    training = model.training
    model.eval()
    whole = (len(stream) - 1) // context * context
    batches = [*stream.unfold(0, context + 1, context).split(batch), stream[None, whole:]]
    total = 0.0
    for windows in watch(batches):
        logits = model(input_ids=windows[:, :-1].long()).logits.float().flatten(0, 1)
        total += F.cross_entropy(logits, windows[:, 1:].flatten().long(), reduction="sum").item()
    model.train(training)
    return total / (len(stream) - 1)


def causal_attention(module, query, key, value, mask, scaling=None, **_):
    """Compute causal attention without a mask tensor, so that fused kernels can be used."""
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register("causal", causal_attention)


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
        attn_implementation="causal",
        **SHAPES[name],
    )
    return LlamaForCausalLM(config)


def add_dropout(model, probability):
    """Add dropout, which Llama lacks, to the embedding and to each block's residual branches."""

    def drop(module, inputs, output):
        return F.dropout(output, probability, module.training)

    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.down_proj.register_forward_hook(drop)
    model.model.embed_tokens.register_forward_hook(drop)


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates (Jordan et al., 2024), one batch per matrix shape."""

    def __init__(self, matrices, lr, weight_decay, momentum=0.95):
        by_shape = defaultdict(list)
        for matrix in matrices:
            by_shape[matrix.shape].append(matrix)
        groups = [dict(params=group) for group in by_shape.values()]
        super().__init__(groups, dict(lr=lr, weight_decay=weight_decay, momentum=momentum))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            matrices, momentum = group["params"], group["momentum"]
            gradients = torch.stack([matrix.grad for matrix in matrices])
            trace = group.setdefault("trace", torch.zeros_like(gradients))
            trace.lerp_(gradients, 1 - momentum)
            updates = orthogonalised(gradients.lerp(trace, momentum))
            # Scale each update to the size of Adam's, so that both can share a learning rate.
            size = 0.2 * math.sqrt(max(updates.shape[-2:]))
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(matrices, list(updates.unbind()), alpha=-group["lr"] * size)


def orthogonalised(batch):
    """Move every singular value towards 1 by five Newton-Schulz steps."""
    tall = batch.shape[-2] > batch.shape[-1]
    x = batch.mT if tall else batch
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return (x.mT if tall else x).to(batch.dtype)


def optimizers(model, recipe):
    """Return Muon for the matrices in the blocks and AdamW for the embedding and the norms."""
    embedding = model.model.embed_tokens.weight
    blocks = [p for p in model.parameters() if p.ndim == 2 and p is not embedding]
    norms = [p for p in model.parameters() if p.ndim == 1]
    return [
        Muon(blocks, lr=recipe.learning_rate, weight_decay=recipe.weight_decay),
        torch.optim.AdamW(
            [dict(params=[embedding], weight_decay=0.1), dict(params=norms, weight_decay=0.0)],
            lr=recipe.embedding_rate,
            betas=(0.9, 0.95),
            fused=True,
        ),
    ]


def schedule(progress, warmup):
    """Return the share of the peak learning rate: linear warm-up, then a cosine to zero."""
    if progress < warmup:
        return progress / warmup
    return 0.5 + 0.5 * math.cos(math.pi * (progress - warmup) / (1 - warmup))


def train(name, corpus, recipe, teacher=None, compiled=True):
    """Return the model with the lowest held-out loss, and that loss.

    With a teacher, the training loss is the KL divergence from its predictions.
    """
    device = corpus.train.device
    model = build(name, corpus.tokenizer.get_vocab_size()).to(device)
    add_dropout(model, recipe.dropout)
    epoch_steps = corpus.steps_per_epoch(recipe)
    steps = recipe.epochs * epoch_steps
    optims = optimizers(model, recipe)
    rates = [LambdaLR(o, lambda step: schedule(step / steps, recipe.warmup)) for o in optims]
    precision = torch.autocast(device.type, dtype=torch.bfloat16)

    def loss_of(inputs, targets):
        logits = model(input_ids=inputs).logits.float().flatten(0, 1)
        if teacher is None:
            return F.cross_entropy(logits, targets.flatten())
        with torch.no_grad():
            goal = teacher(input_ids=inputs).logits.float().flatten(0, 1)
        return F.kl_div(logits.log_softmax(-1), goal.log_softmax(-1), log_target=True, reduction="batchmean")

    if compiled:
        loss_of = torch.compile(loss_of)

    best, best_weights = math.inf, None
    columns = (
        TextColumn("{task.description}"),
        BarColumn(30),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        bar = progress.add_task(name, total=steps, state="compiling")
        for epoch in range(recipe.epochs):
            running = torch.zeros((), device=device)
            for inputs, targets in corpus.batches(recipe):
                with precision:
                    loss = loss_of(inputs, targets)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                for optim, rate in zip(optims, rates, strict=True):
                    optim.step()
                    rate.step()
                    optim.zero_grad()
                running += loss.detach()
                progress.advance(bar)
            with precision:
                heldout = heldout_loss(model, corpus.heldout, corpus.context)
            state = f"epoch {epoch + 1} train {running.item() / epoch_steps:.3f} held-out {heldout:.4f}"
            progress.update(bar, state=state)
            if heldout < best:
                best = heldout
                best_weights = {k: v.detach().clone() for k, v in model.state_dict().items()}
    model.load_state_dict(best_weights)
    return model.eval(), best


def save(model, corpus, folder):
    """Write a Hugging Face folder with bfloat16 weights.

    config.json has the rotary base and the dtype twice: under the names of transformers 5 and
    under the older ones.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    length = config.max_position_embeddings
    names = dict(bos_token_id=END_OF_TEXT, eos_token_id=END_OF_TEXT, pad_token_id=END_OF_TEXT)
    write_json(
        folder / "config.json",
        dict(
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
        ),
    )
    save_tokenizer(corpus, folder, length)
    weights = {
        name: tensor.to(torch.bfloat16).contiguous().cpu()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def save_tokenizer(corpus, folder, length):
    """Write the tokenizer's files, for a context of `length` tokens."""
    names = dict(bos_token_id=END_OF_TEXT, eos_token_id=END_OF_TEXT, pad_token_id=END_OF_TEXT)
    write_json(folder / "generation_config.json", names)
    write_json(
        folder / "tokenizer_config.json",
        dict(
            tokenizer_class="PreTrainedTokenizerFast",
            bos_token="<|endoftext|>",
            eos_token="<|endoftext|>",
            pad_token="<|endoftext|>",
            add_bos_token=True,
            add_eos_token=False,
            clean_up_tokenization_spaces=False,
            model_max_length=length,
            model_input_names=["input_ids", "attention_mask"],
        ),
    )
    corpus.tokenizer.save(str(folder / "tokenizer.json"))


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=prepared, default=str(HERE / ".data"))
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / "plugins/model/bundled")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--epochs", type=int, default=22, help="for the model")
    parser.add_argument("--draft-epochs", type=int, default=24, help="for its draft model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true", help="run without torch.compile")
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    corpus = Corpus(args.data, args.context, device)
    compiled = not args.no_compile

    torch.manual_seed(args.seed)
    recipe = Recipe(args.epochs, learning_rate=8e-3, dropout=0.1, weight_decay=0.3)
    tiny, loss = train("tiny", corpus, recipe, compiled=compiled)
    save(tiny, corpus, args.out / "tiny")
    report("tiny", tiny, loss)

    # Distil from the saved bfloat16 weights, which the draft model will be used with.
    teacher = (
        LlamaForCausalLM.from_pretrained(
            args.out / "tiny", dtype=torch.float32, attn_implementation="causal", use_cache=False
        )
        .to(device)
        .eval()
    )
    torch.manual_seed(args.seed)
    recipe = Recipe(args.draft_epochs, learning_rate=8e-3, dropout=0.0, weight_decay=0.1)
    draft, loss = train("tiny_draft", corpus, recipe, teacher=teacher, compiled=compiled)
    save(draft, corpus, args.out / "tiny_draft")
    report("tiny_draft", draft, loss)


def report(name, model, loss):
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{name}: {count:,} parameters, held-out loss {loss:.4f} nats/token")


if __name__ == "__main__":
    main()
