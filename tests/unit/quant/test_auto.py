"""quant=auto chooses the component that reads the checkpoint."""

import json
import re
from types import SimpleNamespace

import pytest

from dovetail.core.checkpoint import open_checkpoint
from dovetail.core.compose import compose
from dovetail.core.errors import ConfigError
from dovetail.plugins.quant.auto import choose
from dovetail.plugins.quant.config import AutoConfig, GGUFConfig

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


@pytest.fixture
def folder(tmp_path):
    def write(stored=None, **more):
        quantization = {} if stored is None else {"quantization_config": stored}
        (tmp_path / "config.json").write_text(json.dumps({**SHAPE, **quantization, **more}))
        return ["model=llama", f"model.path={tmp_path}"]

    return write


def test_the_checkpoint_decides(folder):
    assert compose(folder()).part("quant").name == "none"
    assert compose(folder(FP8)).part("quant").name == "fp8"
    assert compose([*folder(FP8), "quant=none"]).part("quant").name == "none"
    mxfp4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    assert compose(folder(mxfp4)).part("quant").name == "fp4"


def test_plans_count_the_weights_of_the_checkpoint(folder):
    from dovetail.core.compose.capabilities import Host

    assert compose(folder(FP8)).part("quant").capabilities(Host()).provides["weight_bits"] == 8


def test_options_are_passed_on(folder):
    words = [*folder(FP8), "quant.activations=plain", "quant.head=fp8"]
    assert compose(words).part("quant").config.model_dump() | {"activations": "plain", "head": "fp8"} == (
        compose(words).part("quant").config.model_dump()
    )
    with pytest.raises(ConfigError, match=r"quant\.activations=plain: quant=auto chose quant=none, which has no such"):
        compose([*folder(), "quant.activations=plain"])
    with pytest.raises(ConfigError) as caught:
        compose([*folder(FP8), "quant.activations=int3"])
    message = "quant.activations=int3: quant=auto chose quant=fp8, where it should be 'auto', 'fp8', 'model' or 'plain'"
    assert str(caught.value).endswith(message)


def test_composing_the_same_words_again_gives_the_same(folder):
    first = compose(folder(FP8))
    assert compose(first.overrides).nodes() == first.nodes() and first.choices["quant"] == "auto"


def test_an_unknown_method_is_an_error_that_lists_the_readers(folder):
    with pytest.raises(ConfigError, match=re.escape("no installed quantizer reads quant_method 'aqlm'")) as caught:
        compose(folder({"quant_method": "aqlm"}))
    assert "quant=fp8" in str(caught.value)
    with pytest.raises(ConfigError, match="format 'marlin-24'"):
        compose(folder({"quant_method": "compressed-tensors", "format": "marlin-24"}))
    with pytest.raises(ConfigError, match=r"quant_method 'bitsandbytes' with {'load_in_8bit': True}\. Those"):
        compose(folder({"quant_method": "bitsandbytes", "load_in_8bit": True}))
    with pytest.raises(ConfigError, match="no installed quantizer reads"):
        compose(folder([1]))


def test_two_readers_are_an_error():
    spec = SimpleNamespace(hf={"quantization_config": FP8}, checkpoint=None)
    readers = {"fp8": lambda hf: True, "acme": lambda hf: True, "int8": lambda hf: False}
    with pytest.raises(
        ConfigError, match="several quantizers read quant_method 'fp8' with .*: set quant=fp8 or quant=acme"
    ):
        choose(AutoConfig(), spec, readers)
    assert choose(AutoConfig(), spec, {"acme": readers["acme"]}) == "acme"
    assert choose(AutoConfig(), None, readers) == "none"


def test_a_checkpoint_that_cannot_be_read_is_left_to_those_who_need_it(tmp_path):
    assert compose(["model=llama", f"model.path={tmp_path}"]).part("quant").name == "auto"


def test_plain_weights_are_not_run_by_a_quantizer_of_blocks(folder):
    from dovetail.plugins.quant.gguf.quantizer import GGUF

    checkpoint = open_checkpoint(folder()[1].partition("=")[2])
    with pytest.raises(ConfigError, match=r"quant=gguf reads weights in blocks of GGUF files, and these are plain"):
        GGUF(GGUFConfig()).read_checkpoint(checkpoint)
