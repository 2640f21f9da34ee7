"""Converts text to token ids and back, using only the checkpoint's tokenizer.json and the special tokens of
tokenizer_config.json (no code of the model runs)."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from tokenizers import Tokenizer as _Tokenizer
from tokenizers.decoders import DecodeStream

from dovetail.core.errors import ConfigError, RequestError, shown
from dovetail.core.interfaces import Checkpoint
from dovetail.core.special_tokens import surrounding, tokenizer_config

FILE = "tokenizer.json"

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""Name of a single-byte token in a SentencePiece vocabulary."""


def _byte_alphabet() -> dict[str, bytes]:
    """Map the printable characters of byte-level BPE (GPT-2, Radford et al. 2019) to the bytes that they represent."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shown = {chr(byte): bytes([byte]) for byte in printable}
    return shown | {chr(256 + i): bytes([byte]) for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()


class Tokenizer:
    """Tokenizer of one model. Thread-safe. It never truncates or pads, whatever tokenizer.json states."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Raises ConfigError if the checkpoint's tokenizer.json is missing or broken."""
        where, text = checkpoint.where(FILE), checkpoint.text(FILE)
        if text is None:
            raise ConfigError(
                f"{where} does not exist: text prompts need a tokenizer; give token ids instead, or convert it "
                "(transformers' AutoTokenizer.save_pretrained writes tokenizer.json)"
            )
        try:
            self._tokenizer = _Tokenizer.from_str(text)
        except BaseException as error:  # The library raises plain Exceptions, and panics for some mistakes.
            if not is_failure(error):
                raise
            raise ConfigError(f"{where}: cannot be read as a tokenizer ({shown(str(error), 300)})") from None
        # Files often keep the settings of a fine-tuning run. transformers does not obey them either.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._added = frozenset(self._tokenizer.get_added_tokens_decoder())
        self._special = frozenset(
            id for id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._ends = self._surrounding(checkpoint)
        """Special tokens before and after a text; None = those of tokenizer.json."""
        self._byte_level = "ByteLevel" in str(self._tokenizer.decoder)
        self._bytes: dict[int, bytes] = {}

    @property
    def vocab(self) -> int:
        return self._tokenizer.get_vocab_size()

    def ids(self) -> dict[str, int]:
        """Return the id of each ordinary token, without those that were added for chats and tools."""
        return self._tokenizer.get_vocab(with_added_tokens=False)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """special: add the tokenizer's special tokens (usually a leading BOS). Raises RequestError for a text with
        which the tokenizer fails."""
        try:
            # `encode` would hold the GIL, for seconds on megabytes of text; encoding a batch of one releases it.
            stated = special and self._ends is None
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=stated)
        except BaseException as error:
            # A regular expression that backtracks too often ends in a panic, which is a BaseException.
            if not is_failure(error):
                raise
            raise RequestError(f"this model's tokenizer fails on the text: {_reason(text, error)}") from None
        if not special or self._ends is None:
            return list(encoding.ids)
        before, after = self._ends
        return [*before, *encoding.ids, *after]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return self._tokenizer.decode_batch([list(ids)], skip_special_tokens=skip_special)[0]

    def token_bytes(self, token: int) -> bytes:
        """Bytes of the token, possibly part of a character. For special tokens: their name."""
        if token not in self._bytes:
            self._bytes[token] = self._spell(token)
        return self._bytes[token]

    def is_special(self, token: int) -> bool:
        """Whether text is decoded without this token, such as BOS."""
        return token in self._special

    def _surrounding(self, checkpoint: Checkpoint) -> tuple[list[int], list[int]] | None:
        texts = surrounding(tokenizer_config(checkpoint))
        if texts is None:
            return None
        ids = [[self._tokenizer.token_to_id(text)] if text else [] for text in texts]
        before, after = ([token for token in each if token is not None] for each in ids)
        return (before, after) if [before, after] == ids else None

    def _spell(self, token: int) -> bytes:
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if token in self._added:
            return piece.encode()
        if self._byte_level:
            return b"".join(_BYTES[c] if c in _BYTES else c.encode() for c in piece)
        if byte := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        return piece.replace("\u2581", " ").encode()

    def stream(self, keep: Collection[str] = ()) -> Detokenizer:
        """keep: special tokens whose text is part of the output. All others are dropped."""
        special = {
            token.content: id for id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        }
        kept = special.keys() & set(keep)
        skip = frozenset(id for text, id in special.items() if text not in kept) if kept else None
        return Detokenizer(self._tokenizer, skip)


def is_failure(error: BaseException) -> bool:
    """Whether an error from a library in Rust is a failure of the call: its panics are BaseExceptions."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _reason(text: str, error: BaseException) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as surrogate:
        return f"it is not valid Unicode ({surrogate})"
    return str(error)


class Detokenizer:
    """Incremental text of a growing output. Holds bytes back until they form complete characters."""

    def __init__(self, tokenizer: _Tokenizer, skip: frozenset[int] | None = None) -> None:
        """skip: tokens without text; None = all special tokens."""
        self._tokenizer, self._skip = tokenizer, skip
        self._stream = DecodeStream(skip_special_tokens=skip is None)
        self._held: list[int] = []
        """Tokens since the last text."""

    def push(self, token: int) -> str:
        if self._skip is not None and token in self._skip:
            return ""
        text = self._stream.step(self._tokenizer, token)
        if text is None:
            self._held.append(token)
            return ""
        if self._held:
            self._held = []
        return text

    def finish(self) -> str:
        """Return the rest of an output that ends inside a character, with U+FFFD for the incomplete character."""
        held, self._held = self._held, []
        text = self._tokenizer.decode(held, skip_special_tokens=self._skip is None) if held else ""
        return text if text.endswith("\ufffd") else ""
