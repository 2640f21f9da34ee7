"""Contract suites of the components whose suite needs more than default options. Needs the extra `test`."""

from dovetail import SamplingParams
from dovetail.core.testing.logits import LogitsProcessorContract
from dovetail.core.testing.quant import QuantizerContract
from dovetail_lighthouse.config import NoRepeatNgramConfig, ThreeBitsConfig
from dovetail_lighthouse.no_repeat_ngram import NoRepeatNgram
from dovetail_lighthouse.three_bits import ThreeBits


class NoRepeatNgramContract(LogitsProcessorContract):
    """No token may occur twice, so every history has a token to ban."""

    size = 1

    def make(self):
        return NoRepeatNgram(NoRepeatNgramConfig())

    def active_params(self):
        return SamplingParams(extra={"no_repeat_ngram": self.size})


class ThreeBitsContract(QuantizerContract):
    error = 0.34  # the mean over products of one token, 0.18, plus six standard deviations

    def make(self):
        return ThreeBits(ThreeBitsConfig())
