"""Folder of a model of shapes alone, from which both engines load random weights: config.json and a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dovetail import Composition, ConfigError
from dovetail.core.interfaces import ModelSpec


def has_shapes_alone(composition: Composition) -> bool:
    model = composition.part("model")
    return model.target().source(model.config).checkpoint is None


def write_folder(composition: Composition, folder: Path) -> None:
    """Write config.json and the tokenizer's files."""
    model = composition.part("model")
    spec: ModelSpec = model.facts() or model.target().spec(model.config)
    config = hf_config(spec.hf)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_tokenizer(folder, spec.vocab, config)


def loading(composition: Composition, overrides: Sequence[str], folder: Path) -> list[str]:
    """Return the overrides with the model loaded from `folder` instead of the shapes that they set."""
    name = composition.part("model").name
    others = [word for word in overrides if not word.lstrip("+~").startswith(("model=", "model.hf"))]
    return [*others, f"model={name}", f"model.path={folder}", "model.load=dummy"]


def hf_config(shapes: dict[str, Any]) -> dict[str, Any]:
    """A config.json for other engines. They need model_type, and older versions the former names of options."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    (architecture,) = shapes["architectures"]
    wanted = architecture.removesuffix("ForCausalLM") + "Config"
    types = [kind for kind, name in CONFIG_MAPPING_NAMES.items() if name == wanted]
    if not types and "model_type" not in shapes:
        raise ConfigError(f"transformers has no model_type for {architecture}; add it to model.hf")
    found = {"model_type": types[0] if types else None, **shapes}
    found.setdefault("torch_dtype", shapes.get("dtype", "bfloat16"))
    if theta := shapes.get("rope_parameters", {}).get("rope_theta"):
        found.setdefault("rope_theta", theta)
    return found


def write_tokenizer(folder: Path, vocab: int, config: dict[str, Any]) -> None:
    """Write a byte-level BPE tokenizer without merges, of `words_of` a vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = words_of(vocab)
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = config.get("eos_token_id")
    end = ends[0] if isinstance(ends, list) else ends or 0
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": words[end]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def words_of(vocab: int) -> list[str]:
    """Return the tokens of a byte-level tokenizer. Token i is the word " wi", so that outputs of random weights become
    text; 256 tokens in the middle of the vocabulary are single bytes, into which texts and schemas are encoded."""
    from tokenizers import pre_tokenizers

    words = [f"Ġw{i}" for i in range(vocab)]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    middle = vocab // 2
    words[middle : middle + len(letters)] = letters
    return words
