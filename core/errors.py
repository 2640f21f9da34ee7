"""All errors that Dovetail raises deliberately. Each message names the value, the reason and the options."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Sequence
from pathlib import PurePath

_LONGEST_LINE = 500
_PATH = re.compile(r"(?<![\w.:/~<-])(?:~|[A-Za-z]:(?=\\))?[/\\][^\s'\"`,;:()\[\]]*[^\s'\"`,;:.()\[\]]")
"""An absolute path of a file. A URL is none."""


def one_line(text: str) -> str:
    """Return the first line that is not empty, with a limited length."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= _LONGEST_LINE else line[:_LONGEST_LINE] + "..."


def for_clients(text: str) -> str:
    """Return the first line of a message without the paths of this machine, which are not for clients of a server."""
    return _PATH.sub("<path>", one_line(text))


class DovetailError(Exception):
    """A mistake or limit outside the engine's own code. Shown to the user as one message without a traceback."""


class ConfigError(DovetailError, ValueError):
    """The requested composition does not exist, or one of its values is invalid."""


class TensorError(ConfigError):
    """A tensor of a checkpoint that cannot be used. A quantizer states the name below the prefix of a matrix; the
    layer adds the prefix, and the loader the file."""

    def __init__(self, name: str, reason: str) -> None:
        """`reason` completes a sentence: "has values that are not finite"."""
        self.name, self.reason = name, reason
        super().__init__(f"tensor {shown(name)} {reason}")


class UnsupportedError(ConfigError):
    """A valid option of config.json that one model component lacks, so that another one may run the model."""


class TextError(ConfigError):
    """A text of a checkpoint, such as config.json, that cannot be used. The loader adds its place."""

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = name, reason
        super().__init__(f"{name}: {reason}")


class CapabilityError(DovetailError):
    """Parts of a composition do not fit together. `conflicts` has one sentence per conflict."""

    def __init__(self, conflicts: Sequence[str]) -> None:
        self.conflicts = tuple(conflicts)
        super().__init__("these parts do not fit together:\n" + "\n".join(f"  - {line}" for line in self.conflicts))


class PluginError(DovetailError):
    """A selected component cannot be used. `package` is the distribution that must be fixed or blocked."""

    def __init__(self, package: str, reason: str) -> None:
        self.package = package
        self.reason = reason
        super().__init__(f"package {package}: {reason}")


class CapacityError(DovetailError):
    """Memory is insufficient. `missing_bytes` is the gap; each of the overrides in `settings` alone would fit."""

    def __init__(self, what: str, *, missing_bytes: int, settings: Sequence[str]) -> None:
        self.missing_bytes = missing_bytes
        self.settings = tuple(settings)
        would_fit = "; ".join(self.settings) or "none found"
        gap = f"{missing_bytes / 2**30:.2f} GiB" if missing_bytes >= 2**27 else f"{missing_bytes} bytes"
        super().__init__(f"{what}: {gap} are missing. Settings that would fit: {would_fit}")


class EngineStopped(DovetailError, RuntimeError):
    """The engine has ended for the reason in the message, for instance a dead rank. It runs no more requests."""


class EngineDown(DovetailError):
    """No engine is available, or the engine died while the request ran. A retry may succeed."""

    def __init__(self, message: str, *, ran: bool = False) -> None:
        """`ran`: the request had reached the engine, and may be the cause of its death."""
        self.ran = ran
        super().__init__(message)


class RequestError(DovetailError):
    """One request is refused or fails; others continue. `status` is the HTTP status: 400 to 499 for the request's own
    mistake, 500 for a failure."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        if not 400 <= status <= 500:
            raise ValueError(
                f"status is {status}; a request's own mistake has a status from 400 to 499, its failure 500"
            )
        self.status = status
        super().__init__(message)


class DovetailDeprecationWarning(FutureWarning):
    """Something still works but is deprecated. The message names the package that must change."""


_MOST_NAME, _MOST_TEXT = 120, 1000
"""Characters of an untrusted name or value, and of a path or an exception's text."""


def shown(value: object, most: int | None = None) -> str:
    """Return an untrusted value as a message shows it: on one line, escaped, and shortened in the middle to at most
    `most` characters (None = 1000 for paths and exceptions, 120 for others). Paths and exceptions have no quotes;
    everything else is a Python literal."""
    plain = isinstance(value, PurePath | BaseException)
    most = most or (_MOST_TEXT if plain else _MOST_NAME)
    if plain:
        text = str(value)
        text = text if text.isprintable() else repr(text)[1:-1]
    else:
        # Nested and long values are cut while they are written: an untrusted file may hold megabytes of them.
        brief = reprlib.Repr()
        brief.maxstring = brief.maxother = brief.maxlong = most
        text = brief.repr(value)
    if len(text) <= most:
        return text
    head = (most - 3) // 2
    return f"{text[:head]}...{text[len(text) - (most - 3 - head) :]}"
