"""The variants of conf/model against published shapes and numbers of parameters."""

from __future__ import annotations

from importlib import resources

import pytest
import torch
import transformers

from dovetail.core.chat_template import ChatTemplate
from dovetail.core.checkpoint import open_checkpoint
from dovetail.core.compose import compose
from dovetail.plugins.model.llama.families import spec_of

PUBLISHED = {
    "llama2_7b": (32, 4096, 32, 32, 11008, 32000, 524288, 6.74e9),
    "llama2_13b": (40, 5120, 40, 40, 13824, 32000, 819200, 13.02e9),
    "llama2_70b": (80, 8192, 64, 8, 28672, 32000, 327680, 68.98e9),
    "llama32_1b": (16, 2048, 32, 8, 8192, 128256, 32768, 1.24e9),
    "llama3_8b": (32, 4096, 32, 8, 14336, 128256, 131072, 8.03e9),
    "llama3_70b": (80, 8192, 64, 8, 28672, 128256, 327680, 70.6e9),
    "llama31_405b": (126, 16384, 128, 8, 53248, 128256, 516096, 406e9),
    "mistral_7b": (32, 4096, 32, 8, 14336, 32000, 131072, 7.24e9),
    "mixtral_8x7b": (32, 4096, 32, 8, 14336, 32000, 131072, 46.7e9),
    "mixtral_8x22b": (56, 6144, 48, 8, 16384, 32768, 229376, 141e9),
    "qwen2_7b": (28, 3584, 28, 4, 18944, 152064, 57344, 7.62e9),
    "qwen25_7b": (28, 3584, 28, 4, 18944, 152064, 57344, 7.62e9),
    "qwen25_72b": (80, 8192, 64, 8, 29568, 152064, 327680, 72.7e9),
    "qwen3_8b": (36, 4096, 32, 8, 12288, 151936, 147456, 8.19e9),
    "qwen3_32b": (64, 5120, 64, 8, 25600, 151936, 262144, 32.8e9),
    "gemma3_4b": (34, 2560, 8, 4, 10240, 262208, 139264, 3.88e9),
    "gemma3_12b": (48, 3840, 16, 8, 15360, 262208, 393216, 11.77e9),
    "gemma3_27b": (62, 5376, 32, 16, 21504, 262208, 507904, 27.0e9),
    "phi4": (40, 5120, 40, 10, 17920, 100352, 204800, 14.7e9),
    "olmo2_7b": (32, 4096, 32, 32, 11008, 100352, 524288, 7.30e9),
    "granite33_8b": (40, 4096, 32, 8, 12800, 49159, 163840, 8.17e9),
    "command_r7b": (32, 4096, 32, 8, 14336, 256000, 131072, 8.03e9),
    "stablelm2_1_6b": (24, 2048, 32, 32, 5632, 100352, 196608, 1.64e9),
    "glm4_9b": (40, 4096, 32, 2, 13696, 151552, 40960, 9.4e9),
    "qwen3_30b_a3b": (48, 2048, 32, 4, 6144, 151936, 98304, 30.5e9),
    "glm45_air": (46, 4096, 96, 8, 10944, 151552, 188416, 107e9),
    "gpt_oss_20b": (24, 2880, 64, 8, 2880, 201088, 49152, 20.9e9),
    "gpt_oss_120b": (36, 2880, 64, 8, 2880, 201088, 73728, 116.8e9),
    "falcon_7b": (32, 4544, 71, 1, 18176, 65024, 8192, 6.92e9),
    "gptj_6b": (28, 4096, 16, 16, 16384, 50400, 458752, 6.05e9),
    "deepseek_v2_lite": (27, 2048, 16, 16, 10944, 102400, 31104, 15.7e9),
    "deepseek_v2": (60, 5120, 128, 128, 12288, 102400, 69120, 236e9),
    "deepseek_v3_4layers": (4, 7168, 128, 128, 18432, 129280, 4608, 37.0e9),
    "deepseek_v3_rank": (61, 7168, 128, 128, 18432, 129280, 70272, 98.8e9),
    "deepseek_v3": (61, 7168, 128, 128, 18432, 129280, 70272, 671e9),
}
"""layers, hidden, heads, kv heads, FFN, vocabulary, KV bytes per token in bfloat16, parameters"""


def spec(variant):
    return spec_of(compose([f"model={variant}"], app="generate").part("model").config)


def test_every_variant_is_in_the_table():
    files = resources.files("dovetail").joinpath("conf/model").iterdir()
    assert {file.name.removesuffix(".yaml") for file in files} == {
        *PUBLISHED,
        "small_moe",
        "small_mtp",
        "tiny_moe",
        "tiny",
        "tiny_draft",
    }


@pytest.mark.parametrize("variant", PUBLISHED)
def test_shapes_and_sizes(variant):
    got, (*shapes, parameters) = spec(variant), PUBLISHED[variant]
    found = [got.layers, got.hidden, got.heads, got.kv_heads, got.intermediate, got.vocab, got.kv_bytes_per_token(2)]
    assert found == shapes
    assert got.parameters.total == pytest.approx(parameters, rel=0.01)


@pytest.mark.parametrize(
    ("variant", "active", "tolerance"),
    # DeepSeek states 37 billion; that is 36.6 without the embedding table and 37.6 with it.
    [
        ("mixtral_8x7b", 12.9e9, 0.01),
        ("mixtral_8x22b", 39e9, 0.01),
        ("qwen3_30b_a3b", 3.3e9, 0.02),
        ("glm45_air", 13e9, 0.04),
        ("deepseek_v2_lite", 2.4e9, 0.12),
        ("deepseek_v2", 21e9, 0.02),
        ("deepseek_v3", 37e9, 0.02),
        # OpenAI states 3.6 and 5.1 billion, without the embedding table.
        ("gpt_oss_20b", 3.6e9 + 201088 * 2880, 0.02),
        ("gpt_oss_120b", 5.1e9 + 201088 * 2880, 0.02),
        ("gptj_6b", 6.05e9, 0.01),
    ],
)
def test_active_parameters(variant, active, tolerance):
    assert spec(variant).parameters.active == pytest.approx(active, rel=tolerance)


ONE_EACH = {"llama3_8b", "mixtral_8x7b", "qwen25_7b", "qwen3_8b", "gemma3_4b", "gpt_oss_20b", "deepseek_v2_lite"}
SEVERAL = ("llama", "mi", "qwen", "gemma", "gpt_oss", "deepseek")
OTHERS = {name for name in PUBLISHED if name.startswith(SEVERAL)} - ONE_EACH


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=[pytest.mark.nightly] * (name in OTHERS)) for name in PUBLISHED]
)
def test_parameters_are_those_that_transformers_makes(variant):
    hf = spec(variant).hf
    model_class = getattr(transformers, hf["architectures"][0])
    with torch.device("meta"):
        model = model_class._from_config(model_class.config_class(**hf))
    biases = sum(each.numel() for name, each in model.named_buffers() if name.endswith("e_score_correction_bias"))
    assert spec(variant).parameters.total == model.num_parameters() + biases


@pytest.mark.parametrize("name", ["tiny", "tiny_draft", "tiny_moe"])
def test_a_bundled_model_has_a_chat_template(name: str) -> None:
    template = ChatTemplate.load(open_checkpoint(f"pkg://dovetail.plugins.model.bundled/{name}"))
    assert template is not None and template.special["bos_token"] == "<|endoftext|>"
