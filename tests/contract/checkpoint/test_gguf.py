"""GGUF files: the contract suite, equality with the checkpoints that they are made of, and what is refused."""

from __future__ import annotations

import json
import math
import struct
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dovetail import LLM, SamplingParams
from dovetail.core.chat_template import ChatTemplate
from dovetail.core.checkpoint import open_checkpoint
from dovetail.core.checkpoint.gguf import GGUFCheckpoint
from dovetail.core.config_json import ConfigJson
from dovetail.core.errors import ConfigError
from dovetail.core.rope import read_rope
from dovetail.core.testing.checkpoint import CheckpointContract
from dovetail.core.tokenizer import Tokenizer
from dovetail.plugins.quant.config import FP8Config, NoneConfig
from dovetail.plugins.quant.fp8.quantizer import FP8
from dovetail.plugins.quant.none import Unquantized

from .gguf_files import SMALL, byte_tokenizer, read_tokenizer, small_tensors, write_gguf
from .test_builtin import TINY

Q_PROJ, K_PROJ = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qk")
DOWN = "model.layers.0.mlp.down_proj.weight"


class TestGGUF(CheckpointContract):
    reader = GGUFCheckpoint

    def save(self, folder: Path) -> Path:
        types = {Q_PROJ: "Q8_0", DOWN: "Q4_0", K_PROJ: "F16"}
        return write_gguf(folder / "small.gguf", tokenizer=byte_tokenizer(), types=types)


class TestSplitGGUF(CheckpointContract):
    reader = GGUFCheckpoint

    def save(self, folder: Path) -> Path:
        return write_gguf(folder / "small.gguf", tokenizer=byte_tokenizer(), split=5)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of the bundled model, converted."""
    config = json.loads((TINY / "config.json").read_text())
    path = tmp_path_factory.mktemp("gguf") / "tiny-BF16.gguf"
    return write_gguf(path, config, load_file(TINY / "model.safetensors"), read_tokenizer(TINY))


def test_a_plain_file_generates_what_its_folder_does(tiny: Path) -> None:
    prompts, sampling = [[0, 5, 9, 100], [0, 77]], SamplingParams(temperature=0.0, max_tokens=8)
    texts = []
    for model in (tiny, TINY):
        with LLM(str(model), overrides=["engine.device=cpu", "engine.kv_pages=64"]) as llm:
            texts.append([(result.token_ids, result.text) for result in llm.generate(prompts, sampling)])
            assert llm.info.model == ("tiny-BF16" if model is tiny else "tiny")
    assert texts[0] == texts[1]


def test_config_is_that_of_the_folder(tiny: Path) -> None:
    ours, theirs = (open_checkpoint(path).config() for path in (tiny, TINY))
    assert ours.pop("eos_token_id") == [theirs["eos_token_id"]]
    differs = {key: (value, theirs.get(key)) for key, value in ours.items() if value != theirs.get(key)}
    assert not differs


@pytest.mark.parametrize("name", [Q_PROJ, K_PROJ, DOWN])
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_rows_of_blocks_are_in_the_order_of_hugging_face(name: str, kind: str, tmp_path: Path) -> None:
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", types={name: kind}))
    number = gguf.GGMLQuantizationType[kind]
    stored = dict(checkpoint.open())[name]()
    expected = gguf.quants.quantize(small_tensors()[name].numpy(), number)
    assert np.array_equal(stored[3:40:2].numpy(), expected[3:40:2])
    block = gguf.GGML_QUANT_SIZES[number][1]
    assert np.array_equal(stored[:, block : 2 * block].numpy(), expected[:, block : 2 * block])
    header = checkpoint.tensors()[name]
    assert (header.dtype, header.blocks, header.shape) == ("U8", kind, expected.shape)


@pytest.mark.parametrize("quantizer", [Unquantized(NoneConfig()), FP8(FP8Config())], ids=["none", "fp8"])
def test_a_quantizer_of_plain_weights_refuses_blocks(quantizer: FP8 | Unquantized, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", types={DOWN: "Q4_0"})
    with pytest.raises(ConfigError, match="quant_method.* 'gguf'"):
        quantizer.read_checkpoint(GGUFCheckpoint(path))


def test_other_architectures_have_their_rows_as_they_are(tmp_path: Path) -> None:
    config = {**SMALL, "architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
    vector = torch.randn(16)
    extra = {"blk.0.attn_q_norm.weight": vector, "blk.0.attn_k_norm.weight": vector}
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", config, extra=extra))
    tensors = {name: opener()[:] for name, opener in checkpoint.open()}
    assert torch.equal(tensors[Q_PROJ], small_tensors()[Q_PROJ])
    assert torch.equal(tensors["model.layers.0.self_attn.q_norm.weight"], vector)
    assert checkpoint.config()["head_dim"] == 16 and not checkpoint.config()["tie_word_embeddings"]


def llama3_factors(factor: float, dim: int, theta: float) -> torch.Tensor:
    """Factors as convert_hf_to_gguf.py writes them."""
    found = []
    for freq in (1 / theta ** (2 * i / dim) for i in range(dim // 2)):
        wavelen = 2 * math.pi / freq
        smooth = (8192 / wavelen - 1) / (4 - 1)
        found.append(1.0 if wavelen < 8192 / 4 else factor if wavelen > 8192 else 1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(found)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rotary_factors_become_the_scaling_of_llama_3(factor: float, tmp_path: Path) -> None:
    config = {**SMALL, "rope_theta": 500000.0}
    extra = {"rope_freqs.weight": llama3_factors(factor, 16, 500000.0)}
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", config, extra=extra))
    rope = read_rope(ConfigJson(checkpoint.config(), "config.json"), 16, 64)
    assert (rope.kind, rope.factor, rope.low, rope.high, rope.trained_len) == ("llama3", factor, 1.0, 4.0, 8192)
    extra["rope_freqs.weight"][4] *= 1.1
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight has factors"):
        GGUFCheckpoint(write_gguf(tmp_path / "n.gguf", config, extra=extra)).config()


def test_a_transformers_without_tokenizers_of_gguf_files_is_named(tmp_path: Path, monkeypatch) -> None:
    from transformers.integrations.gguf import gguf_tokenizer_mapping

    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tokenizer=byte_tokenizer()))
    monkeypatch.delattr(gguf_tokenizer_mapping, "GGUF_TOKENIZER_MAPPING")
    with pytest.raises(ConfigError, match=r"need transformers 5.24 .*pip install 'dovetail\[gguf\]'"):
        checkpoint.text("tokenizer.json")


def test_the_tokenizer_and_the_chat_template(tmp_path: Path) -> None:
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tokenizer=byte_tokenizer()))
    tokenizer, vocab = Tokenizer(checkpoint), byte_tokenizer()["model"]["vocab"]
    ids = tokenizer.encode("abcde<bos>")
    assert ids == [0, vocab["abc"], vocab["de"], 0] and tokenizer.decode(ids) == "abcde"
    assert tokenizer.encode("a", special=False) == [vocab["a"]]
    template = ChatTemplate.load(checkpoint)
    assert (
        template is not None and template.source.startswith("{{ bos_token") and template.special["bos_token"] == "<bos>"
    )


def change(path: Path, tensor: str, number: int) -> Path:
    """Overwrite the type of a tensor in the table of tensors."""
    content = bytearray(path.read_bytes())
    at = content.index(struct.pack("<Q", len(tensor)) + tensor.encode()) + 8 + len(tensor)
    (dimensions,) = struct.unpack_from("<I", content, at)
    struct.pack_into("<I", content, at + 4 + 8 * dimensions, number)
    path.write_bytes(content)
    return path


def cut(path: Path, size: int) -> Path:
    path.write_bytes(path.read_bytes()[:size])
    return path


def without_a_split(path: Path) -> Path:
    next(path.parent.glob("*-00002-of-*")).unlink()
    return path


def swap_splits(path: Path) -> Path:
    """Exchange the names of the last two."""
    second, third = (path.with_name(path.name.replace("-00001-", f"-0000{number}-")) for number in (2, 3))
    content = second.read_bytes()
    third.rename(second)
    third.write_bytes(content)
    return path


def with_a_split_of_another_model(path: Path) -> Path:
    other = write_gguf(path.with_name("other.gguf"), split=3)
    other.with_name(other.name.replace("-00001-", "-00002-")).rename(
        path.with_name(path.name.replace("-00001-", "-00002-"))
    )
    return path


@pytest.mark.parametrize(
    ("options", "damage", "words"),
    [
        ({}, lambda path: cut(path, -4096), r"m\.gguf: tensor '.*\.weight' ends at byte .* truncated"),
        ({}, lambda path: cut(path, 100), r"m\.gguf: the GGUF header is truncated"),
        ({}, lambda path: change(path, "output.weight", 999), r"'output\.weight' has the unknown GGUF type 999"),
        ({}, lambda path: change(path, "output.weight", 28), r"tensor 'output\.weight' "),
        ({"split": 5}, without_a_split, r"m-00002-of-00003\.gguf: this split is missing"),
        ({"split": 5}, lambda path: path.rename(path.parent / "m.gguf"), r"this is one of 3 splits"),
        ({"split": 5}, lambda path: path.parent, r"no config\.json\. A GGUF file .*/m-00001-of-00003\.gguf"),
        ({"split": 5}, swap_splits, r"m-00002-of-00003\.gguf: split\.no is 2 in its metadata, and 1 by its name"),
        ({"split": 5}, with_a_split_of_another_model, r"m-00002-of-00003\.gguf: split\.count is 4 in its metadata"),
        (
            {"architecture": "bert"},
            None,
            r"general\.architecture is 'bert'; GGUF files are read for llama, qwen2, qwen3",
        ),
        (
            {"extra": {"blk.0.ffn_gate_exps.weight": torch.ones(2, 2)}},
            None,
            r"'blk\.0\.ffn_gate_exps\.weight' is not part",
        ),
        ({"expert_count": 8}, None, r"llama\.expert_count is 8, which is not supported"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4, "rope.scaling.yarn_beta_fast": 16},
            None,
            r"llama\.rope\.scaling\.yarn_beta_fast is 16, which is not supported",
        ),
        ({"rope.scaling.type": "longrope"}, None, r"llama\.rope\.scaling\.type is 'longrope'"),
        ({}, None, r"m\.gguf: no tokenizer \(tokenizer\.ggml\.model is None\)"),
    ],
)
def test_what_is_refused(options, damage, words, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", **options)
    with pytest.raises(ConfigError, match=words):
        checkpoint = open_checkpoint(path if damage is None else damage(path))
        checkpoint.tensors()
        checkpoint.config()
        checkpoint.text("tokenizer.json")


def test_any_cut_is_a_message(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tokenizer=byte_tokenizer())
    content = path.read_bytes()
    for size in np.random.default_rng(0).integers(4, len(content) - 4096, 40):
        part = tmp_path / f"{size}.gguf"
        part.write_bytes(content[:size])
        with pytest.raises(ConfigError, match=rf"{size}\.gguf: "):
            open_checkpoint(part).tensors()


def test_the_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"pip install 'dovetail\[gguf\]'"):
        open_checkpoint(path).tensors()
