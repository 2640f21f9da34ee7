"""A scanner for JSON that arrives in pieces: it knows after each piece whether the value is complete."""

from __future__ import annotations

import re
from collections.abc import Callable


class JsonScanner:
    """Validates one JSON value (RFC 8259) of any depth, character by character."""

    def __init__(self) -> None:
        self.done = False
        """Whether the value is complete. A number is complete only at the next character, which then does not match."""
        self._open: list[str] = []
        self._next: Callable[[str], bool] = self._value
        self._token = ""
        self._is_key = False
        """Whether the string is a key."""

    @property
    def in_string(self) -> bool:
        return self._next == self._string

    def feed(self, char: str) -> bool:
        """Whether the character can come next in the value; "" is the end of the text. If not, the scan has ended."""
        if char in _BLANKS and self._next not in (self._string, self._number, self._literal):
            return bool(char)
        return self._next(char)

    def _value(self, char: str) -> bool:
        if char in "{[":
            self._open.append(char)
            self._next = self._first_key if char == "{" else self._first_item
        elif char == '"':
            self._is_key, self._next = False, self._string
        elif char in "-0123456789":
            self._token, self._next = char, self._number
        elif char in _LITERALS:
            self._token, self._next = _LITERALS[char], self._literal
        else:
            return False
        return True

    def _first_item(self, char: str) -> bool:
        return self._close(char) if char == "]" else self._value(char)

    def _first_key(self, char: str) -> bool:
        return self._close(char) if char == "}" else self._key(char)

    def _key(self, char: str) -> bool:
        self._is_key, self._next = True, self._string
        return char == '"'

    def _string(self, char: str) -> bool:
        token = self._token
        if token:  # an escape has begun
            if len(token) > 1:
                self._token = "" if len(token) == 5 else token + char
                return bool(char) and char in _HEX
            self._token = "\\u" if char == "u" else ""
            return bool(char) and char in _ESCAPES
        if char == "\\":
            self._token = char
        elif char == '"' and self._is_key:
            self._next = self._colon
        elif char == '"':
            self._end_value()
        return bool(char)

    def _colon(self, char: str) -> bool:
        self._next = self._value
        return char == ":"

    def _number(self, char: str) -> bool:
        if char and char in "0123456789+-.eE":
            self._token += char
            return True
        whole, self._token = _NUMBER.fullmatch(self._token), ""
        if whole is None:
            return False
        self._end_value()
        return not self.done and self.feed(char)

    def _literal(self, char: str) -> bool:
        if not char or char != self._token[0]:
            return False
        self._token = self._token[1:]
        if not self._token:
            self._end_value()
        return True

    def _after_value(self, char: str) -> bool:
        if char == ",":
            self._next = self._key if self._open[-1] == "{" else self._value
            return True
        return char in "}]" and self._close(char)

    def _close(self, char: str) -> bool:
        if self._open.pop() + char not in ("{}", "[]"):
            return False
        self._end_value()
        return True

    def _end_value(self) -> None:
        self._next = self._after_value
        self.done = not self._open


_BLANKS, _HEX, _ESCAPES = " \t\n\r", "0123456789abcdefABCDEF", '"\\/bfnrtu'
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
