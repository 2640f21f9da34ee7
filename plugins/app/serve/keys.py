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


class Keys:
    """Accepted keys; if empty, no key is required."""

    def __init__(self, hashes: Mapping[bytes, str]) -> None:
        """`hashes` maps SHA-256 digests to names."""
        self.hashes = dict(hashes)

    def __bool__(self) -> bool:
        return bool(self.hashes)

    def name(self, key: str) -> str | None:
        """Return the name of an accepted key, or None. Takes the same time for valid and invalid keys."""
        given = hashlib.sha256(key.encode(errors="surrogateescape")).digest()
        found = None
        for digest, name in self.hashes.items():
            if hmac.compare_digest(digest, given):
                found = name
        return found


def load(file: str | None, environment: Mapping[str, str] = os.environ) -> Keys:
    hashes: dict[bytes, str] = {}
    for key in environment.get(VARIABLE, "").split(","):
        if key := key.strip():
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
