"""Compiler of choices."""

from dovetail import RequestError
from dovetail.core.interfaces import GrammarCompiler
from tokenizers import Tokenizer

from dovetail_mine.config import MineConfig
from dovetail_mine.matcher import Choices


class Mine(GrammarCompiler):
    config: MineConfig

    def compile(self, grammar):
        if grammar.kind != "choice":
            raise RequestError(f"grammar: {grammar.kind} is not served; grammar=llguidance does")
        if (length := sum(map(len, grammar.value))) > self.config.longest:
            raise RequestError(f"grammar: the choice has {length} characters, grammar.longest={self.config.longest}")
        if self.vocabulary.tokenizer is None:
            raise RequestError("grammar: the model has no tokenizer")
        tokenizer = Tokenizer.from_str(self.vocabulary.tokenizer)
        ids = range(tokenizer.get_vocab_size())
        return Choices({token: tokenizer.decode([token]) for token in ids}, grammar.value)
