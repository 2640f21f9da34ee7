"""Contract suite for every built-in model."""

from __future__ import annotations

from typing import Any

from dovetail.core.interfaces import BuildContext, Model, ModelSpec
from dovetail.core.testing.model import ModelContract, Weights
from dovetail.plugins.model.config import LlamaConfig
from dovetail.plugins.model.llama.decoder import Llama

from . import tiny


class TestLlama(ModelContract):
    hf: dict[str, Any] = tiny.LLAMA

    def spec(self) -> ModelSpec:
        return Llama.spec(LlamaConfig(hf=self.hf, load="dummy"))

    def make(self, build: BuildContext) -> Model:
        return Llama(LlamaConfig(hf=self.hf, load="dummy"), build)

    def checkpoint(self) -> Weights | None:
        return tiny.checkpoint(self.hf)

    def config(self, folder: str) -> LlamaConfig:
        return LlamaConfig(path=folder)


class TestLlamaWithBiases(TestLlama):
    hf = tiny.BIASES


class TestTiedLlama(TestLlama):
    hf = tiny.TIED


class TestMistral(TestLlama):
    hf = tiny.MISTRAL
