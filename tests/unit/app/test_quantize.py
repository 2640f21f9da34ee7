"""app=quantize: quality, layouts, resumption and what transformers loads, on the bundled model."""

from __future__ import annotations

import inspect
import json
import shutil
import textwrap
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from dovetail.core.compose import compose
from dovetail.core.worker.build import build_quantizer, check_weights
from dovetail.plugins.app import waiting
from dovetail.plugins.app.quantize.calibration import InputStatistics
from dovetail.plugins.app.quantize.decoder import Decoder
from dovetail.plugins.app.quantize.folder import OutputFolder
from dovetail.plugins.app.quantize.gptq import gptq
from dovetail.plugins.app.quantize.grid import Grid, round_to_nearest, search_clip
from dovetail.plugins.app.quantize.scaling import awq_scale, fold
from dovetail.plugins.model.llama.families import read_spec

from .quantized import TINY, loaded, plain_weights, quantize, tensors_in

TEXT = inspect.getsourcefile(textwrap)
SMALL = ("quantize.samples=4", "quantize.length=64", f"quantize.text={TEXT}")
GROUPS = Grid(4, 32, False, torch.float16)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose sizes are multiples of 128, with the bundled tokenizer."""
    folder = tmp_path_factory.mktemp("small")
    shutil.copytree(TINY, folder, dirs_exist_ok=True, ignore=lambda *_: ["config.json", "model.safetensors"])
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "max_position_embeddings": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
    config = LlamaConfig(vocab_size=4096, eos_token_id=0, bos_token_id=0, **sizes, **heads)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def gram_of(inputs: int, tokens: int) -> torch.Tensor:
    x = torch.randn(tokens, inputs) @ torch.randn(inputs, inputs) * torch.rand(inputs).exp()
    return x.t() @ x


def output_error(weight: torch.Tensor, values: torch.Tensor, gram: torch.Tensor) -> float:
    off = values - weight
    return ((off @ gram) * off).sum().item()


@pytest.mark.parametrize("order", ["none", "static", "group"])
@pytest.mark.parametrize("inputs", [96, 83])
def test_gptq_minimizes_each_columns_error_in_turn(order: str, inputs: int) -> None:
    """An independent form of the algorithm: Optimal Brain Quantization (Frantar & Alistarh 2022), which removes one
    column at a time from the inverse Hessian."""
    weight, gram = torch.randn(5, inputs), gram_of(inputs, 4 * inputs)
    found = gptq(weight, gram, GROUPS, 0.01, order)
    hessian = gram.double() + 0.01 * gram.diagonal().double().mean() * torch.eye(inputs, dtype=torch.float64)
    inverse, left, groups = torch.linalg.inv(hessian), weight.double().clone(), found.groups().long()
    columns = gram.diagonal().argsort(descending=True).tolist() if order != "none" else range(inputs)
    scale, zero = found.scale_OG.float(), found.zero_OG.float()
    same = 0
    for i in columns:
        code = GROUPS.codes(left[:, i].float(), scale[:, groups[i]], zero[:, groups[i]])
        same += (code == found.codes_OI[:, i]).sum().item()
        value = ((found.codes_OI[:, i] - zero[:, groups[i]]) * scale[:, groups[i]]).double()
        left += torch.outer((value - left[:, i]) / inverse[i, i], inverse[i])
        inverse -= torch.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    # A weight halfway between two codes may round to either.
    assert same >= 0.99 * weight.numel()
    nearest = round_to_nearest(weight, GROUPS).values(torch.float32)
    assert output_error(weight, found.values(torch.float32), gram) < 0.8 * output_error(weight, nearest, gram)


def test_scale_and_clip_of_awq_lower_the_error_of_outputs() -> None:
    weight, channels = torch.randn(16, 96), torch.ones(96)
    channels[::16] = 30
    x = torch.randn(400, 96) * channels
    gram, plain = x.t() @ x, round_to_nearest(weight, GROUPS).values(torch.float32)
    scale = awq_scale(weight, gram, x.abs().mean(0), GROUPS)
    scaled = round_to_nearest(weight * scale, GROUPS).values(torch.float32) / scale
    assert output_error(weight, scaled, gram) < 0.5 * output_error(weight, plain, gram)
    heavy = torch.randn(8, 90) ** 3
    for gram_of_weights in (None, torch.eye(90)):
        ratio = search_clip(heavy, GROUPS, gram_of_weights)
        clipped = round_to_nearest(heavy, GROUPS, ratio).values(torch.float32)
        nearest = round_to_nearest(heavy, GROUPS).values(torch.float32)
        assert (clipped - heavy).square().sum() < (nearest - heavy).square().sum()


def test_a_fold_into_a_norm_is_exact_despite_its_rounding() -> None:
    norm = torch.randn(64).bfloat16()
    norm[3] = 0
    divided, scale = fold(norm, torch.rand(64) + 0.5)
    torch.testing.assert_close(divided.float() * scale, norm.float())
    assert divided.dtype is torch.bfloat16 and scale[3] == 1


def test_statistics_of_a_divided_input() -> None:
    x, scale = torch.randn(3, 50, 8), torch.rand(8) + 0.5
    whole, divided = (InputStatistics.empty(8, x.device) for _ in range(2))
    for part in x:
        whole.add(part)
        divided.add(part / scale)
    torch.testing.assert_close(whole.divided(scale).gram_II, divided.gram_II, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(whole.divided(scale).largest_I, divided.largest_I)
    assert whole.tokens == 150


def test_blocks_equal_those_of_transformers() -> None:
    model, weights = loaded(plain_weights(TINY)), plain_weights(TINY)
    hf = json.loads((TINY / "config.json").read_text())
    decoder, ids = Decoder.read(read_spec(hf, "config.json")), torch.randint(0, 4096, (2, 40))
    x, table = torch.nn.functional.embedding(ids, weights["model.embed_tokens.weight"]), decoder.table(40, ids.device)
    with torch.inference_mode():
        expected = model.model(ids, output_hidden_states=True).hidden_states
        for layer in range(7):
            prefix = f"model.layers.{layer}."
            block = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
            x = decoder.run(layer, block, x, table)
            torch.testing.assert_close(x, expected[layer + 1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "words",
    [
        ("quantize.group=32", "quantize.kv=true"),
        ("quantize.method=gptq", "quantize.act_order=static"),
        ("quantize.format=w8a16", "quantize.group=0", "quantize.clip=true"),
        ("quantize.method=smoothquant",),
        ("quantize.format=fp8",),
    ],
    ids=str,
)
def test_transformers_loads_the_folder(small: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    pytest.importorskip("compressed_tensors")
    assert quantize(tmp_path / "made", *words, *SMALL, source=small) == 0
    stated = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32).eval()
    decoded, ids = loaded(plain_weights(tmp_path / "made"), small), torch.randint(0, 4096, (2, 20))
    with torch.inference_mode():
        got, expected = read(ids).logits, decoded(ids).logits
        exact = loaded(plain_weights(small), small)(ids).logits
    activations = stated["config_groups"]["group_0"]["input_activations"]
    off = 0.2 if activations else 0.02
    assert (got - expected).norm() < off * expected.norm()
    # Unrelated weights would be off by 1.4. Random weights lose more than trained ones, and these sequences are few.
    assert 0 < (got - exact).norm() < 0.9 * exact.norm()
    if "quantize.kv=true" in words:
        scale = tensors_in(tmp_path / "made")["model.layers.1.self_attn.k_scale"]
        assert scale.shape == (1,) and 0 < scale < 1 and stated["kv_cache_scheme"]["type"] == "float"
        composition = compose(["model=llama", f"model.path={tmp_path}/made"])
        check_weights(composition, build_quantizer(composition), 0, 1)


@pytest.mark.parametrize(("layout", "method"), [("compressed-tensors", "awq"), ("awq", "awq"), ("gptq", "gptq")])
def test_layouts_hold_weights_near_the_plain_ones(small: Path, tmp_path: Path, layout: str, method: str) -> None:
    chosen = (f"quantize.method={method}", f"quantize.layout={layout}", "quantize.symmetric=false", "quantize.group=32")
    assert quantize(tmp_path / "made", *chosen, *SMALL, source=small) == 0
    ids = torch.randint(0, 4096, (2, 20))
    with torch.inference_mode():
        got = loaded(plain_weights(tmp_path / "made"), small)(ids).logits
        exact = loaded(plain_weights(small), small)(ids).logits
    assert 0 < (got - exact).norm() < 0.5 * exact.norm()


def test_an_interrupted_run_continues(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("quantize.method=gptq", *SMALL)
    with monkeypatch.context() as patched:
        patched.setattr(waiting, "SECONDS", 0.01)
        assert quantize(tmp_path / "whole", *words, source=small) == 0
    assert "quantizing for 0 s: layer 1 of 2, " in capsys.readouterr().err
    assert len({file.stat().st_mode for file in (tmp_path / "whole").iterdir()}) == 1, "the umask's"
    write = OutputFolder.write_layer

    def stops(self: OutputFolder, index: int, *given: object) -> None:
        if index == 1:
            raise KeyboardInterrupt
        write(self, index, *given)

    with monkeypatch.context() as patched:
        patched.setattr(OutputFolder, "write_layer", stops)
        assert quantize(tmp_path / "part", *words, source=small) == 130
    assert quantize(tmp_path / "part", *words, "quantize.damping=0.02", source=small) == 2
    assert "damping=0.01 (now 0.02)" in capsys.readouterr().err
    assert quantize(tmp_path / "part", *words, source=small) == 0
    whole, part = tensors_in(tmp_path / "whole"), tensors_in(tmp_path / "part")
    assert whole.keys() == part.keys() and all(torch.equal(whole[name], part[name]) for name in whole)
    assert sorted(file.name for file in (tmp_path / "whole").iterdir()) == sorted(
        file.name for file in (tmp_path / "part").iterdir()
    )
    assert quantize(tmp_path / "part", *words, source=small) == 0
    assert "is finished" in capsys.readouterr().err
    (tmp_path / "part" / "quantize.json").unlink()
    assert quantize(tmp_path / "part", *words, source=small) == 2
    assert "give a new one, or empty it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("quantize.method=smoothquant", "quantize.format=w4a16"), "use w8a8 or fp8"),
        (("quantize.method=gptq", "quantize.format=fp8"), "not fp8"),
        (("quantize.layout=awq", "quantize.format=w8a16"), "layout=awq has no w8a16"),
        (("quantize.act_order=group",), "an option of method=gptq"),
        (("quantize.layout=gptq", "quantize.kv=true"), "no KV scales"),
        (("quantize.kv=true", "quantize.text=absent.txt"), "absent.txt"),
        (("quantize.kv=true", "quantize.text={source}/config.json"), "use a longer text"),
    ],
    ids=str,
)
def test_refused(
    small: Path, tmp_path: Path, words: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantize(tmp_path / "made", *(word.format(source=small) for word in words), source=small) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "made").exists()
