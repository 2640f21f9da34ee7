"""Options of the built-in models."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from dovetail.core.compose import Config


class ModelFiles(Config):
    """Options of models that are read from a checkpoint."""

    path: str | None = None
    """Folder with config.json and *.safetensors, a GGUF file, or what a package's checkpoint reader recognizes;
    pkg://package.module/folder for one inside an installed package."""
    load: Literal["auto", "dummy"] = "auto"
    """auto: weights from `path`. dummy: random weights of the same shapes (the output is meaningless)."""
    hf: dict[str, Any] | None = Field(None)
    """Content of a config.json, in place of a folder; only with load=dummy."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelFiles:
        if (self.path is None) == (self.hf is None):
            given = "both" if self.path is not None else "neither"
            raise ValueError(
                f"{given} of model.path and model.hf given: set model=auto model.path=<model folder>, or a variant "
                "that sets the shapes, such as model=llama3_8b (it sets model.load=dummy: random weights)"
            )
        if self.hf is not None and self.load != "dummy":
            raise ValueError("model.hf has shapes but no weights: set model.load=dummy, or model.path=<model folder>")
        return self


class AutoConfig(ModelFiles):
    """The native model that has the checkpoint's architecture, or else model=transformers."""


class LlamaConfig(ModelFiles):
    """Decoders of Llama, Mistral, Mixtral, Qwen 2 and 3, Gemma 2 and 3, gpt-oss, GLM-4.x, Phi 3 and 4, OLMo 2 and
    3, Granite, Command R, Falcon, GPT-J."""

    routing: Literal["learned", "uniform"] = "learned"
    """uniform: every expert is equally likely, for measurements with load=dummy, whose random routers may select a few
    experts for all tokens."""
    shared_experts: Literal["auto", "apart"] = "auto"
    """apart: experts that every token has are an MLP of their own. auto: where their format is that of the routed
    experts, the same launches multiply them, with experts=tensor and without adapters."""

    @model_validator(mode="after")
    def _uniform_for_dummies(self) -> LlamaConfig:
        if self.routing == "uniform" and self.load != "dummy":
            raise ValueError(
                "model.routing=uniform is for random weights: set model.load=dummy, or model.routing=learned"
            )
        return self


class TransformersConfig(ModelFiles):
    """Any decoder of the transformers library whose class lets attention be replaced. Slower than a native model."""
