"""Checkpoints as compressed-tensors writes them, by its own code: formats, tensors and values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from dovetail.core.compose import compose
from dovetail.core.errors import ConfigError
from dovetail.core.startup_notes import collect_notes
from dovetail.core.testing.rank_threads import on_threads

from .checkpoints import random_tokens, save_random
from .driver import Driver, load_model
from .test_quantized_heads import load

TOKENS = random_tokens(30, seed=8)
MATRIX = ("_proj.weight",)


def write(folder: Path, weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any) -> None:
    """Quantize the linear layers of a plain checkpoint with the library: `folder`/stored, and its values decoded by the
    library: `folder`/plain."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)
    form = infer_module_format(torch.nn.Linear, scheme)
    compressor = BaseCompressor.get_value_from_registry(form.value)
    tensors = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    stored, plain = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(MATRIX)]:
        state = compressor.compress({"weight": stored.pop(name), **scales(tensors[name], scheme.weights)}, scheme)
        if inputs is not None and not inputs.get("dynamic"):
            state["input_scale"] = torch.tensor([0.05])
        stored |= {f"{name.removesuffix('weight')}{key}": x.contiguous().clone() for key, x in state.items()}
        plain[name] = compressor.decompress(state, scheme)["weight"].float().contiguous()
    config = QuantizationConfig(config_groups={"group_0": scheme}, format=form.value, ignore=["lm_head"])
    hf = json.loads((folder / "config.json").read_text())
    said = {"quantization_config": {**json.loads(config.model_dump_json()), **more}}
    for kind, content, extra in (("stored", stored, said), ("plain", plain, {})):
        (folder / kind).mkdir()
        save_file(content, folder / kind / "model.safetensors")
        (folder / kind / "config.json").write_text(json.dumps({**hf, **extra}))


def scales(weight_OI: torch.Tensor, args: Any) -> dict[str, torch.Tensor]:
    """Return the library's scales and zero points for the range of each group of weights."""
    from compressed_tensors.quantization.utils import calculate_qparams

    outputs, inputs = weight_OI.shape
    block = {
        "tensor": (outputs, inputs),
        "channel": (1, inputs),
        "group": (1, args.group_size),
        "block": tuple(args.block_structure or ()),
    }[args.strategy]
    padded = F.pad(weight_OI, (0, -inputs % block[1], 0, -outputs % block[0]))
    blocks = padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
    scale, zero = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args)
    if args.strategy == "tensor":
        scale, zero = scale.reshape(1), zero.reshape(1)
    return {"weight_scale": scale, "weight_zero_point": zero}


def logits(model: Any) -> torch.Tensor:
    return Driver(model).step([("a", TOKENS)])[0]


def chosen(folder: Path) -> str:
    return compose(["model=llama", f"model.path={folder}/stored"]).part("quant").name


def floats(**options: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "symmetric": True, **options}


def ints(bits: int = 4, **options: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", **options}


INT8 = ints(8, strategy="token", symmetric=True, dynamic=True)
FP8 = floats(strategy="token", dynamic=True)
STATIC = ints(8, strategy="tensor", symmetric=True)


@pytest.mark.parametrize(
    ("quant", "weights", "inputs"),
    [
        ("fp8", floats(strategy="channel"), None),
        ("fp8", floats(strategy="tensor"), None),
        ("fp8", floats(strategy="group", group_size=32), None),
        ("fp8", floats(strategy="block", block_structure=[64, 128]), None),
        ("int4", ints(strategy="group", group_size=32, symmetric=True), INT8),
        ("int4", ints(strategy="group", group_size=32, symmetric=False), FP8),
        ("int4", ints(strategy="channel", symmetric=False), STATIC),
        ("int4", ints(8, strategy="group", group_size=32, symmetric=False), INT8),
        ("int4", ints(strategy="tensor", symmetric=False), INT8),
        ("int4", ints(strategy="tensor", symmetric=True), None),
        ("int4", ints(8, strategy="tensor", symmetric=False), None),
    ],
    ids=lambda value: (
        None if value is None else value if isinstance(value, str) else "-".join(map(str, value.values()))
    ),
)
def test_weights_are_those_that_the_library_decodes(quant, weights, inputs, tmp_path):
    """On one rank and on two; inputs keep the model's dtype. Groups and blocks are cut by ranks."""
    save_random(tmp_path, "gqa", hidden_size=128, num_hidden_layers=2)
    write(tmp_path, weights, inputs)
    assert chosen(tmp_path) == quant
    expected, options = logits(load_model(tmp_path / "plain")), {"activations": "model"}
    found = [logits(load(tmp_path / "stored", quant, options))]
    found += on_threads(2, lambda one: logits(load(tmp_path / "stored", quant, options, collective=one)))
    for got in found:
        torch.testing.assert_close(got, expected, atol=5e-4, rtol=0)


@pytest.mark.parametrize(
    ("quant", "weights", "inputs", "activations", "says"),
    [
        ("fp8", floats(strategy="channel"), None, "model", ""),
        ("int4", ints(strategy="group", group_size=32), FP8, "fp8", ""),
        ("int4", ints(strategy="group", group_size=32), INT8, "model", "dynamic 8-bit integers with a scale per token"),
        ("int4", ints(strategy="group", group_size=32), floats(strategy="tensor"), "fp8", "static 8-bit floats with a"),
    ],
)  # fmt: skip
def test_inputs_are_those_of_the_config_or_a_note_says_otherwise(quant, weights, inputs, activations, says, tmp_path):
    save_random(tmp_path, "gqa", hidden_size=128, num_hidden_layers=1)
    write(tmp_path, weights, inputs)
    with collect_notes() as notes:
        found = logits(load(tmp_path / "stored", quant))
    one_of_two = {
        option: logits(load(tmp_path / "stored", quant, {"activations": option})) for option in ("model", "fp8")
    }
    assert torch.equal(found, one_of_two[activations]) and not torch.equal(one_of_two["model"], one_of_two["fp8"])
    assert bool(notes) is bool(says) and all(f"config.json states {says}" in text for text in notes)


WEIGHTS = ints(strategy="group", group_size=32, symmetric=True)


@pytest.mark.parametrize(
    ("inputs", "more", "says"),
    [
        (ints(4, strategy="token", dynamic=True), {}, r"input_activations\.num_bits is 4: there is 8"),
        (None, {"sparsity_config": {"format": "sparse-24-bitmask"}}, r"sparsity_config\.format is 'sparse-24-bitmask'"),
        (None, {"moe_sparsity_config": {"method": "prune"}}, r"moe_sparsity_config is .* unlike numbers of experts"),
        (None, {"sparsity_config": [1]}, r"sparsity_config is \[1\]: it must be an object or null"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused_with_its_file(inputs, more, says, tmp_path):
    save_random(tmp_path, "gqa", hidden_size=128, num_hidden_layers=1)
    write(tmp_path, WEIGHTS, inputs, **more)
    with pytest.raises(ConfigError, match=rf"config\.json: quantization_config\.{says}"):
        load(tmp_path / "stored", "int4")


def test_pruned_weights_with_all_their_zeros_are_read(tmp_path):
    save_random(tmp_path, "gqa", hidden_size=128, num_hidden_layers=1)
    write(tmp_path, WEIGHTS, sparsity_config={"format": "dense", "sparsity_structure": "2:4"})
    expected = logits(load_model(tmp_path / "plain"))
    torch.testing.assert_close(logits(load(tmp_path / "stored", "int4")), expected, atol=5e-4, rtol=0)


@pytest.mark.parametrize(
    ("weights", "inputs", "name", "change", "says"),
    [
        (WEIGHTS, None, "weight_shape", lambda t: t.flip(0), r"is \[.*\]; the matrix has 128 outputs, \d+ inputs"),
        (WEIGHTS, None, "weight_shape", lambda t: t[:1], "must be two integers"),
        (WEIGHTS, INT8, "weight", lambda t: t * 2, "with 4 bits they are from -8 to 7"),
    ],
)
def test_a_damaged_tensor_is_named(weights, inputs, name, change, says, tmp_path):
    save_random(tmp_path, "gqa", hidden_size=128, num_hidden_layers=1)
    write(tmp_path, weights, inputs)
    file, key = tmp_path / "stored/model.safetensors", f"model.layers.0.mlp.down_proj.{name}"
    tensors = load_file(file)
    save_file({**tensors, key: change(tensors[key]).contiguous()}, file)
    with pytest.raises(ConfigError, match=rf"'{key}' .*{says}"):
        load(tmp_path / "stored", "int4")
