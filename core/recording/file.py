"""Append-only file of frames. Readers ignore a frame that is not whole, so a file may be cut off anywhere.

magic, format version, newline | frame | frame ...
frame: bytes of the body, CRC-32 of the body, codec (0 plain, 1 zstd) | body: a msgpack array of entries
"""

from __future__ import annotations

import itertools
import logging
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from dovetail.core.errors import ConfigError, shown
from dovetail.core.recording.events import FORMAT, READABLE

log = logging.getLogger(__name__)

MAGIC = b"dovetail recording "
_FRAME = struct.Struct("<IIB")
_PLAIN, _ZSTD = 0, 1
FRAME_SECONDS = 0.25
"""Interval between frames: what a killed process loses."""
ENCODE_SECONDS = 0.05
"""Interval at which entries are encoded."""
YIELD_SECONDS = 1e-4
MOST_WAITING = 64
"""Entries in the queue from which on the writer no longer gives way to the engine."""
LARGEST_FRAME = 1 << 28
"""Bytes, also after decompression: a bound for damaged files."""


def zstd() -> ModuleType | None:
    try:
        import zstandard
    except ImportError:
        return None
    return zstandard


class FrameWriter:
    """Encodes and writes entries in a thread of its own. `put` costs the caller an append to a queue."""

    def __init__(self, path: Path, header: bytes) -> None:
        """`header`: the first entry, which gets a frame of its own. Raises ConfigError if the file exists or cannot be
        made."""
        try:
            self._file: BinaryIO = open(path.expanduser(), "wb" if _is_device(path) else "xb", buffering=0)
        except OSError as error:
            raise unwritable(path, error) from None
        library = zstd()
        self._compress = None if library is None else library.ZstdCompressor(level=3).compress
        self._path, self._failed = path, False
        self._pending: deque[tuple[Callable[..., bytes], tuple[Any, ...]]] = deque()
        self._entries: list[bytes] = []
        """Encoded entries of the next frame."""
        self._write(MAGIC + b"%d\n" % FORMAT + self._frame([header]))
        self._closing = threading.Event()
        self.thread = threading.Thread(target=self._run, name="dovetail-recording", daemon=True)
        self.thread.start()

    def put(self, encode: Callable[..., bytes], *given: Any) -> None:
        """Add the entry `encode(*given)`. It is called in the writer's thread, so nothing in `given` may change."""
        if not self._failed:
            self._pending.append((encode, given))

    def close(self) -> None:
        """Write what is pending. Idempotent."""
        self._closing.set()
        self.thread.join()
        self._file.close()

    def _run(self) -> None:
        written = time.monotonic()
        while not self._closing.wait(ENCODE_SECONDS):
            self._encode()
            if self._entries and (now := time.monotonic()) - written >= FRAME_SECONDS:
                self._write_frame()
                written = now
        self._encode()
        self._write_frame()

    def _encode(self) -> None:
        while self._pending:
            encode, given = self._pending.popleft()
            try:
                self._entries.append(encode(*given))
            except Exception:
                self._fail("an entry could not be encoded", exc_info=True)
                return
            if len(self._pending) < MOST_WAITING and not self._closing.is_set():
                # Let the engine's thread have the GIL at once; by itself Python switches after 5 ms.
                time.sleep(YIELD_SECONDS)

    def _write_frame(self) -> None:
        entries, self._entries = self._entries, []
        if entries and not self._failed:
            self._write(self._frame(entries))

    def _fail(self, reason: str, **logged: Any) -> None:
        """End the recording with its last whole frame. The engine goes on."""
        self._failed = True
        self._pending.clear()
        log.error("engine.record=%s: recording ended (%s)", self._path, reason, **logged)

    def _frame(self, entries: list[bytes]) -> bytes:
        body = b"".join((b"\xdd", struct.pack(">I", len(entries)), *entries))  # a msgpack array with 32 bits of length
        codec = _PLAIN if self._compress is None else _ZSTD
        if self._compress is not None:
            body = self._compress(body)
        return _FRAME.pack(len(body), zlib.crc32(body), codec) + body

    def _write(self, data: bytes) -> None:
        try:
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            self._fail(str(error.strerror))


def unwritable(path: Path, error: OSError) -> ConfigError:
    if isinstance(error, FileExistsError):
        return ConfigError(f"engine.record={shown(path)}: the file exists, and nothing is overwritten: choose another")
    return ConfigError(f"engine.record={shown(path)}: cannot be written ({error.strerror})")


def check_new(path: Path) -> None:
    """Raise ConfigError if a recording cannot be made at `path`."""
    place = path.expanduser()
    if place.exists() and not _is_device(path):
        raise unwritable(path, FileExistsError())
    if not place.absolute().parent.is_dir():
        raise ConfigError(f"engine.record={shown(path)}: there is no folder {shown(place.absolute().parent)}")


def free_path(path: Path) -> Path:
    """Return `path`, or the first of run-2.rec, run-3.rec ... that does not exist: the path of a restarted engine."""
    names = itertools.chain([path], (path.with_stem(f"{path.stem}-{n}") for n in itertools.count(2)))
    return next(name for name in names if not name.expanduser().exists() or _is_device(name))


def _is_device(path: Path) -> bool:
    """Whether a path is a device such as /dev/null, which keeps nothing that could be overwritten."""
    return path.expanduser().is_char_device()


def read_frames(path: Path, option: str) -> Iterator[bytes]:
    """Yield the body of each whole frame. A file that was cut off ends with its last whole frame. Raises ConfigError
    for a file that is no recording, has another version or is damaged before its end. `option`: its name in messages,
    such as "replay.path"."""
    where = f"{option}={shown(path)}"
    try:
        data = path.expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read ({error.strerror})") from None
    line, newline, _ = data[: len(MAGIC) + 12].partition(b"\n")
    if not line.startswith(MAGIC[: len(line)]):
        raise ConfigError(f"{where}: it is no recording; engine.record=PATH makes one")
    if not newline:
        raise ConfigError(f"{where}: it was cut off before its header, so there is nothing to replay")
    if (version := line[len(MAGIC) :]) not in {b"%d" % known for known in READABLE}:
        known = " and ".join(map(str, READABLE))
        raise ConfigError(
            f"{where}: format {version.decode(errors='replace')}; this version of Dovetail reads formats {known}"
        )
    at = len(line) + 1
    while at + _FRAME.size <= len(data):
        size, checksum, codec = _FRAME.unpack_from(data, at)
        body = data[at + _FRAME.size : at + _FRAME.size + size]
        if len(body) < size:
            return
        if size > LARGEST_FRAME or zlib.crc32(body) != checksum:
            raise ConfigError(f"{where}: it is damaged at byte {at}: the checksum of a frame is wrong")
        yield _plain(body, codec, f"{where}: byte {at}")
        at += _FRAME.size + size


def _plain(body: bytes, codec: int, where: str) -> bytes:
    if codec == _PLAIN:
        return body
    library = zstd()
    if codec != _ZSTD:
        raise ConfigError(f"{where}: a frame has the unknown codec {codec}")
    if library is None:
        raise ConfigError(f"{where}: it is compressed, and zstandard is not installed: pip install 'dovetail[record]'")
    try:
        if library.frame_content_size(body) > LARGEST_FRAME:
            raise ConfigError(f"{where}: a frame is larger than {LARGEST_FRAME} bytes")
        return bytes(library.ZstdDecompressor().decompress(body, max_output_size=LARGEST_FRAME))
    except library.ZstdError as error:
        raise ConfigError(f"{where}: a frame cannot be decompressed ({error})") from None
