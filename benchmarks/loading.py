"""Time of loading weights with and without the check for NaN and infinity (core/worker/weight_check.py).

    python benchmarks/loading.py --layers 16 --rounds 5 -- engine.device=cuda
    python benchmarks/loading.py --layers 16 --rounds 5 -- engine.device=cuda quant=fp8
    python benchmarks/loading.py --layers 1 --rounds 3 -- engine.device=cpu

Writes random weights with the shapes of Llama 3 8B and --layers layers to a temporary folder (436 MB a layer, and
2.1 GB for the vocabulary), and loads them from the page cache, alternately with and without the check. The first load
of each kind is not counted.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dovetail.core.checkpoint import Checkpoint
from dovetail.core.compose import Composition, compose
from dovetail.core.worker import fill, loader
from dovetail.core.worker.build import build_quantizer, check_weights
from dovetail.core.worker.dtypes import resolve_device

HIDDEN, INNER, KV, VOCAB = 4096, 14336, 1024, 128256
LAYER = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}
ENDS = {"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)}


class NoCheck:
    """WeightCheck that checks nothing."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        pass

    def watch(self, name: str, opener: Callable[[], Any]) -> Callable[[], Any]:
        return opener

    def finish(self, checkpoint: Checkpoint) -> None:
        pass


def write(folder: Path, layers: int) -> int:
    """Write config.json and one shard per layer; return the number of bytes."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": VOCAB,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    shards = [ENDS, *({f"model.layers.{i}.{name}": shape for name, shape in LAYER.items()} for i in range(layers))]
    weight_map = {}
    for index, shapes in enumerate(shards):
        file = f"model-{index:05d}.safetensors"
        tensors = {f"{name}.weight": torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
        save_file({name: tensor.uniform_(-0.03, 0.03) for name, tensor in tensors.items()}, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(file.stat().st_size for file in folder.iterdir())


@contextmanager
def checking(check: bool) -> Iterator[None]:
    """Load without the check in this context if `check` is false."""
    kept = fill.WeightCheck
    fill.WeightCheck = kept if check else NoCheck  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        fill.WeightCheck = kept  # type: ignore[misc]


def load(composition: Composition) -> float:
    """Build the model and fill it; return the seconds of filling."""

    def silent(phase: str, share: float | None) -> None:
        pass

    quantizer = build_quantizer(composition)
    check_weights(composition, quantizer, 0, 1)
    device = resolve_device(composition.engine.device, 0, composition.engine.first_gpu)
    phases = loader._Phases()
    connection = loader._connect(composition, device, 0, 1, "", silent, lambda connection: None)
    parts = loader._build_parts(composition, quantizer, connection, silent, phases)
    parts.release()
    parts.close()
    gc.collect()
    return phases.seconds["load weights"]


def main(argv: list[str]) -> None:
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv[:cut])
    with tempfile.TemporaryDirectory() as name:
        size = write(Path(name), args.layers)
        composition = compose(["app=generate", "model=llama", f"model.path={name}", *argv[cut + 1 :]])
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for round in range(args.rounds + 1):
            for check in (False, True) if round % 2 else (True, False):
                with checking(check):
                    took = load(composition)
                if round:
                    seconds[check].append(took)
    for check, times in seconds.items():
        median = statistics.median(times)
        print(
            f"{'with' if check else 'without'} the check: {median:.3f} s median of {len(times)} "
            f"({min(times):.3f} to {max(times):.3f}), {size / median / 1e9:.2f} GB/s"
        )
    without, with_check = (statistics.median(times) for times in seconds.values())
    print(f"the check costs {100 * (with_check / without - 1):+.1f} %")


if __name__ == "__main__":
    main(sys.argv[1:])
