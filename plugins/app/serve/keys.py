"""API keys, stored as hashes and compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Mapping
from pathlib import Path

from dovetail.core.errors import ConfigError

VARIABLE = "DOVETAIL_API_KEYS"
_LINE = re.compile(r"(?:(?P<name>[\w.@-]+):)?(?P<hash>[0-9a-fA-F]{64})")

_SENDABLE = re.compile(r"[!-~]+")


class Keys:
    """Accepted keys; if empty, no key is required."""

    def __init__(self, hashes: Mapping[bytes, str]) -> None:
        """`hashes` maps SHA-256 digests to names."""
        self.hashes = dict(hashes)

    def __bool__(self) -> bool:
        return bool(self.hashes)

    def name(self, key: str) -> str | None:
        """Return the name of an accepted key, or None. Takes the same time for valid and invalid keys. `key`: bytes of
        a header decoded as Latin-1, as HTTP defines it; the hash is that of the bytes."""
        given = hashlib.sha256(key.encode("latin-1")).digest()
        found = None
        for digest, name in self.hashes.items():
            if hmac.compare_digest(digest, given):
                found = name
        return found


def load(file: str | None, environment: Mapping[str, str] = os.environ) -> Keys:
    hashes: dict[bytes, str] = {}
    for number, key in enumerate(environment.get(VARIABLE, "").split(","), 1):
        if key := key.strip():
            if not _SENDABLE.fullmatch(key):
                raise ConfigError(
                    f"{VARIABLE}: key {number} contains a character that clients cannot send in a header; use letters, "
                    "digits and signs of ASCII, without spaces"
                )
            digest = hashlib.sha256(key.encode()).digest()
            hashes[digest] = digest.hex()[:12]
    if file is not None:
        hashes |= _read(Path(file).expanduser())
        if not hashes:
            raise ConfigError(f"serve.api_key_file={file}: the file contains no key")
    return Keys(hashes)


def _read(file: Path) -> dict[bytes, str]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"serve.api_key_file={file}: cannot be read ({error})") from None
    hashes = {}
    for number, line in enumerate(lines, 1):
        if not (line := line.partition("#")[0].strip()):
            continue
        # The line may be an unhashed key, so the message does not repeat it.
        if (found := _LINE.fullmatch(line)) is None:
            raise ConfigError(
                f"serve.api_key_file={file}, line {number}: not `name:hash` with a SHA-256 in hex "
                "(printf %s KEY | sha256sum)"
            )
        digest = bytes.fromhex(found["hash"])
        hashes[digest] = found["name"] or digest.hex()[:12]
    return hashes
