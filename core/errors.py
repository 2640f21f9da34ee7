"""Every error that Dovetail raises on purpose. Each message names the value, the reason and the options."""

from __future__ import annotations

from collections.abc import Sequence


class DovetailError(Exception):
    """A mistake or a limit outside the engine's own code: shown to the user as one message, without a traceback."""


class ConfigError(DovetailError, ValueError):
    """What was asked for cannot be composed, or a value in it is not valid."""


class CapabilityError(DovetailError):
    """Parts of one composition do not fit each other. `conflicts` holds one sentence for each conflict."""

    def __init__(self, conflicts: Sequence[str]) -> None:
        self.conflicts = tuple(conflicts)
        super().__init__("these parts do not fit together:\n" + "\n".join(f"  - {line}" for line in self.conflicts))


class PluginError(DovetailError):
    """A chosen component cannot be used. `package` is the distribution that must be mended or blocked."""

    def __init__(self, package: str, reason: str) -> None:
        self.package = package
        self.reason = reason
        super().__init__(f"package {package}: {reason}")


class CapacityError(DovetailError):
    """Memory does not suffice. `missing_bytes` is the gap; any one of the three overrides in `settings` would fit."""

    def __init__(self, what: str, *, missing_bytes: int, settings: Sequence[str]) -> None:
        self.missing_bytes = missing_bytes
        self.settings = tuple(settings)
        would_fit = "; ".join(self.settings) or "none found"
        gap = f"{missing_bytes / 2**30:.2f} GiB" if missing_bytes >= 2**27 else f"{missing_bytes} bytes"
        super().__init__(f"{what}: {gap} are missing. Settings that would fit: {would_fit}")


class EngineStopped(DovetailError, RuntimeError):
    """The engine has ended, by what its cause names: a rank that died, for one. No request runs any more."""


class EngineDown(DovetailError):
    """There is no engine to run a request, or the engine died while the request ran. A retry may succeed."""


class RequestError(DovetailError):
    """One request is refused; the others go on. `status` is the HTTP status, 400 to 499."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        if not 400 <= status < 500:
            raise ValueError(f"status is {status}; a request's own mistake has a status from 400 to 499")
        self.status = status
        super().__init__(message)


class DovetailDeprecationWarning(FutureWarning):
    """Something still works and will stop working. The message names the package that has to change."""
