"""Train drafters that follow the bundled model's hidden states: Medusa, EAGLE and EAGLE-3.

    python train_heads.py

Reads the output of prepare.py and the trained model, and writes one folder for each drafter under
--out, in the layout that its authors publish. Half of each batch is text of the corpus, half is
continued by the model, since drafters follow what the model writes.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from prepare import prepared
from rich.progress import track
from safetensors.torch import save_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from train import HERE, ROPE_THETA, SHAPES, Corpus, Muon, Recipe, schedule, write_json
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
        return F.rms_norm(x, (HIDDEN,), self.weight.to(x.dtype), 1e-5)


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
    def __init__(self, inner):
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, inner, bias=False)
        self.up_proj = nn.Linear(HIDDEN, inner, bias=False)
        self.down_proj = nn.Linear(inner, HIDDEN, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.self_attn, self.mlp = Attention(width), MLP(inner)
        self.post_attention_layernorm = Norm()

    def forward(self, x, residual, past):
        residual = residual + self.self_attn(x, past)
        return residual + self.mlp(self.post_attention_layernorm(residual))


class Eagle(nn.Module):
    """Predicts the state after the model's last norm from a token and the state before it."""

    name, taps, inner = "eagle", (), TINY["intermediate_size"]

    def __init__(self, embedding, ids):
        super().__init__()
        self.embedding = [embedding]  # In a list: it is no parameter of the head.
        self.ids = [None]
        self.fc = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.layers = nn.ModuleList([Layer(HIDDEN, self.inner)])

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

    name, taps, inner = "eagle3", TAPS, 512

    def __init__(self, embedding, ids):
        super().__init__()
        self.ids, self.vocab = [ids], len(embedding)
        self.fc = nn.Linear(len(TAPS) * HIDDEN, HIDDEN, bias=False)
        self.midlayer = Layer(2 * HIDDEN, self.inner)
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
    """Residual blocks for each draft; the model's own logits."""

    name, heads, blocks = "medusa", 4, 2

    def __init__(self, embedding, ids):
        super().__init__(nn.Sequential(*(Residual() for _ in range(self.blocks))) for _ in range(self.heads))
        self.embedding = [embedding]

    def tensors(self):
        return self.state_dict()


KINDS = (Medusa, Eagle, Eagle3)


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
            yield blocks(states[-1])[:, :-ahead] @ head.embedding[0].T, seen.logits[:, ahead:]
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


@torch.no_grad()
def continued(model, corpus, windows, batch=1024):
    """Return windows [windows, T] of which the first half is text of the corpus and the second by the model, at
    temperatures from 0 to 1."""
    half, device = corpus.context // 2, corpus.train.device
    made = []
    for start in track(range(0, windows, batch), "text of the model"):
        rows = min(batch, windows - start)
        at = torch.randint(len(corpus.train) - half, (rows, 1), device=device)
        ids = corpus.train[at + torch.arange(half, device=device)].long()
        heat = torch.rand(rows, 1, device=device)
        given, past, parts = ids, None, [ids]
        for _ in range(half):
            seen = model(input_ids=given, past_key_values=past, use_cache=True, logits_to_keep=1)
            past = seen.past_key_values
            # The Gumbel maximum, whose noise the temperature scales.
            noise = -torch.empty_like(seen.logits[:, -1], dtype=torch.float32).exponential_().log()
            given = (seen.logits[:, -1] + heat * noise).argmax(-1, keepdim=True)
            parts.append(given)
        made.append(torch.cat(parts, 1))
    return torch.cat(made)


def optimizers(head, recipe):
    """Return Muon for matrices of layers, and AdamW for the logits and the rest."""
    logits = [head.lm_head.weight] if isinstance(head, Eagle3) else []
    matrices = [p for p in head.parameters() if p.ndim == 2 and all(p is not other for other in logits)]
    rest = [p for p in head.parameters() if p.ndim == 1]
    adam = [dict(params=logits, weight_decay=0.1), dict(params=rest, weight_decay=0.0)]
    return [
        Muon(matrices, lr=recipe.learning_rate, weight_decay=recipe.weight_decay),
        torch.optim.AdamW(adam, lr=recipe.embedding_rate, betas=(0.9, 0.95)),
    ]


def train(head, model, corpus, own, recipe, drafts, most_steps):
    """Train on batches of the corpus beside as many windows of the model's `own` text."""
    steps = min(recipe.epochs * corpus.steps_per_epoch(recipe), most_steps)
    optims = optimizers(head, recipe)
    rates = [LambdaLR(optim, lambda step: schedule(step / steps, recipe.warmup)) for optim in optims]
    batches = (ids for _ in range(recipe.epochs) for ids, _ in corpus.batches(recipe))
    for _, ids in zip(track(range(steps), head.name), batches, strict=False):
        ids = torch.cat((ids, own[torch.randint(len(own), (len(ids),), device=own.device)]))
        with torch.autocast(ids.device.type, dtype=torch.bfloat16):
            losses = [divergence(*pair).mean() for pair in follow(head, model, ids, drafts)]
        loss = sum(DECAY**draft * loss for draft, loss in enumerate(losses))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optim, rate in zip(optims, rates, strict=True):
            optim.step()
            rate.step()
            optim.zero_grad()


@torch.no_grad()
def agreement(head, model, corpus, drafts, windows=64):
    """Return for each draft how often its most likely token is the model's, on held-out text."""
    ids = corpus.heldout[: windows * corpus.context].view(windows, corpus.context).long()
    right = []
    for batch in ids.split(8):
        each = [(logits.argmax(-1) == goal.argmax(-1)) for logits, goal in follow(head, model, batch, drafts)]
        right.append(torch.stack([found.float().mean() for found in each]) * len(batch) / windows)
    return torch.stack(right).sum(0).tolist()


def save(head, folder):
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(head, Medusa):
        config = dict(medusa_num_heads=head.heads, medusa_num_layers=head.blocks, hidden_size=HIDDEN, vocab_size=4096)
    else:
        config = dict(
            architectures=["LlamaForCausalLM"],
            vocab_size=4096,
            max_position_embeddings=2048,
            rms_norm_eps=1e-5,
            rope_theta=ROPE_THETA,
            hidden_act="silu",
            torch_dtype="bfloat16",
            **TINY | dict(num_hidden_layers=1, intermediate_size=head.inner),
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
    parser.add_argument("--data", type=prepared, default=str(HERE / ".data"))
    parser.add_argument("--model", type=Path, default=HERE.parents[1] / "plugins/model/bundled/tiny")
    parser.add_argument("--out", type=Path, default=HERE / ".heads")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16, help="windows of the corpus in a step")
    parser.add_argument("--own", type=int, default=8192, help="windows that the model continues")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=6e-3)
    parser.add_argument("--steps", type=int, default=1 << 30, help="stop after so many steps")
    parser.add_argument("--drafts", type=int, default=5, help="drafts that EAGLE and EAGLE-3 are trained for")
    parser.add_argument("--draft-vocab", type=int, default=3072, help="tokens that EAGLE-3 drafts")
    parser.add_argument("--only", nargs="+", choices=[kind.name for kind in KINDS], help="train these drafters")
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
    kinds = [kind for kind in KINDS if args.only is None or kind.name in args.only]
    torch.manual_seed(args.seed)
    own = continued(model, corpus, args.own)
    for kind in kinds:
        torch.manual_seed(args.seed)
        head = kind(embedding, ids).to(device)
        recipe = Recipe(
            args.epochs, args.learning_rate, dropout=0.0, weight_decay=0.1, embedding_rate=2e-3, batch=args.batch
        )
        train(head, model, corpus, own, recipe, args.drafts, args.steps)
        save(head, args.out / kind.name)
        found = " ".join(f"{share:.3f}" for share in agreement(head, model, corpus, args.drafts))
        print(f"{kind.name}: drafts that are the model's most likely token, by position: {found}")


if __name__ == "__main__":
    main()
