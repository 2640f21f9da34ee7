"""Train a very small DeepSeek V3: latents, experts, and a layer for multi-token prediction.

    python train_moe.py

Reads the output of prepare.py and writes a model folder in the published layout under --out. Keeps
the weights of the epoch with the lowest held-out loss.

Shapes: B windows, T tokens of a window, C hidden channels, E experts, I channels of an expert,
H heads, V vocabulary.
"""

import argparse
import math
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from prepare import prepared
from rich.progress import track
from safetensors.torch import save_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from train import END_OF_TEXT, HERE, ROPE_THETA, Corpus, Muon, Recipe, save_tokenizer, schedule, write_json

CONFIG = dict(
    architectures=["DeepseekV3ForCausalLM"],
    model_type="deepseek_v3",
    vocab_size=4096,
    hidden_size=160,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=None,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=1,
    moe_intermediate_size=88,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
    norm_topk_prob=True,
    routed_scaling_factor=1.0,
    scoring_func="sigmoid",
    num_nextn_predict_layers=1,
    hidden_act="silu",
    rms_norm_eps=1e-6,
    max_position_embeddings=2048,
    rope_theta=ROPE_THETA,
    attention_bias=False,
    tie_word_embeddings=True,
    torch_dtype="bfloat16",
    bos_token_id=END_OF_TEXT,
    eos_token_id=END_OF_TEXT,
    pad_token_id=END_OF_TEXT,
)
HIDDEN, HEADS = CONFIG["hidden_size"], CONFIG["num_attention_heads"]
NOPE, ROPE, VALUE = (CONFIG[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
RANK, EXPERTS, ACTIVE = (CONFIG[name] for name in ("kv_lora_rank", "n_routed_experts", "num_experts_per_tok"))
MTP_WEIGHT = 0.3
"""Weight of the loss of the layer for multi-token prediction."""
BIAS_STEP = 1e-3
"""Change of an expert's selection bias in a step."""


class Norm(nn.Module):
    def __init__(self, channels=HIDDEN):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), 1e-6)


def linear(inp, out):
    made = nn.Linear(inp, out, bias=False)
    nn.init.normal_(made.weight, std=0.5 * inp**-0.5)
    return made


def rotate(x, cos, sin):
    """Rotate adjacent pairs of the last dimension."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class Attention(nn.Module):
    """Attention over compressed latents (DeepSeek-V2, 2024)."""

    def __init__(self):
        super().__init__()
        self.q_proj = linear(HIDDEN, HEADS * (NOPE + ROPE))
        self.kv_a_proj_with_mqa = linear(HIDDEN, RANK + ROPE)
        self.kv_a_layernorm = Norm(RANK)
        self.kv_b_proj = linear(RANK, HEADS * (NOPE + VALUE))
        self.o_proj = linear(HEADS * VALUE, HIDDEN)

    def forward(self, x, cos, sin):
        def heads(y, *sizes):
            return y.unflatten(-1, (HEADS, -1)).transpose(1, 2).split(sizes, -1)

        q, q_rotary = heads(self.q_proj(x), NOPE, ROPE)
        latent, k_rotary = self.kv_a_proj_with_mqa(x).split((RANK, ROPE), -1)
        k, v = heads(self.kv_b_proj(self.kv_a_layernorm(latent)), NOPE, VALUE)
        k_rotary = rotate(k_rotary[:, None], cos, sin).expand(-1, HEADS, -1, -1)
        q = torch.cat((q, rotate(q_rotary, cos, sin)), -1)
        # Fused kernels want heads of one size.
        v = F.pad(v, (0, NOPE + ROPE - VALUE))
        attended = F.scaled_dot_product_attention(q, torch.cat((k, k_rotary), -1), v, is_causal=True)
        return self.o_proj(attended[..., :VALUE].transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.gate_proj, self.up_proj = linear(HIDDEN, channels), linear(HIDDEN, channels)
        self.down_proj = linear(channels, HIDDEN)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """Routed experts and a shared one. Every token passes all of the few experts, with weight 0 where it is not routed.
    Loads are balanced by the bias of the selection alone (DeepSeek-V3, 2024)."""

    def __init__(self):
        super().__init__()
        channels = CONFIG["moe_intermediate_size"]
        self.gate = linear(HIDDEN, EXPERTS)
        self.register_buffer("selection_bias", torch.zeros(EXPERTS))
        self.register_buffer("load", torch.zeros(EXPERTS), persistent=False)
        shapes = dict(gate_proj=(channels, HIDDEN), up_proj=(channels, HIDDEN), down_proj=(HIDDEN, channels))
        self.routed = nn.ParameterDict(
            {
                name: nn.Parameter(torch.randn(EXPERTS, *shape) * 0.5 * shape[1] ** -0.5)
                for name, shape in shapes.items()
            }
        )
        self.shared_experts = MLP(channels)

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.gate.weight.float()).sigmoid()
        chosen = (scores.detach() + self.selection_bias).topk(ACTIVE, -1).indices
        weights = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        if self.training:
            self.load.copy_((weights.detach() > 0).flatten(0, -2).float().sum(0))
        weights = weights / weights.sum(-1, keepdim=True)
        gate, up = (torch.einsum("btc,eic->btei", x, self.routed[name]) for name in ("gate_proj", "up_proj"))
        inner = F.silu(gate) * up * weights[..., None]
        return torch.einsum("btei,eci->btc", inner, self.routed["down_proj"]) + self.shared_experts(x)

    @torch.no_grad()
    def balance(self):
        """Raise the bias of experts with fewer tokens than the mean, and lower that of the others."""
        self.selection_bias += BIAS_STEP * (self.load.mean() - self.load).sign()


class Layer(nn.Module):
    def __init__(self, dense):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()
        self.self_attn = Attention()
        self.mlp = MLP(CONFIG["intermediate_size"]) if dense else Experts()

    def forward(self, x, cos, sin, drop):
        x = x + drop(self.self_attn(self.input_layernorm(x), cos, sin))
        return x + drop(self.mlp(self.post_attention_layernorm(x)))


class Predictor(Layer):
    """Layer for multi-token prediction (DeepSeek-V3, 2024)."""

    def __init__(self):
        super().__init__(dense=False)
        self.enorm, self.hnorm, self.head_norm = Norm(), Norm(), Norm()
        self.eh_proj = linear(2 * HIDDEN, HIDDEN)

    def forward(self, embeds, states, cos, sin, drop):
        """Predict the token after each one from its embedding and the state before it, zeros at first."""
        before = F.pad(states[:, :-1], (0, 0, 1, 0))
        pair = self.eh_proj(torch.cat((self.enorm(embeds), self.hnorm(before)), -1))
        return self.head_norm(super().forward(pair, cos, sin, drop))


class Model(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.dropout = dropout
        self.embed_tokens = nn.Embedding(CONFIG["vocab_size"], HIDDEN)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        dense = CONFIG["first_k_dense_replace"]
        self.layers = nn.ModuleList(Layer(index < dense) for index in range(CONFIG["num_hidden_layers"]))
        self.norm = Norm()
        self.predictor = Predictor()

    def forward(self, ids):
        """Return the model's logits, and those of the layer for multi-token prediction, which predict the same tokens
        from one state less, [B, T, V] each."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        angles = positions[:, None] * ROPE_THETA ** (-torch.arange(0, ROPE, 2, device=ids.device) / ROPE)
        cos, sin = angles.cos(), angles.sin()

        def drop(x):
            return F.dropout(x, self.dropout, self.training)

        embeds = self.embed_tokens(ids)
        x = drop(embeds)
        for layer in self.layers:
            x = layer(x, cos, sin, drop)
        states = self.norm(x)
        drafts = self.predictor(embeds, states, cos, sin, drop)
        return F.linear(states, self.embed_tokens.weight), F.linear(drafts, self.embed_tokens.weight)

    def experts(self):
        return [module for module in self.modules() if isinstance(module, Experts)]

    def tensors(self):
        """Return the tensors of the published layout. Embedding and head are one."""
        found = {}
        for name, tensor in self.state_dict().items():
            index = CONFIG["num_hidden_layers"]
            name = f"model.{name}".replace("model.predictor.", f"model.layers.{index}.")
            name = name.replace("head_norm", "shared_head.norm")
            name = name.replace("selection_bias", "gate.e_score_correction_bias")
            below, routed, matrix = name.partition("routed.")
            if routed:
                found |= {f"{below}experts.{e}.{matrix}.weight": tensor[e] for e in range(EXPERTS)}
            else:
                found[name] = tensor
        return found


def optimizers(model, recipe):
    """Return Muon for the matrices in the layers, and AdamW for the embedding, the routers and the norms."""
    embedding, routers = model.embed_tokens.weight, {id(one.gate.weight) for one in model.experts()}
    rest = [p for p in model.parameters() if p is not embedding]
    plain = [p for p in rest if p.ndim == 1 or id(p) in routers]
    blocks = [p for p in rest if p.ndim > 1 and id(p) not in routers]
    adam = [dict(params=[embedding], weight_decay=0.1), dict(params=plain, weight_decay=0.0)]
    return [
        Muon(blocks, lr=recipe.learning_rate, weight_decay=recipe.weight_decay),
        torch.optim.AdamW(adam, lr=recipe.embedding_rate, betas=(0.9, 0.95)),
    ]


@torch.no_grad()
def evaluate(model, corpus, windows, batch=4):
    """Return the loss on held-out text in nats per token, and the share of drafts that are the model's own choice."""
    model.eval()
    length = corpus.context + 1
    ids = corpus.heldout[: len(corpus.heldout) // length * length].view(-1, length)[:windows].long()
    sums = Counter()
    for one in ids.split(batch):
        logits, drafts = (x.float() for x in model(one[:, :-1]))
        sums["loss"] += F.cross_entropy(logits.flatten(0, 1), one[:, 1:].flatten(), reduction="sum").item()
        sums["right"] += (logits.argmax(-1) == drafts.argmax(-1)).sum().item()
    model.train()
    total = ids.numel() - len(ids)
    return sums["loss"] / total, sums["right"] / total


def train(corpus, recipe, steps, windows, compiled):
    """Return the model with the lowest held-out loss, that loss, and the share of accepted drafts."""
    device = corpus.train.device
    model = Model(recipe.dropout).to(device)
    epoch_steps = min(corpus.steps_per_epoch(recipe), steps)
    total = min(recipe.epochs * epoch_steps, steps)
    optims = optimizers(model, recipe)
    rates = [LambdaLR(o, lambda step: schedule(step / total, recipe.warmup)) for o in optims]
    precision = torch.autocast(device.type, dtype=torch.bfloat16)

    def losses(inputs, targets):
        logits, drafts = (x.float().flatten(0, 1) for x in model(inputs))
        # Drafts are verified by the model, not by the text: its own predictions are the goal.
        goal = logits.detach().log_softmax(-1)
        drafted = F.kl_div(drafts.log_softmax(-1), goal, log_target=True, reduction="batchmean")
        return F.cross_entropy(logits, targets.flatten()), drafted

    step_losses = torch.compile(losses) if compiled else losses
    best, done = (math.inf, 0.0, {}), 0
    while done < total:
        running = torch.zeros(2, device=device)
        left = min(epoch_steps, total - done)
        batches = (pair for pair, _ in zip(corpus.batches(recipe), range(left), strict=False))
        for inputs, targets in track(batches, f"steps {done} to {done + left} of {total}", total=left):
            with precision:
                loss, drafted = step_losses(inputs, targets)
            (loss + MTP_WEIGHT * drafted).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optim, rate in zip(optims, rates, strict=True):
                optim.step()
                rate.step()
                optim.zero_grad()
            for experts in model.experts():
                experts.balance()
            running += torch.stack((loss, drafted)).detach()
        done += left
        with precision:
            heldout, accepted = evaluate(model, corpus, windows)
        mean, drafted = (running / left).tolist()
        print(f"loss {mean:.3f}, of drafts {drafted:.3f}; held-out {heldout:.4f}, drafts accepted {accepted:.3f}")
        if heldout < best[0]:
            best = heldout, accepted, {name: each.detach().clone() for name, each in model.state_dict().items()}
    model.load_state_dict(best[2])
    return model.eval(), *best[:2]


def save(model, corpus, folder):
    """Write the model folder, with weights in bfloat16 and selection biases in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", CONFIG)
    save_tokenizer(corpus, folder, CONFIG["max_position_embeddings"])
    weights = {
        name: (tensor.float() if name.endswith("_bias") else tensor.bfloat16()).contiguous().cpu()
        for name, tensor in model.tensors().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=prepared, default=str(HERE / ".data"))
    parser.add_argument("--out", type=Path, default=HERE / ".moe")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=16, help="windows in a step")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=1 << 30, help="stop after so many steps")
    parser.add_argument("--windows", type=int, default=1 << 30, help="held-out windows to evaluate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true", help="run without torch.compile")
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    corpus = Corpus(args.data, args.context, device)
    torch.manual_seed(args.seed)
    recipe = Recipe(args.epochs, learning_rate=8e-3, dropout=0.1, weight_decay=0.3, batch=args.batch)
    model, loss, accepted = train(corpus, recipe, args.steps, args.windows, not args.no_compile)
    save(model, corpus, args.out)
    count = sum(tensor.numel() for tensor in model.tensors().values())
    size = (args.out / "model.safetensors").stat().st_size
    print(f"{count:,} parameters, {size:,} bytes, held-out loss {loss:.4f} nats/token")
    print(f"with one draft {1 + accepted:.2f} tokens a step on held-out text")


if __name__ == "__main__":
    main()
