"""Train drafters that follow the bundled model's hidden states: Medusa, EAGLE and EAGLE-3.

    python train_heads.py

Reads the output of prepare.py and the trained model, and writes one folder for each drafter under
--out, in the layout that its authors publish.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import track
from safetensors.torch import save_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from train import HERE, ROPE_THETA, SHAPES, Corpus, Recipe, schedule, write_json
from transformers import LlamaForCausalLM

TINY = SHAPES["tiny"]
HIDDEN, HEADS, KV_HEADS, HEAD = (
    TINY[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
)
TAPS = (2, 4, 5)
"""Layers whose outputs EAGLE-3 fuses; they count the embedding as 0."""
DECAY = 0.8
"""Weight of the loss of each draft, relative to the one before it."""


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x):
        return F.rms_norm(x, (HIDDEN,), self.weight, 1e-5)


class Attention(nn.Module):
    """Causal attention whose first pass has every slot, and whose later passes add one key per slot.

    In pass j slot p stands for the j-th draft after slot p - j: it sees the keys of the first pass
    up to there, and in between those of the passes that made the drafts.
    """

    def __init__(self, width):
        super().__init__()
        self.q_proj = nn.Linear(width, HEADS * HEAD, bias=False)
        self.k_proj = nn.Linear(width, KV_HEADS * HEAD, bias=False)
        self.v_proj = nn.Linear(width, KV_HEADS * HEAD, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD, HIDDEN, bias=False)

    def forward(self, x, past):
        q, k, v = (
            module(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for module in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (rotated(k), v))
        q = rotated(q) * HEAD**-0.5
        past.append((k, v))
        turn, length = len(past) - 1, x.shape[1]
        slots = torch.arange(length, device=x.device)
        later = slots[None, :] > slots[:, None] - turn
        scores = [(q @ past[0][0].mT).masked_fill(later, float("-inf"))]
        # Slots before the turn wrap around; the loss leaves them out.
        drafted = [tuple(part.roll(turn - i, 2) for part in past[i]) for i in range(1, turn + 1)]
        scores += [(q * key).sum(-1, keepdim=True) for key, _ in drafted]
        shares = torch.cat(scores, -1).softmax(-1)
        out = shares[..., :length] @ past[0][1]
        for i, (_, value) in enumerate(drafted):
            out = out + shares[..., length + i, None] * value
        return self.o_proj(out.transpose(1, 2).flatten(2))


def rotated(x):
    half = HEAD // 2
    frequencies = ROPE_THETA ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[2], device=x.device)[:, None] * frequencies
    first, second = x.split(half, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        inner = TINY["intermediate_size"]
        self.gate_proj = nn.Linear(HIDDEN, inner, bias=False)
        self.up_proj = nn.Linear(HIDDEN, inner, bias=False)
        self.down_proj = nn.Linear(inner, HIDDEN, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, width=HIDDEN):
        super().__init__()
        self.self_attn, self.mlp = Attention(width), MLP()
        self.post_attention_layernorm = Norm()

    def forward(self, x, residual, past):
        residual = residual + self.self_attn(x, past)
        return residual + self.mlp(self.post_attention_layernorm(residual))


class Eagle(nn.Module):
    """Predicts the state after the model's last norm from a token and the state before it."""

    name, taps = "eagle", ()

    def __init__(self, embedding, ids):
        super().__init__()
        self.embedding = [embedding]  # In a list: it is no parameter of the head.
        self.ids = [None]
        self.fc = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.layers = nn.ModuleList([Layer()])

    def fuse(self, features):
        return features

    def forward(self, embeds, features, past):
        pair = self.fc(torch.cat((embeds, features), -1))
        predicted = self.layers[0](pair, pair, past)
        return predicted, predicted @ self.embedding[0].T

    def tensors(self):
        return self.state_dict()


class Eagle3(nn.Module):
    """Predicts logits over the most frequent tokens, from fused states of three layers."""

    name, taps = "eagle3", TAPS

    def __init__(self, embedding, ids):
        super().__init__()
        self.ids, self.vocab = [ids], len(embedding)
        self.fc = nn.Linear(len(TAPS) * HIDDEN, HIDDEN, bias=False)
        self.midlayer = Layer(2 * HIDDEN)
        self.midlayer.hidden_norm, self.midlayer.input_layernorm = Norm(), Norm()
        self.norm = Norm()
        self.lm_head = nn.Linear(HIDDEN, len(ids), bias=False)
        self.lm_head.weight.data.copy_(embedding[ids])

    def fuse(self, features):
        return self.fc(features)

    def forward(self, embeds, features, past):
        layer = self.midlayer
        pair = torch.cat((layer.input_layernorm(embeds), layer.hidden_norm(features)), -1)
        predicted = layer(pair, features, past)
        return predicted, self.lm_head(self.norm(predicted))

    def tensors(self):
        ids = self.ids[0].cpu()
        drafted = torch.zeros(self.vocab, dtype=torch.bool)
        drafted[ids] = True
        return self.state_dict() | {"d2t": ids - torch.arange(len(ids)), "t2d": drafted}


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x):
        return x + F.silu(self.linear(x))


class Medusa(nn.ModuleList):
    """One residual block for each draft; the model's own logits."""

    name = "medusa"

    def __init__(self, embedding, drafts):
        super().__init__(nn.ModuleList([Residual()]) for _ in range(drafts))
        self.embedding = [embedding]

    def tensors(self):
        return self.state_dict()


def divergence(logits, goal):
    """Return the KL divergence from the model's predictions, nats per position."""
    return F.kl_div(logits.log_softmax(-1), goal.log_softmax(-1), log_target=True, reduction="none").sum(-1)


def follow(head, model, ids, drafts):
    """Yield (logits, the model's logits, both [B, positions, V]) of each draft.

    The head is trained on what it sees when it drafts (training-time test of EAGLE-3): in later
    passes the features are those that it predicted itself.
    """
    with torch.no_grad():
        seen = model(input_ids=ids, output_hidden_states=True)
    states = seen.hidden_states
    if isinstance(head, Medusa):
        for ahead, blocks in enumerate(head, start=1):
            yield blocks[0](states[-1])[:, :-ahead] @ head.embedding[0].T, seen.logits[:, ahead:]
        return
    features = head.fuse(before(torch.cat([states[tap] for tap in head.taps or (-1,)], -1)))
    goal = seen.logits if head.ids[0] is None else seen.logits[..., head.ids[0]]
    past = []
    for draft in range(drafts):
        predicted, logits = head(states[0], features, past)
        yield logits[:, draft:], goal[:, draft:]
        features = before(predicted)


def before(features):
    """Return the feature of the position before each; zeros before the first."""
    return F.pad(features, (0, 0, 1, 0))[:, :-1]


def train(head, model, corpus, recipe, drafts, most_steps):
    steps = min(recipe.epochs * corpus.steps_per_epoch(recipe), most_steps)
    optim = torch.optim.AdamW(head.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    rate = LambdaLR(optim, lambda step: schedule(step / steps, recipe.warmup))
    batches = (ids for _ in range(recipe.epochs) for ids, _ in corpus.batches(recipe))
    for _, ids in zip(track(range(steps), head.name), batches, strict=False):
        losses = [divergence(*pair).mean() for pair in follow(head, model, ids, drafts)]
        loss = sum(DECAY**draft * loss for draft, loss in enumerate(losses))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optim.step()
        rate.step()
        optim.zero_grad()


@torch.no_grad()
def agreement(head, model, corpus, drafts, windows=64):
    """Return for each draft how often its most likely token is the model's, on held-out text."""
    ids = corpus.heldout[: windows * corpus.context].view(windows, corpus.context).long()
    right = torch.zeros(drafts)
    for batch in ids.split(8):
        for draft, (logits, goal) in enumerate(follow(head, model, batch, drafts)):
            right[draft] += (logits.argmax(-1) == goal.argmax(-1)).float().mean().cpu() * len(batch) / windows
    return right.tolist()


def save(head, folder, drafts):
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(medusa_num_heads=drafts, medusa_num_layers=1, hidden_size=HIDDEN, vocab_size=4096)
    if not isinstance(head, Medusa):
        config = dict(
            architectures=["LlamaForCausalLM"],
            vocab_size=4096,
            max_position_embeddings=2048,
            rms_norm_eps=1e-5,
            rope_theta=ROPE_THETA,
            hidden_act="silu",
            torch_dtype="bfloat16",
            **TINY | dict(num_hidden_layers=1),
        )
        if head.taps:
            config |= dict(draft_vocab_size=len(head.ids[0]), eagle_aux_hidden_state_layer_ids=list(TAPS))
    write_json(folder / "config.json", config)
    weights = {
        name: (tensor.bfloat16() if tensor.is_floating_point() else tensor).contiguous().cpu()
        for name, tensor in head.tensors().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=HERE / ".data")
    parser.add_argument("--model", type=Path, default=HERE.parents[1] / "plugins/model/bundled/tiny")
    parser.add_argument("--out", type=Path, default=HERE / ".heads")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16, help="windows in a step")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=1 << 30, help="stop after so many steps")
    parser.add_argument("--drafts", type=int, default=5, help="drafts that each drafter is trained for")
    parser.add_argument("--draft-vocab", type=int, default=2048, help="tokens that EAGLE-3 drafts")
    parser.add_argument("--only", choices=("medusa", "eagle", "eagle3"), help="train one drafter")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    corpus = Corpus(args.data, args.context, device)
    model = LlamaForCausalLM.from_pretrained(args.model, dtype=torch.float32, use_cache=False).to(device).eval()
    model.requires_grad_(False)
    embedding = model.model.embed_tokens.weight
    frequent = corpus.train.bincount(minlength=len(embedding)).argsort(descending=True)
    ids = frequent[: args.draft_vocab].sort().values
    for name, make in (
        ("medusa", lambda: Medusa(embedding, args.drafts)),
        ("eagle", lambda: Eagle(embedding, ids)),
        ("eagle3", lambda: Eagle3(embedding, ids)),
    ):
        if args.only in (None, name):
            torch.manual_seed(args.seed)
            head = make().to(device)
            recipe = Recipe(args.epochs, learning_rate=1e-3, dropout=0.0, weight_decay=0.01, batch=args.batch)
            train(head, model, corpus, recipe, args.drafts, args.steps)
            save(head, args.out / name, args.drafts)
            found = " ".join(f"{share:.3f}" for share in agreement(head, model, corpus, args.drafts))
            print(f"{name}: drafts that are the model's most likely token, by position: {found}")


if __name__ == "__main__":
    main()
