"""Small Llamas with random weights."""

from __future__ import annotations


def dummy_llama(*options: str, dtype: str = "float32", **shapes: float | str) -> list[str]:
    """Return overrides for a Llama of these shapes, as named in config.json. Defaults are those of most tests."""
    defaults = {"vocab_size": 512, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8}
    given = defaults | shapes
    hf = {"architectures": "[LlamaForCausalLM]", **given, "intermediate_size": 2 * given["hidden_size"], "dtype": dtype}
    words = ", ".join(f"{key}: {value}" for key, value in hf.items())
    return ["model=llama", "model.load=dummy", f"model.hf={{{words}}}", *options]
