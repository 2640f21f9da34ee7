"""Quantized checkpoints that cannot be used: one message with file and tensor, and exit code 2."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dovetail.core.checkpoint import open_checkpoint
from dovetail.core.compose import cli
from dovetail.core.errors import ConfigError
from dovetail.core.testing.executor_scripts import SMALL_LLAMA, small_composition
from dovetail.core.worker import loader
from dovetail.core.worker.build import build_quantizer, check_weights

from ...contract.checkpoint.gguf_files import SMALL, byte_tokenizer, small_tensors, write_gguf
from ...layouts import bitsandbytes, compressed_tensors, gptq, pack_quantized, rounded

TINY = "pkg://dovetail.plugins.model.bundled/tiny"
CONFIG = {**SMALL, "intermediate_size": 128, "torch_dtype": "float32"}
Tensors = dict[str, torch.Tensor]
DOWN, Q = "model.layers.0.mlp.down_proj", "model.layers.0.self_attn.q_proj"


def fp8(weight_OI: torch.Tensor) -> Tensors:
    scale = weight_OI.abs().amax(1, keepdim=True) / 448
    return {"weight": (weight_OI / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def eight_bits(**options: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "symmetric": True, **options}


FP8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": eight_bits(strategy="channel"),
            "input_activations": eight_bits(strategy="token", dynamic=True),
        }
    },
    "ignore": ["lm_head"],
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "checkpoint_format": "gptq"}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
PACKED = pack_quantized(num_bits=4, strategy="group", group_size=32, symmetric=False)
LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], Tensors]]] = {
    "fp8": (FP8, fp8),
    "gptq": (GPTQ, lambda weight_OI: gptq(rounded(weight_OI, 4, 32, True, act_order=True))),
    "nf4": (NF4, lambda weight_OI: bitsandbytes(weight_OI, nested=False)),
    "packed": (PACKED, lambda weight_OI: compressed_tensors(rounded(weight_OI, 4, 32, True), 4, True)),
}
NAN = math.nan


def save(folder: Path, layout: str, changes: dict[str, Callable[[torch.Tensor], torch.Tensor] | None]) -> None:
    """Write two files. `changes`: functions of tensors that are changed or added; None for those that are left out."""
    config, store = LAYOUTS[layout]
    tensors: Tensors = {}
    for name, tensor in small_tensors(CONFIG).items():
        prefix = name.removesuffix("weight")
        tensors |= {f"{prefix}{key}": x for key, x in store(tensor).items()} if "_proj." in name else {name: tensor}
    for name, change in changes.items():
        if change is None:
            del tensors[name]
        else:
            tensors[name] = change(tensors[name] if name in tensors else torch.zeros(2))
    files = {name: "two.safetensors" if ".mlp." in name else "one.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({name: x.contiguous() for name, x in tensors.items() if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": config}))
    (folder / "tokenizer.json").write_text(open_checkpoint(TINY).text("tokenizer.json") or "")


def words(path: Path, *overrides: str) -> list[str]:
    return ["app=generate", "model=llama", f"model.path={path}", "engine.device=cpu", *overrides, "--", "Hello"]


def refused(capsys: pytest.CaptureFixture[str], path: Path, *overrides: str) -> str:
    """Run the command line in this process. Return its only message."""
    assert cli.main(words(path, *overrides)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return str(line)


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "resolve_device", lambda *_: pytest.fail("a device is used"))


def place(name: str) -> str:
    """Regular expression of a tensor's file."""
    return rf"/{'two' if '.mlp.' in name else 'one'}\.safetensors"


@pytest.mark.usefixtures("no_device")
@pytest.mark.parametrize(
    ("layout", "name", "change", "says"),
    [
        ("fp8", f"{DOWN}.weight_scale", None, "1 missing"),
        ("packed", f"{Q}.weight_zero_point", None, "1 missing"),
        ("nf4", f"{Q}.weight.absmax", None, "1 missing"),
        ("packed", "model.layers.0.mlp.stray", lambda t: t, "1 unexpected"),
    ],
)
def test_names_show_it(layout, name, change, says, tmp_path, capsys):
    save(tmp_path, layout, {name: change})
    message = refused(capsys, tmp_path)
    assert re.search(rf"{place(name)}: .* {says} \('{re.escape(name)}'\)", message), message


@pytest.mark.usefixtures("no_device")
@pytest.mark.parametrize(
    ("layout", "name", "change", "says"),
    [
        ("fp8", f"{DOWN}.weight", lambda t: t[:-1], r"has shape \(63, 128\)"),
        ("fp8", f"{DOWN}.weight", lambda t: t.float(), "is float32"),
        ("packed", f"{Q}.weight_packed", lambda t: t[:, 1:], r"has shape \(64, 7\)"),
        ("gptq", f"{DOWN}.g_idx", lambda t: t[:-1], r"has shape \(127,\)"),
        ("nf4", f"{DOWN}.weight.quant_map", lambda t: t[:8], "has 8 entries"),
        ("nf4", f"{DOWN}.weight", lambda t: t[:-1], "has 4095 entries"),
        ("fp8", "model.norm.weight", lambda t: t[:-1], r"has shape \(63,\)"),
        ("fp8", "model.norm.weight", lambda t: t.int(), "is int32"),
    ],
)
def test_headers_show_it(layout, name, change, says, tmp_path, capsys):
    save(tmp_path, layout, {name: change})
    message = refused(capsys, tmp_path)
    assert re.search(rf"{place(name)}: tensor '{re.escape(name)}' {says}", message), message


@pytest.mark.parametrize(
    ("layout", "name", "change", "says"),
    [
        ("fp8", f"{DOWN}.weight_scale", lambda t: t * NAN, "must be one positive"),
        ("packed", f"{Q}.weight_scale", lambda t: t / 0, "has values that are not finite"),
        ("gptq", f"{DOWN}.g_idx", lambda t: t + 1, r"has groups \[1, 4\]; there are 4"),
        ("gptq", f"{DOWN}.g_idx", lambda t: t * 0, "must have 32 inputs of each group"),
        ("gptq", f"{Q}.g_idx", lambda t: t.flip(0), "orders inputs unlike another matrix"),
        ("nf4", f"{DOWN}.weight.quant_map", lambda t: t.flip(0), "has other values than NF4"),
    ],
)
def test_values_show_it(layout, name, change, says, tmp_path, capsys):
    save(tmp_path, layout, {name: change})
    message = refused(capsys, tmp_path)
    other = name.replace("q_proj", "[qkv]_proj")  # The matrix that comes later in the file is named.
    assert re.search(rf"{place(name)}: tensor '{other}' {says}", message), message


@pytest.mark.usefixtures("no_device")
@pytest.mark.parametrize(
    ("config", "quant", "says"),
    [
        (FP8, "int4", r"/config\.json: quantization_config\.format is 'float-quantized': quant=int4 reads"),
        (GPTQ, "fp8", r"/config\.json: quantization_config\.quant_method is 'gptq': quant=fp8 reads"),
        (FP8, "none", r"/config\.json: the checkpoint is quantized already .*Unquantized takes plain weights"),
        ({**GPTQ, "bits": 3}, "auto", r"/config\.json: quantization_config\.bits is 3: there are 4, 8"),
        ({"quant_method": "aqlm"}, "auto", r"/config\.json: no installed quantizer reads quant_method 'aqlm'"),
        ({**FP8, "ignore": [Q]}, "auto", rf"/config\.json: quantization_config leaves {Q} unquantized, but not"),
    ],
)  # fmt: skip
def test_the_config_shows_it(config, quant, says, tmp_path, capsys):
    save(tmp_path, "fp8", {})
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": config}))
    assert re.search(says, message := refused(capsys, tmp_path, f"quant={quant}")), message


@pytest.mark.usefixtures("no_device")
def test_gguf_files_show_it(tmp_path, capsys):
    path, types = tmp_path / "x.gguf", {f"{DOWN}.weight": "Q4_1"}
    tokenizer, tensors = byte_tokenizer(), small_tensors(CONFIG)
    write_gguf(path, CONFIG, tensors, tokenizer, types)
    message = refused(capsys, path)
    assert re.search(r"x\.gguf: tensor '.*down_proj\.weight' is in Q4_1; quant=gguf reads Q4_0", message), message
    write_gguf(path, CONFIG, tensors, tokenizer, {f"{DOWN}.weight": "Q4_0"}, architecture="mamba")
    assert re.search(r"x\.gguf: .*mamba", message := refused(capsys, path)), message
    write_gguf(path, CONFIG, tensors, None, {f"{DOWN}.weight": "Q4_0"})
    assert re.search(r"x\.gguf: .*tokenizer", message := refused(capsys, path)), message
    del tensors["model.norm.weight"]
    write_gguf(path, CONFIG, tensors, tokenizer)
    assert re.search(r"x\.gguf: .* 1 missing \('model\.norm\.weight'\)", message := refused(capsys, path)), message


def test_the_program_ends_with_code_2(tmp_path):
    """A truncated file, of which headers are whole."""
    save(tmp_path, "fp8", {})
    file = tmp_path / "two.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    command = [sys.executable, "-m", "dovetail", *words(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and f"{file}: cannot be read as safetensors" in line


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_checks_its_share(rank, tmp_path):
    """Groups of 128 inputs are cut by ranks; the checkpoint's shapes are those of whole matrices."""
    save(tmp_path, "packed", {f"{DOWN}.weight_scale": lambda t: t[:, :2]})
    overrides = ["model.load=auto", "model.hf=null", f"model.path={tmp_path}", "engine.tp=2", "executor=multiproc"]
    composition = small_composition(*overrides)
    with pytest.raises(ConfigError, match=r"two\.safetensors: tensor '.*weight_scale' has shape \(64, 2\)"):
        check_weights(composition, build_quantizer(composition), rank, 2)


def test_a_drafters_checkpoint_is_checked_before_a_device_is_used(tmp_path):
    save(tmp_path, "fp8", {f"{DOWN}.weight_scale": lambda t: t[:2]})
    drafts = ["spec_decode=draft_model", "model@spec_decode.model=llama", f"spec_decode.model.path={tmp_path}"]
    target = ["model.hf=" + SMALL_LLAMA.replace("vocab_size: 97", "vocab_size: 260"), "engine.max_len=64"]
    composition = small_composition(*target, *drafts)
    with pytest.raises(ConfigError, match=r"two\.safetensors: tensor '.*weight_scale' has shape \(2,"):
        check_weights(composition, build_quantizer(composition), 0, 1)


@pytest.mark.parametrize("model", ["llama", pytest.param("transformers", marks=pytest.mark.nightly)])
def test_logits_that_differ_from_the_embedding_to_which_they_are_tied(model, tmp_path, capsys):
    save(tmp_path, "fp8", {"lm_head.weight": lambda t: torch.ones(CONFIG["vocab_size"], CONFIG["hidden_size"])})
    config = {**CONFIG, "model_type": "llama", "tie_word_embeddings": True, "quantization_config": FP8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = refused(capsys, tmp_path, f"model={model}")
    assert "one.safetensors: tensor 'lm_head.weight' differs from 'model.embed_tokens.weight', and" in message
