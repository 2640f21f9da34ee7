"""Validated reading of config.json. The file is untrusted, so every value is checked where it is read.

Importing this module loads no torch. Nothing named in the file is ever imported or executed (`auto_map`, custom code).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.core.errors import ConfigError, UnsupportedError, shown

LARGEST = 2**31 - 1


class ConfigJson:
    """Values of a config.json by key. An absent or null key has its default value; a key without a default is required.

    Errors name the file, the key and the value.
    """

    def __init__(self, values: Mapping[str, Any], where: str, section: str = "") -> None:
        self.values, self.where, self._section = values, where, section

    def get(self, key: str) -> Any:
        """Return the value unchecked."""
        return self.values.get(key)

    def count(self, key: str, default: int | None = None, *, at_least: int = 1, at_most: int = LARGEST) -> int:
        """Return an integer within bounds, which prevent overflow in derived values; they do not limit memory."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.wrong(key, "it must be a whole number")
        if not at_least <= value <= at_most:
            raise self.wrong(key, f"it must be from {at_least} to {at_most}")
        return value

    def number(self, key: str, default: float | None = None, *, at_most: float = 1e12) -> float:
        """Return a number of at least 1e-12, below any sensible model value."""
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or value != value:
            raise self.wrong(key, "it must be a number")
        if not 1e-12 <= value <= at_most:
            raise self.wrong(key, f"it must be from 1e-12 to {at_most:g}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "it must be true or false")
        return value

    def choice(self, key: str, options: Sequence[str], default: str | None = None) -> str:
        value = self._value(key, default)
        if value not in options:
            raise self.wrong(key, f"the options are {', '.join(options)}")
        return str(value)

    def counts(self, key: str, *, at_most: int = LARGEST) -> tuple[int, ...]:
        """Return a list of integers >= 0 as a tuple. A single integer becomes one entry; an absent key gives ()."""
        value = self.get(key)
        found = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= at_most for n in found):
            raise self.wrong(key, f"it must be a whole number from 0 to {at_most}, or a list of these")
        return tuple(found)

    def section(self, *keys: str) -> ConfigJson:
        """Return the object under the first of these keys that is present, or an empty one."""
        key = next((key for key in keys if self.get(key) is not None), keys[0])
        value = {} if self.get(key) is None else self.get(key)
        if not isinstance(value, Mapping):
            raise self.wrong(key, "it must be an object")
        return ConfigJson(value, self.where, f"{self._section}{key}.")

    def wrong(self, key: str, why: str) -> ConfigError:
        """Return the error for an invalid value of `key`."""
        return ConfigError(self._about(key, why))

    def unsupported(self, key: str, why: str) -> UnsupportedError:
        """Return the error for a valid value of `key` that the model component lacks."""
        return UnsupportedError(self._about(key, why))

    def _about(self, key: str, why: str) -> str:
        named = key if key.isidentifier() and len(key) <= 80 else shown(key)
        return f"{self.where}: {self._section}{named} is {shown(self.get(key))}; {why}"

    def _value(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None:
            if default is None:
                raise ConfigError(f"{self.where}: the key {self._section + key!r} is missing")
            return default
        return value
