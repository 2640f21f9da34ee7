"""Tokenizers of strangers' checkpoints: settings of fine-tuning runs, broken files, texts that they cannot encode."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Made
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from dovetail.core.checkpoint import FolderCheckpoint
from dovetail.core.errors import ConfigError, RequestError
from dovetail.core.frontend.client import missing_tokenizer
from dovetail.core.frontend.outputs import StopStringMatcher
from dovetail.core.interfaces import SamplingParams, Vocabulary
from dovetail.core.tokenizer import Tokenizer
from dovetail.plugins.grammar.config import LLGuidanceConfig
from dovetail.plugins.grammar.guidance import LLGuidance

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(pattern: str = "") -> Made:
    """Tokenizer with one token for each byte, which splits texts at `pattern` first."""
    made = Made(models.BPE(vocab={char: i for i, char in enumerate(ALPHABET)}, merges=[]))
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    made.pre_tokenizer = pre_tokenizers.Sequence([*split, bytewise])
    made.decoder = decoders.ByteLevel()
    return made


def byte_fallback() -> Made:
    """SentencePiece vocabulary: every character but "a" is spelled in bytes."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<unk>": 256, "a": 257}
    made = Made(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return made


def opened(made: Made, folder: Path) -> Tokenizer:
    made.save(str(folder / "tokenizer.json"))
    return Tokenizer(FolderCheckpoint(folder))


def test_a_prompt_is_never_truncated_or_padded(tmp_path: Path) -> None:
    made = byte_level()
    made.enable_truncation(max_length=4)
    short, long = "abc", "never truncated"
    assert len(opened(made, tmp_path).encode(long)) == len(long)
    made.no_truncation()
    made.enable_padding(length=8, pad_id=0, pad_token=ALPHABET[0])
    assert len(opened(made, tmp_path).encode(short)) == len(short)


@pytest.mark.parametrize("made", [byte_level, byte_fallback])
@pytest.mark.parametrize("stop", [(), ("zz",)])
@pytest.mark.parametrize(("text", "cut"), [("aé", 1), ("a€", 1), ("a€", 2), ("a€a", 0), ("é" * 3, 0)])
def test_output_that_ends_inside_a_character_shows_it(tmp_path: Path, made, stop, text: str, cut: int) -> None:
    tokenizer = opened(made(), tmp_path)
    ids = tokenizer.encode(text)
    ids = ids[: len(ids) - cut]
    matcher = StopStringMatcher(SamplingParams(stop=stop), tokenizer)
    shown = "".join(matcher.push([token])[0] for token in ids) + matcher.flush()
    assert shown == PreTrainedTokenizerFast(tokenizer_object=made()).decode(ids)
    assert ("\ufffd" in shown) == bool(cut) and matcher.flush() == ""


@pytest.mark.parametrize("content", [b'{"version"', b'{"a": 1}', b"\xff\xfe"])
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json: cannot be read as (a tokenizer|text)"):
        Tokenizer(FolderCheckpoint(tmp_path))


def test_a_file_with_which_the_library_panics_is_named(tmp_path: Path) -> None:
    content = json.loads(byte_level().to_str()) | {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"tokenizer\.json: cannot be read as a tokenizer .*charsmap"):
        Tokenizer(FolderCheckpoint(tmp_path))


@pytest.mark.parametrize("where", ["vocab", "added_tokens"])
def test_a_token_id_far_above_the_vocabulary_takes_no_memory(where: str) -> None:
    content, far = json.loads(byte_level().to_str()), 2**32 - 1
    if where == "vocab":
        content["model"]["vocab"]["xx"] = far
    else:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        content["added_tokens"].append({"id": far, "content": "<far>", "special": True, **flags})
    vocabulary = Vocabulary(size=256, eos_ids=(0,), tokenizer=json.dumps(content))
    with pytest.raises(ConfigError, match=f"tokenizer.json has the token id {far}, and the model has 256 tokens"):
        LLGuidance(LLGuidanceConfig(), vocabulary)


def test_added_tokens_may_be_missing() -> None:
    content = json.loads(byte_level().to_str())
    del content["added_tokens"]
    LLGuidance(LLGuidanceConfig(), Vocabulary(size=256, eos_ids=(0,), tokenizer=json.dumps(content)))


@pytest.mark.parametrize(("text", "reason"), [("a" * 64, "retry-limit"), ("\ud800", "not valid Unicode")])
def test_a_text_with_which_the_tokenizer_fails_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    tokenizer = opened(byte_level("(a+)+b"), tmp_path)
    with pytest.raises(RequestError, match=f"tokenizer fails on the text: .*{reason}"):
        tokenizer.encode(text)
    assert len(tokenizer.encode("aab")) == 3


@pytest.mark.parametrize(("path", "cause"), [(None, "no checkpoint"), ("/m", r"no tokenizer\.json in its checkpoint")])
def test_a_missing_tokenizer_is_explained_by_its_cause(path: str | None, cause: str) -> None:
    info = SimpleNamespace(checkpoint=path, model="m")
    assert re.match(f"the model m has {cause} and therefore no tokenizer", str(missing_tokenizer(info)))  # type: ignore[arg-type]


BOS, EOS = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "</s>"
"""The first one is DeepSeek's."""


@pytest.mark.parametrize(
    ("config", "before", "after"),
    [
        # As DeepSeek V2 and V3 are published. Their tokenizer.json adds nothing.
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "add_eos_token": False}, True, False),
        ({"tokenizer_class": "LlamaTokenizer"}, True, False),
        ({"tokenizer_class": "LlamaTokenizer", "bos_token": {"content": BOS}, "add_eos_token": True}, True, True),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False}, False, False),
        ({"tokenizer_class": "GPTNeoXTokenizerFast"}, False, False),
        ({"tokenizer_class": "GPTNeoXTokenizerFast", "add_bos_token": True}, True, False),
        # These obey tokenizer.json.
        ({"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True}, False, False),
        ({"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": True}, False, False),
        ({"tokenizer_class": None}, False, False),
        # What cannot be added is left to tokenizer.json.
        ({"tokenizer_class": "LlamaTokenizerFast", "bos_token": None}, False, False),
        ({"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<unknown>"}, False, False),
    ],
)
def test_special_tokens_around_a_text_are_those_of_the_class(tmp_path: Path, config, before: bool, after: bool) -> None:
    """Most checkpoints were published for transformers 4, whose classes these are."""
    made = byte_level()
    made.add_special_tokens([BOS, EOS])
    stated = {"bos_token": BOS, "eos_token": EOS, **config}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(stated))
    tokenizer = opened(made, tmp_path)
    plain = tokenizer.encode("abc", special=False)
    bos, eos = made.token_to_id(BOS), made.token_to_id(EOS)
    assert len(plain) == 3 and tokenizer.encode("abc") == [*[bos] * before, *plain, *[eos] * after]


@pytest.mark.parametrize("adds", [True, False])
def test_a_class_of_transformers_replaces_what_the_file_adds(tmp_path: Path, adds: bool) -> None:
    made = byte_level()
    made.add_special_tokens([BOS])
    bos = made.token_to_id(BOS)
    made.post_processor = TemplateProcessing(single=[BOS, "$A"], special_tokens=[(BOS, bos)])
    stated = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": BOS, "add_bos_token": adds}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(stated))
    tokenizer = opened(made, tmp_path)
    assert tokenizer.encode("a") == [*[bos] * adds, *tokenizer.encode("a", special=False)]
