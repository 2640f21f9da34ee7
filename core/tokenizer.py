"""Text to token ids and back, from a model folder's tokenizer.json alone (no code of the model's runs)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as _Tokenizer
from tokenizers.decoders import DecodeStream

from dovetail.core.errors import ConfigError


class Tokenizer:
    """Thread-safe."""

    def __init__(self, folder: Path) -> None:
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"{file} does not exist: text prompts need a tokenizer; give token ids instead, or convert it "
                "(transformers' AutoTokenizer.save_pretrained writes tokenizer.json)"
            )
        self._tokenizer = _Tokenizer.from_file(str(file))

    @property
    def vocab(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """special: let the tokenizer add its own special tokens (a leading BOS, as a rule)."""
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)

    def stream(self) -> Detokenizer:
        return Detokenizer(self._tokenizer)


class Detokenizer:
    """Text of a growing output, piece by piece; holds bytes back until they form whole characters."""

    def __init__(self, tokenizer: _Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def push(self, token: int) -> str:
        return self._stream.step(self._tokenizer, token) or ""
