"""Several quantizers in one model."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail.core.checkpoint import open_checkpoint
from dovetail.core.compose import compose
from dovetail.core.errors import CapabilityError, ConfigError, TextError
from dovetail.core.interfaces import ExpertShape
from dovetail.core.startup_notes import collect_notes
from dovetail.core.testing.model_driver import build_context
from dovetail.plugins.model.config import LlamaConfig
from dovetail.plugins.model.llama.decoder import Llama
from dovetail.plugins.quant.fp8.quantizer import FP8Linear
from dovetail.plugins.quant.int8.format import quantize_rows
from dovetail.plugins.quant.mixed.checkpoint import config_groups, group_of, inferred

from ...layouts import compressed_tensors, rounded
from ...numerics.checkpoints import save_random
from ...numerics.driver import load_model
from ...numerics.test_int4_checkpoints import logits

TINY = "pkg://dovetail.plugins.model.bundled/tiny"


def model(*words: str, path: str = TINY) -> Llama:
    quantizer = compose(["model=llama", f"model.path={path}", *words]).build("quant")
    checkpoint = open_checkpoint(path)
    quantizer.read_checkpoint(checkpoint)
    made = Llama(LlamaConfig(path=path), build_context(Llama.spec(LlamaConfig(path=path)), quantizer=quantizer))
    made.load(checkpoint.open())
    return made


def kinds(made: Llama) -> dict[str, str]:
    return {linear.path: type(linear.method).__name__ for linear in made._linears()}


def test_patterns_choose():
    made = model("quant=mixed", "quant.layers=[layers.*.mlp.down]", "quant@quant.rest=int4", "quant.rest.group=64")
    found = kinds(made)
    assert {name for path, name in found.items() if path.endswith("mlp.down")} == {"FP8Linear"}
    assert {name for path, name in found.items() if not path.endswith("mlp.down")} == {"RoundedLinear"}
    plain, mixed, coarse = (logits(one) for one in (model(), made, model("quant=int4", "quant.group=64")))
    assert 0 < (mixed - plain).norm() < (coarse - plain).norm()


@pytest.mark.parametrize(
    ("pattern", "method"),
    [
        ("*.mlp.*", "FP8Experts"),
        ("*.attn.*", "PlainExperts"),
        ("*.experts.1.*", "NoneType"),
        ("*.experts.*.down", "NoneType"),
    ],
)
def test_experts_have_one_quantizer_or_a_loop(pattern, method):
    made = compose(["quant=mixed", f"quant.layers=['{pattern}']"]).build("quant")
    shape = ExpertShape(2, 64, 32, torch.float32, tuple((f"{e}.w1", f"{e}.w3", f"{e}.w2") for e in range(2)))
    assert type(made.experts("layers.3.mlp.experts", shape)).__name__ == method


def test_three_quantizers_nest():
    words = ("quant.layers=[layers.0.*]", "quant@quant.rest=mixed", "quant.rest.layers=[layers.1.*]")
    found = kinds(model("quant=mixed", *words, "quant@quant.rest.those=int4"))
    downs = [name for path, name in found.items() if path.endswith("mlp.down")]
    assert downs == ["FP8Linear", "RoundedLinear", *["PlainLinear"] * (len(downs) - 2)]


def test_needs_of_both_are_stated():
    from dovetail.core.compose.capabilities import Host

    old = Host(device="cuda", device_count=1, compute_capability=(8, 0))
    words = ["quant=mixed", "quant.those.activations=fp8", "quant@quant.rest=int4"]
    stated = compose(words).part("quant").capabilities(old)
    assert stated.requires and stated.provides["weight_bits"] < 5


def weights(bits: int, **more: object) -> dict[str, object]:
    return {"num_bits": bits, "type": "int", "symmetric": bits == 8, **more}


GROUPS = {
    "group_0": {"targets": [r"re:.*\.(down_proj|v_proj)$"], "weights": weights(8, strategy="channel")},
    "group_1": {"targets": ["Linear"], "weights": weights(4, strategy="group", group_size=32)},
}
SAID = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": GROUPS,
    "ignore": ["lm_head"],
}


@pytest.fixture
def grouped(tmp_path):
    """A checkpoint with 8 bits in `down` and v, 4 bits elsewhere, and a folder with its values."""
    save_random(tmp_path, "gqa", hidden_size=128, vocab_size=208)
    plain = {name: t for file in tmp_path.glob("*.safetensors") for name, t in load_file(file).items()}
    stored = dict(plain)
    for name in [name for name in plain if name.endswith("_proj.weight")]:
        eight = "down" in name or ".v_proj" in name
        matrix = rounded(stored.pop(name), 8 if eight else 4, 0 if eight else 32, not eight)
        plain[name] = matrix.weight()
        tensors = compressed_tensors(matrix, 8 if eight else 4, not eight)
        stored |= {f"{name.removesuffix('weight')}{key}": tensor.contiguous() for key, tensor in tensors.items()}
    hf = json.loads((tmp_path / "config.json").read_text())
    for kind, content, more in (("stored", stored, {"quantization_config": SAID}), ("plain", plain, {})):
        (tmp_path / kind).mkdir()
        save_file(content, tmp_path / kind / "model.safetensors")
        (tmp_path / kind / "config.json").write_text(json.dumps({**hf, **more}))
    return tmp_path


def test_groups_of_a_checkpoint(grouped):
    """quant=auto chooses it; q|k|v is merged from 4 and 8 bits."""
    words = ["model=llama", f"model.path={grouped}/stored"]
    assert compose(words).part("quant").name == "mixed"
    made = model(path=str(grouped / "stored"))
    assert type(made.blocks[0].attention.qkv.method).__name__ == "StackedLinear"
    torch.testing.assert_close(logits(made), logits(load_model(grouped / "plain")), atol=2e-4, rtol=0)


def test_groups_without_a_format_have_the_one_that_the_library_infers(grouped):
    """compressed-tensors 0.20 states mixed-precision for the whole file, and then infers the format of each group."""
    config = grouped / "stored/config.json"
    hf = json.loads(config.read_text())
    config.write_text(json.dumps({**hf, "quantization_config": {**SAID, "format": "mixed-precision"}}))
    made = model(path=str(grouped / "stored"))
    torch.testing.assert_close(logits(made), logits(load_model(grouped / "plain")), atol=2e-4, rtol=0)
    tokens = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    schemes = {
        "int-quantized": (weights(8), weights(8)),
        "float-quantized": ({"num_bits": 8, "type": "float"}, tokens),
        "naive-quantized": ({"num_bits": 8, "type": "float"}, None),
        "nvfp4-pack-quantized": ({"num_bits": 4, "type": "float", "group_size": 16}, None),
        "mxfp4-pack-quantized": ({"num_bits": 4, "type": "float", "group_size": 32}, tokens),
        "mxfp8-quantized": ({"num_bits": 8, "type": "float", "group_size": 32, "scale_dtype": "torch.uint8"}, tokens),
    }
    for form, (each, inputs) in schemes.items():
        assert inferred({"weights": each, "input_activations": inputs}) == form


def test_targets_match_in_the_order_of_compressed_tensors():
    groups = [(("Linear", "re:.*mlp.*"), 0), ((r"re:.*down_proj", "Linear"), 1), (("l.0.mlp.down_proj",), 2)]
    found = [group_of(name, groups, ["re:.*head"]) for name in ("l.0.mlp.down_proj", "l.1.mlp.down_proj")]
    assert found == [2, 1], "names come before patterns, and those are in alphabetical order"
    assert [group_of(name, groups, ["re:.*head"]) for name in ("l.0.mlp.up_proj", "l.0.q_proj", "lm_head")] == [
        0,
        1,
        None,
    ]


def test_a_single_group_may_be_for_some_layers(grouped):
    config = grouped / "stored/config.json"
    hf = json.loads(config.read_text())
    for targets, name in ((["Linear"], "int4"), ([r"re:.*_proj$"], "mixed")):
        groups = {"group_1": {**GROUPS["group_1"], "targets": targets}}
        config.write_text(json.dumps({**hf, "quantization_config": {**SAID, "config_groups": groups}}))
        assert compose(["model=llama", f"model.path={grouped}/stored"]).part("quant").name == name


def test_a_part_of_a_merged_layer_may_be_plain(grouped):
    """v is ignored, q and k have 4 bits."""
    config = grouped / "stored/config.json"
    hf = json.loads(config.read_text())
    said = {**SAID, "ignore": ["lm_head", "re:.*v_proj"]}
    config.write_text(json.dumps({**hf, "quantization_config": said}))
    stored, plain = (load_file(grouped / kind / "model.safetensors") for kind in ("stored", "plain"))
    kept = {name: tensor for name, tensor in stored.items() if ".v_proj." not in name}
    kept |= {name: tensor for name, tensor in plain.items() if ".v_proj." in name}
    save_file(kept, grouped / "stored/model.safetensors")
    made = model(path=str(grouped / "stored"))
    torch.testing.assert_close(logits(made), logits(load_model(grouped / "plain")), atol=2e-4, rtol=0)
    with collect_notes() as notes:
        eight = model("quant.activations=fp8", path=str(grouped / "stored"))
    inputs = {linear.path: linear.method.input.name for linear in eight._linears()}
    assert (inputs["layers.0.attn.qkv"], inputs["layers.0.attn.o"]) == ("plain", "fp8_token")
    (said,) = notes
    assert said.startswith(
        "layers.*.attn.qkv merges matrices with inputs in fp8_token and plain, so they have the model"
    )


def test_patterns_beside_groups_are_an_error(grouped):
    with pytest.raises(ConfigError, match=r"quant\.layers is set, but this checkpoint states the format"):
        model("quant=mixed", "quant.layers=[layers.0.*]", path=str(grouped / "stored"))


def test_parts_of_a_merged_layer_have_one_input_format(grouped):
    config = grouped / "stored/config.json"
    hf = json.loads(config.read_text())
    group = {**GROUPS["group_0"], "format": "int-quantized", "targets": [r"re:.*v_proj$"]}
    group["input_activations"] = {**weights(8, strategy="token"), "dynamic": True}
    groups = {"group_0": group, "group_1": GROUPS["group_1"]}
    config.write_text(json.dumps({**hf, "quantization_config": {**SAID, "config_groups": groups}}))
    with pytest.raises(CapabilityError, match=r"attn\.qkv: its matrices need inputs in int8_token and plain"):
        model(path=str(grouped / "stored"))


def test_options_reach_the_groups(grouped):
    """Also through quant=auto. Logits are plain in the file."""
    path = str(grouped / "stored")
    expected, eight = logits(model(path=path)), model("quant.activations=fp8", "quant.head=fp8", path=path)
    inputs = {linear.method.input.name for linear in eight._linears() if linear.path.startswith("layers")}
    assert inputs == {"fp8_token"} and isinstance(eight.head.table.method, FP8Linear)
    assert 0 < (logits(eight) - expected).norm() < 0.4 * expected.norm()
    unchanged = model("quant.activations=model", "quant.head=plain", path=path)
    assert torch.equal(logits(unchanged), expected)


def test_an_option_that_some_groups_have_not_is_noted_and_one_that_none_has_is_an_error(grouped):
    config = grouped / "stored/config.json"
    hf = json.loads(config.read_text())
    w8a8 = {**GROUPS["group_0"], "format": "int-quantized", "targets": [r"re:.*down_proj"]}
    w8a8["input_activations"] = {**weights(8, strategy="token"), "dynamic": True}

    def read(groups, *words):
        config.write_text(json.dumps({**hf, "quantization_config": {**SAID, "config_groups": groups}}))
        made = compose(["model=llama", f"model.path={grouped}/stored", "quant=mixed", *words]).build("quant")
        with collect_notes() as notes:
            made.read_checkpoint(open_checkpoint(grouped / "stored"))
        return list(notes)

    groups = {"group_0": w8a8, "group_1": GROUPS["group_1"]}
    assert read(groups) == []
    (said,) = read(groups, "quant.activations=fp8")
    assert said.startswith("quant.activations=fp8 does not apply to group_0 (quant=int8) of config_groups: inputs of")
    with pytest.raises(ConfigError, match=r"quant\.activations=fp8 does not apply to a \(quant=int8\) .* leave it out"):
        read({"a": w8a8}, "quant.activations=fp8")
    with pytest.raises(ConfigError, match=r"quant\.activations=int3 does not apply to group_0 .* and group_1 \("):
        read(groups, "quant.activations=int3")


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        (None, "config_groups is None: it must be an object"),
        ({}, r"config_groups is \{\}: it must be an object with a group"),
        (
            {"a": {"targets": ["Linear"], "weights": {"num_bits": [4]}}},
            r"weights\.num_bits is \[4\]: it must be a whole",
        ),
        ({"a": {"targets": ["Linear"], "weights": {"group_size": {}}}}, r"weights\.group_size is \{\}: it must be a"),
    ],
)
def test_groups_of_another_type_are_refused(groups, says):
    said = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    with pytest.raises(TextError, match=says):
        config_groups({"quantization_config": said})


def test_quantized_logits_stay_as_they_are(grouped):
    """int8 has no option `head`; the file quantizes lm_head."""
    for kind in ("stored", "plain"):
        file = grouped / kind / "model.safetensors"
        tensors = load_file(file)
        values, scale = quantize_rows(tensors.pop("lm_head.weight"))
        more = {"lm_head.weight": values, "lm_head.weight_scale": scale}
        save_file({**tensors, **(more if kind == "stored" else {"lm_head.weight": values * scale})}, file)
    config = grouped / "stored/config.json"
    hf = json.loads(config.read_text())
    head = {"targets": ["lm_head"], "format": "int-quantized", "weights": weights(8, strategy="channel")}
    head["input_activations"] = {**weights(8, strategy="token"), "dynamic": True}
    said = {**SAID, "config_groups": {**GROUPS, "group_2": head}, "ignore": []}
    config.write_text(json.dumps({**hf, "quantization_config": said}))
    made, plain = logits(model(path=str(grouped / "stored"))), logits(load_model(grouped / "plain"))
    assert (made - plain).norm() < 0.02 * plain.norm()
    with pytest.raises(ConfigError, match=r"quant\.head=fp8: the checkpoint has quantized logits; set"):
        model("quant.head=fp8", path=str(grouped / "stored"))


def test_options_of_groups_are_for_checkpoints_that_have_some():
    """Also with random weights, whose headers no quantizer reads."""
    says = r"quant\.head=fp8 is for a checkpoint with several config_groups"
    with pytest.raises(ConfigError, match=says):
        model("quant=mixed", "quant.head=fp8")
    unread = compose(["quant=mixed", "quant.head=fp8"]).build("quant")
    with pytest.raises(ConfigError, match=says):
        Llama(LlamaConfig(path=TINY), build_context(Llama.spec(LlamaConfig(path=TINY)), quantizer=unread))
