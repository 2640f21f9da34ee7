"""The contract suite over every built-in quantizer."""

from __future__ import annotations

import pytest

from dovetail.core.interfaces import Quantizer
from dovetail.core.testing.quant import QuantizerContract
from dovetail.plugins.quant.config import FP8Config, Int8Config, NoneConfig
from dovetail.plugins.quant.fp8.quantizer import FP8
from dovetail.plugins.quant.int8.quantizer import Int8
from dovetail.plugins.quant.none import Unquantized


class TestNone(QuantizerContract):
    def make(self) -> Quantizer:
        return Unquantized(NoneConfig())


class TestInt8(QuantizerContract):
    error = 0.02

    def make(self) -> Quantizer:
        return Int8(Int8Config())


class TestFP8(QuantizerContract):
    error = 0.06

    def make(self) -> Quantizer:
        return FP8(FP8Config())


def test_the_suite_must_be_given_a_quantizer() -> None:
    with pytest.raises(NotImplementedError):
        QuantizerContract().make()
