"""Special tokens that a parser reads stay in the text; others are dropped."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dovetail.core.checkpoint import FolderCheckpoint
from dovetail.core.frontend.outputs import StopStringMatcher
from dovetail.core.interfaces import SamplingParams
from dovetail.core.tokenizer import Tokenizer as OurTokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> OurTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True), AddedToken("<eos>", special=True)])
    made.save(str(tmp_path / "tokenizer.json"))
    return OurTokenizer(FolderCheckpoint(tmp_path))


@pytest.mark.parametrize(
    ("keep", "text"),
    [((), "é f{}"), (("[TOOL_CALLS]", "[ARGS]"), "é [TOOL_CALLS]f{}"), (("<think>",), "é f{}")],
)
def test_special_tokens_that_are_kept(tokenizer: OurTokenizer, keep: tuple[str, ...], text: str) -> None:
    ids = tokenizer.encode("é [TOOL_CALLS]f{}<eos>")
    matcher = StopStringMatcher(SamplingParams(), tokenizer, keep)
    assert "".join(matcher.push([token])[0] for token in ids) == text
