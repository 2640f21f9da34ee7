"""Models in GGUF files with blocks of several types, on one and on two ranks, against their values in safetensors."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dovetail import LLM, SamplingParams
from dovetail.core.checkpoint import open_checkpoint
from dovetail.core.compose import compose
from dovetail.core.errors import ConfigError
from dovetail.core.testing.model_driver import build_context
from dovetail.core.testing.rank_threads import on_threads
from dovetail.plugins.model.config import LlamaConfig
from dovetail.plugins.model.llama.decoder import Llama
from dovetail.plugins.quant.config import GGUFConfig
from dovetail.plugins.quant.gguf import quantizer
from dovetail.plugins.quant.gguf.quantizer import GGUF

from ..contract.checkpoint.gguf_files import SMALL, byte_tokenizer, small_tensors, write_gguf
from ..unit.quant.test_gguf_blocks import random_blocks
from .driver import Driver, load_model

CONFIG = {**SMALL, "hidden_size": 512, "intermediate_size": 768, "vocab_size": 260}
TYPES = {
    "self_attn.q_proj": "Q4_K",
    "self_attn.k_proj": "Q4_K",
    "self_attn.v_proj": "Q6_K",
    "self_attn.o_proj": "Q5_K",
    "mlp.gate_proj": "Q8_0",
    "mlp.up_proj": "F16",
    "mlp.down_proj": "Q4_0",
    "embed_tokens": "Q4_K",
    "lm_head": "Q6_K",
}
TOKENS = [0, *range(3, 40)]


def small_blocks(kind: str, rows: int, columns: int) -> torch.Tensor:
    """Return random blocks whose values are of the size of weights; one group has the scale 0."""
    bytes_RS = random_blocks(kind, rows, columns // quantizer.FORMATS[kind].values)
    blocks = bytes_RS.numpy().reshape(rows, -1, quantizer.FORMATS[kind].size)
    for at in {"Q4_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind]:
        size = {"Q8_0": 1e-3, "Q4_0": 1e-2, "Q6_K": 3e-5}.get(kind, 2e-4) * (1 if at in (0, 208) else 5)
        halves = (np.random.rand(*blocks.shape[:2], 1) * size).astype(np.float16)
        blocks[..., at : at + 2] = halves.view(np.uint8)
    if kind in ("Q4_K", "Q5_K"):
        blocks[3, 0, 4] &= 192  # the six bits of the first group's scale
    return torch.from_numpy(blocks.reshape(rows, -1))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A GGUF file, and a folder with its values in float32."""
    folder = tmp_path_factory.mktemp("gguf")
    torch.manual_seed(0)
    plain, kinds = small_tensors(CONFIG), {}
    blocks = {}
    for name in plain:
        kind = next((kind for part, kind in TYPES.items() if part in name), None)
        if kind is not None and kind != "F16":
            kinds[name] = kind
            blocks[name] = small_blocks(kind, *plain[name].shape)
            values = gguf.quants.dequantize(blocks[name].numpy(), gguf.GGMLQuantizationType[kind])
            plain[name] = torch.from_numpy(values)
        elif kind == "F16":
            plain[name] = plain[name].half().float()
    write_blocks(folder / "mixed.gguf", plain, kinds, blocks)
    save_file({name: tensor.contiguous() for name, tensor in plain.items()}, folder / "model.safetensors")
    config = {**CONFIG, "rope_theta": 10000.0, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_blocks(path, plain, kinds, blocks):
    """Write the blocks themselves, which are random."""
    heads = {"q_proj": CONFIG["num_attention_heads"], "k_proj": CONFIG["num_key_value_heads"]}

    def stored(values: np.ndarray, kind: str) -> np.ndarray:
        name = next(
            n
            for n in kinds
            if paired(n, plain[n]).shape == values.shape and np.array_equal(paired(n, plain[n]), values)
        )
        return paired(name, blocks[name])

    def paired(name: str, tensor: torch.Tensor) -> np.ndarray:
        count = next((count for part, count in heads.items() if part in name), None)
        if count is None:
            return tensor.numpy()
        return tensor.reshape(count, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape).numpy()

    halves = {name: tensor.half() if "up_proj" in name else tensor for name, tensor in plain.items()}
    write_gguf(path, CONFIG, halves, byte_tokenizer(), kinds, encode=stored)


def load(path, **options) -> Llama:
    checkpoint, made = open_checkpoint(path), GGUF(GGUFConfig(**options.pop("config", {})))
    made.read_checkpoint(checkpoint)
    config = LlamaConfig(path=str(path))
    model = Llama(config, build_context(Llama.spec(config), quantizer=made, **options))
    model.load(checkpoint.open())
    return model


def logits(model: Llama) -> torch.Tensor:
    return Driver(model).step([("a", TOKENS)])[0]


def test_values_of_the_file(files):
    """Merged matrices have unlike types; q and k have rows in llama.cpp's order; two ranks cut blocks."""
    expected = logits(load_model(files))
    assert expected.std() > 0.02
    path = files / "mixed.gguf"
    found = [logits(load(path))]
    found += on_threads(2, lambda collective: logits(load(path, collective=collective)))
    for got in found:
        torch.testing.assert_close(got, expected, atol=2e-3 * float(expected.std()), rtol=0)
    with_inputs = logits(load(path, config={"activations": "fp8"}))
    assert 0 < (with_inputs - expected).norm() < 0.3 * expected.norm()


def test_it_is_chosen_and_generates(files):
    words = [f"model.path={files}/mixed.gguf", "model=llama"]
    part = compose(words).part("quant")
    assert part.name == "gguf"
    tokens = []
    for path in (files / "mixed.gguf", files):
        with LLM(str(path), overrides=["engine.device=cpu", "engine.dtype=float32", "engine.kv_pages=64"]) as llm:
            tokens.append(
                llm.generate([tuple(TOKENS)], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))[0].token_ids
            )
    assert tokens[0] == tokens[1]


def test_an_unknown_type_is_named_before_weights_load(files, monkeypatch):
    monkeypatch.setattr(quantizer, "FORMATS", {"Q4_0": quantizer.FORMATS["Q4_0"]})
    with pytest.raises(ConfigError, match=r"tensor '\S+' is in Q._.; quant=gguf reads Q4_0"):
        load(files / "mixed.gguf")
