"""One output that must be one of some strings."""

import numpy as np
from dovetail import RequestError
from dovetail.core.interfaces import Matcher


class Choices(Matcher):
    def __init__(self, text_of, choices, written="", tokens=()):
        self.text_of, self.choices, self.written, self.tokens = text_of, choices, written, list(tokens)

    def fits(self, token):
        text = self.text_of.get(token, "")
        return bool(text) and any(choice.startswith(self.written + text) for choice in self.choices)

    def mask(self, out):
        flags = np.zeros(32 * len(out), dtype=bool)
        flags[[token for token in self.text_of if self.fits(token)]] = True
        out[:] = np.packbits(flags, bitorder="little").view(np.uint32)

    def advance(self, token):
        if not self.fits(token):
            raise RequestError(f"grammar: token {token} may not follow {self.written!r}")
        self.written += self.text_of[token]
        self.tokens.append(token)

    def rollback(self, tokens):
        for _ in range(tokens):
            self.written = self.written[: -len(self.text_of[self.tokens.pop()])]

    @property
    def accepting(self):
        return self.written in self.choices

    @property
    def finished(self):
        return {choice for choice in self.choices if choice.startswith(self.written)} == {self.written}

    def fork(self):
        return Choices(self.text_of, self.choices, self.written, self.tokens)
